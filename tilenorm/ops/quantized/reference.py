"""The reference of quantised norms, in PyTorch operations: the norm's reference, and the cast."""

import torch
from torch import Tensor

from ...launch.scales import TILE_GROUPS, TILE_ROWS, Scales
from ...spec import FP8, NormSpec, Quantization
from .. import reference
from ..tensors import Tensors
from .tensors import Results, q_dtype, scale_of

SMALLEST = 1e-12  # a group whose largest magnitude is smaller has the factor of this
FIELD = 23  # the bits of float32's mantissa
MANTISSA = (1 << FIELD) - 1


def forward(spec: NormSpec, tensors: tuple, eps: float) -> Results:
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
    q = (v * factor).clamp(-most, most).to(q_dtype(spec)).reshape(y.shape)
    amax = None
    if how.amax:
        amax = v.abs().amax().reshape(1) if v.numel() else v.new_zeros(1)
    return q, scale, amax


def _factor(how: Quantization, peak: Tensor) -> tuple[Tensor, Tensor]:
    # A number divided by a tensor would be the number times the tensor's reciprocal.
    factor = torch.full_like(peak, FP8[how.dtype]) / peak.clamp(min=SMALLEST)
    if how.power_of_2:
        power = (factor.view(torch.int32) & ~MANTISSA).view(torch.float32)
        factor = torch.where(factor.isnan(), factor, power)
    return factor, torch.ones_like(factor) / factor


def _mx(how: Quantization, peak: Tensor) -> tuple[Tensor, Tensor]:
    inverse = torch.tensor(1.0 / FP8[how.dtype], dtype=torch.float32, device=peak.device)
    bits = (peak * inverse).view(torch.int32)
    exponent = (bits >> FIELD) + ((bits & MANTISSA) != 0)
    exponent = exponent.clamp(max=255)
    factor = ((254 - exponent) << FIELD).view(torch.float32)
    factor = torch.where(exponent == 255, torch.nan, factor)
    return factor, exponent.to(torch.uint8)


def _laid_out(how: Quantization, hidden: int, scale: Tensor) -> Tensor:
    """The scales (rows, groups) in their layout."""
    rows, groups = scale.shape
    scales = Scales.of(how, hidden, rows)
    array = torch.zeros(scales.count, dtype=scale.dtype, device=scale.device)
    if how.layout == "swizzled":
        row = torch.arange(rows, device=scale.device)[:, None]
        group = torch.arange(groups, device=scale.device)
        tile = row // TILE_ROWS * -(-groups // TILE_GROUPS) + group // TILE_GROUPS
        inside = row % 32 * 16 + row % TILE_ROWS // 32 * TILE_GROUPS + group % TILE_GROUPS
        array[tile * (TILE_ROWS * TILE_GROUPS) + inside] = scale
    else:
        array.as_strided(scales.shape, scales.strides).copy_(scale)
    return scale_of(array, scales)
