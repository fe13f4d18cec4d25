"""The cast of normalised rows to 8-bit floats with scales, in PyTorch operations."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...launch.scales import TILE_GROUPS, TILE_ROWS, Scales
from ...spec import FP8, NormSpec, Quantization
from ...table import OPS
from ..pytorch.sizes import known
from .reading import shown_as

SMALLEST = 1e-12  # a group whose largest magnitude is smaller has the factor of this
FIELD = 23  # the bits of float32's mantissa
MANTISSA = (1 << FIELD) - 1
# The dtypes that PyTorch has for the arrays that the kernels write.
SCALE_DTYPES = {"float32": torch.float32, "uint8": torch.float8_e8m0fnu}


class QuantizedNorm(NamedTuple):
    """What a quantised norm returns. What was not asked for is None.

    q: the codes, of the input's shape. scale: what a group's codes are multiplied by to get its
    numbers back. output: the normalised rows before they are quantised. amax: their largest
    magnitude, float32 (1,). residual_out: input + residual, of the functions that take a residual.
    """

    q: Tensor
    scale: Tensor
    output: Tensor | None = None
    amax: Tensor | None = None
    residual_out: Tensor | None = None

    @classmethod
    def of(cls, op: str, results: Sequence, scale: Tensor | None) -> "QuantizedNorm":
        """Of the name of an op, its results, and the caller's scale."""
        by_role = dict(zip(OPS[op].made, results, strict=False))  # users get no statistics
        own_scale = by_role["scale"] if scale is None else scale
        rows = by_role["y"], by_role["amax"], by_role.get("sum")
        return cls(by_role["q"], own_scale, *rows)


def quantize(
    spec: NormSpec, y: Tensor, given_scale: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """q, the scales unless the caller gives one, and the largest magnitude if it is asked for."""
    how, most = spec.quantized, FP8[spec.quantized.dtype]
    rows = y.numel() // spec.hidden
    groups = how.groups(spec.hidden) or 1
    v = y.detach().reshape(rows, groups, spec.hidden // groups).float()
    scale = None
    if given_scale is not None:
        factor = torch.ones_like(given_scale) / given_scale
    else:
        peak = v.abs().amax(-1, keepdim=True)
        factor, scale = (_mx if how.scaling == "mx" else _factor)(how, peak)
        scale = _laid_out(how, spec.hidden, scale[..., 0])
    # PyTorch's own cast does not saturate before 2.12. The clamp keeps NaN.
    # In this order, because ONNX Runtime reshapes no 8-bit floats.
    q = (v * factor).clamp(-most, most).reshape(y.shape).to(getattr(torch, how.dtype))
    amax = None
    if how.amax:
        if known(v.numel() > 0):
            amax = v.abs().amax((0, 1, 2)).reshape(1)
        else:  # of no rows it is 0
            amax = torch.cat((v.abs().flatten(), v.new_zeros(1))).amax().reshape(1)
    return q, scale, amax


def with_codes(spec: NormSpec, results: dict, given_scale: Tensor | None) -> dict:
    """The results of a norm by their roles, with those of quantize. given_scale: the
    caller's.
    """
    q, scale, amax = quantize(spec, results["y"], given_scale)
    y = results["y"] if spec.quantized.output else None
    return results | {"q": q, "scale": scale, "amax": amax, "y": y}


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


def scale_of(array: Tensor, scales: Scales) -> Tensor:
    """The tensor that the caller gets, of the array that the kernels write."""
    return shown_as(array, scales.shape, scales.strides, SCALE_DTYPES[scales.dtype])
