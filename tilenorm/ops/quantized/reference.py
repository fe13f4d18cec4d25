"""The reference of quantised norms, in PyTorch operations: the norm's reference, and the cast."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...launch.scales import TILE_GROUPS, TILE_ROWS, Scales
from ...spec import FP8, NormSpec, Quantization
from .. import reference
from ..tensors import Tensors
from .tensors import Results, q_dtype, scale_of

SMALLEST = 1e-12  # a group whose largest magnitude is smaller has the factor of this
FIELD = 23  # the bits of float32's mantissa
MANTISSA = (1 << FIELD) - 1


def forward(spec: NormSpec, tensors: tuple, eps: float, _laid_out: bool = False) -> Results:
    """tensors: Tensors, and the scale that the caller gives, or None."""
    y, *others = reference.forward(spec.unquantized, Tensors(*tensors[:-1]), eps)
    q, scale, amax = quantize(spec, y, tensors[-1])
    return Results(q, scale, amax, y if spec.quantized.output else None, *others)


def quantize(
    spec: NormSpec, y: Tensor, given: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """q, the scales unless the caller gives one, and the largest magnitude if it is asked for."""
    how, most = spec.quantized, FP8[spec.quantized.dtype]
    rows = y.numel() // spec.hidden
    groups = how.groups(spec.hidden) or 1
    v = y.detach().reshape(rows, groups, spec.hidden // groups).float()
    scale = None
    if given is not None:
        factor = torch.ones_like(given) / given
    else:
        peak = v.abs().amax(-1, keepdim=True)
        factor, scale = (_mx if how.scaling == "mx" else _factor)(how, peak)
        scale = _laid_out(how, spec.hidden, scale[..., 0])
    # PyTorch's own cast does not saturate before 2.12. The clamp keeps NaN.
    # In this order, because ONNX Runtime reshapes no 8-bit floats.
    q = (v * factor).clamp(-most, most).reshape(y.shape).to(q_dtype(spec))
    amax = None
    if how.amax:
        amax = v.abs().amax((0, 1, 2)).reshape(1) if v.numel() else v.new_zeros(1)
    return q, scale, amax


def _factor(how: Quantization, peak: Tensor) -> tuple[Tensor, Tensor]:
    # A number divided by a tensor would be the number times the tensor's reciprocal.
    factor = torch.full_like(peak, FP8[how.dtype]) / peak.clamp(min=SMALLEST)
    if how.power_of_2:
        power = (factor.view(torch.int32) & ~MANTISSA).view(torch.float32)
        factor = torch.where(factor.isnan(), factor, power)
    return factor, torch.ones_like(factor) / factor


def _mx(how: Quantization, peak: Tensor) -> tuple[Tensor, Tensor]:
    bits = (peak * torch.full_like(peak, 1.0 / FP8[how.dtype])).view(torch.int32)
    exponent = (bits >> FIELD) + ((bits & MANTISSA) != 0)
    exponent = exponent.clamp(max=255)
    factor = ((254 - exponent) << FIELD).view(torch.float32)
    factor = torch.where(exponent == 255, torch.nan, factor)
    return factor, exponent.to(torch.uint8)


def _laid_out(how: Quantization, hidden: int, scale: Tensor) -> Tensor:
    """The scales (rows, groups) in their layout. A decomposition writes into no tensor."""
    rows, groups = scale.shape
    if how.layout == "swizzled":
        scale = pad(scale, (0, -groups % TILE_GROUPS, 0, -rows % TILE_ROWS))
        across = scale.shape[1] // TILE_GROUPS
        tiles = scale.reshape(-1, TILE_ROWS // 32, 32, across, TILE_GROUPS)
        scale = tiles.permute(0, 3, 2, 1, 4)
    elif how.layout != "row":
        scale = pad(scale.t(), (0, -rows % 4 if how.layout == "column_tma" else 0))
    return scale_of(scale.reshape(-1), Scales.of(how, hidden, rows))
