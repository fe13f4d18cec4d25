"""The oracle of quantised norms: the codes and the scales of given rows, bit for bit."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilenorm.ops.passes.quantize import QuantizedNorm
from tilenorm.spec import FP8, GROUPS, LAYOUTS, Quantization

MX = torch.float8_e8m0fnu
# Every scaling with each of its layouts, and everything else in turns.
HOWS = [
    Quantization("row"),
    Quantization("row", "float8_e5m2", True, output=True),
    Quantization("block", layout="column", output=True, amax=True),
    Quantization("block", "float8_e5m2", layout="column_tma"),
    Quantization("block", power_of_2=True, layout="row", amax=True),
    Quantization("mx", amax=True),
    Quantization("mx", "float8_e5m2", layout="swizzled", output=True),
    Quantization("tensor", output=True, amax=True),
    Quantization("tensor", "float8_e5m2"),
]


class Codes(NamedTuple):
    """scale: (rows, groups) float32, or float64 powers of two for MX; None for a given scale."""

    q: Tensor
    scale: Tensor | None
    amax: Tensor


def arguments(how: Quantization, device="cpu") -> dict:
    """What the public functions take for it."""
    names = ("scaling", "dtype", "power_of_2", "layout", "return_output", "return_amax")
    asked = dict(zip(names, how, strict=True))
    scale = torch.full((1,), 0.0123, device=device) if how.scaling == "tensor" else None
    return asked | {"dtype": getattr(torch, how.dtype), "scale": scale}


def codes(how: Quantization, rows: Tensor, given: Tensor | None = None) -> Codes:
    """Of rows (M, N). Quotients are computed in float64 and rounded once."""
    most, dtype = FP8[how.dtype], getattr(torch, how.dtype)
    count, hidden = rows.shape
    groups = how.groups(hidden) or 1
    v = rows.reshape(count, groups, hidden // groups).float()
    peak = v.abs().double().amax(-1, keepdim=True)
    scale = None
    if given is not None:
        factor = (1.0 / given.double()).float()
    elif how.scaling == "mx":
        scale = mx_scale(peak * f32(1 / most))
        factor = torch.where(scale.isnan(), torch.nan, 1.0 / scale).float()
    else:
        factor = (most / peak.clamp(min=f32(1e-12))).float()
        if how.power_of_2:
            fraction, exponent = torch.frexp(factor)
            power = torch.ldexp(torch.ones_like(factor), exponent - 1)
            factor = torch.where(factor.isfinite() & (fraction != 0), power, factor)
        scale = (1.0 / factor.double()).float()
    q = (v * factor).clamp(-most, most).to(dtype).reshape(rows.shape)
    amax = v.abs().amax().reshape(1) if v.numel() else v.new_zeros(1)
    return Codes(q, scale if scale is None else scale[..., 0], amax)


def f32(number: float) -> float:
    return torch.tensor(number, dtype=torch.float64).float().item()


def mx_scale(quotient: Tensor) -> Tensor:
    """The smallest powers of two that are not below quotients, or 2^-127 for 0. Others are at least
    2^-126, because the mantissa of a number without an exponent counts as one.
    """
    quotient = quotient.float().double()
    fraction, exponent = torch.frexp(quotient)
    power = (exponent - (fraction == 0.5).int()).clamp(min=-126)
    scale = torch.ldexp(torch.ones_like(fraction), power)
    scale = torch.where(fraction == 0, 2.0**-127, scale)
    return torch.where(quotient.isfinite(), scale, torch.nan)


def swizzled(scale: Tensor) -> Tensor:
    """Scales (rows, groups) in tiles of 128 rows and 4 groups, zeros around; as torchao's
    to_blocked has them."""
    rows, groups = scale.shape
    high, wide = -(-rows // 128), -(-groups // 4)
    padded = scale.new_zeros(high * 128, wide * 4)
    padded[:rows, :groups] = scale
    tiles = padded.reshape(high, 4, 32, wide, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1)


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor of any strides."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    return flat.copy_(tensor.reshape(-1)).view(torch.uint8)


def check(how: Quantization, found: QuantizedNorm, y: Tensor, hidden: int, given=None) -> None:
    """That what a quantised norm returned is the quantisation of y."""
    rows = y.numel() // hidden
    expected = codes(how, y.reshape(rows, hidden), given)
    assert found.q.shape == y.shape and found.q.is_contiguous()
    nan = expected.q.float().isnan()
    assert torch.equal(found.q.float().isnan().reshape(nan.shape), nan)
    same = bits(found.q) == bits(expected.q)
    assert (same | nan.flatten()).all()
    check_scale(how, found.scale, expected.scale, given)
    for asked, value, wanted in (
        (how.amax, found.amax, expected.amax),
        (how.output, found.output, y),
    ):
        assert (value is not None) == asked
        if asked:
            assert value.dtype == wanted.dtype
            assert torch.equal(value.nan_to_num(nan=-1.0), wanted.nan_to_num(nan=-1.0))


def check_scale(how: Quantization, scale: Tensor, expected: Tensor | None, given) -> None:
    if how.scaling == "tensor":
        assert scale is given
        return
    rows, groups = expected.shape
    if how.scaling == "mx":
        assert scale.dtype == MX
        scale = scale.view(torch.uint8).int()
        # log2 of a GPU rounds; 2^e is 0.5 · 2^(e + 1).
        exponents = torch.where(expected.isnan(), 255, torch.frexp(expected.double())[1] + 126)
        exponents = swizzled(exponents) if how.layout == "swizzled" else exponents
        assert torch.equal(scale, exponents)
        return
    assert scale.dtype == torch.float32 and scale.shape == (rows, groups)
    apart = {"column": rows, "column_tma": -(-rows // 4) * 4}.get(how.layout)
    assert scale.stride() == ((groups, 1) if apart is None else (1, apart))
    assert torch.equal(scale.nan_to_num(nan=-1.0, posinf=-2.0), expected.nan_to_num(-1.0, -2.0))


def label(how: Quantization) -> str:
    return how.label.replace("float8_", "").replace(" ", "-")


assert {(h.scaling, h.layout) for h in HOWS} == {(s, n) for s in GROUPS for n in LAYOUTS[s]}
