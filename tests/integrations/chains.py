"""Norms and chains of operations that quantise them, for tests of the FX pass."""

import torch
import torch.nn.functional as F
from torch import nn

from ..ops.helpers import EPS, random

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
N = 256


def most(dtype):
    return torch.finfo(dtype).max


def factor_of(y, dim=-1, dtype=E4M3, eps=1e-12, limit=None, wide=F64):
    peak = torch.amax(torch.abs(y), dim=dim, keepdim=True).to(wide)
    return ((limit or most(dtype)) / torch.clamp(peak, min=eps)).to(F32)


def power_of_2(factor):
    return torch.exp2(torch.floor(torch.log2(factor)))


def coded(y, factor, dtype=E4M3):
    return (y.to(F32) * factor).clamp(min=-most(dtype), max=most(dtype)).to(dtype)


def row(y, s):
    factor = factor_of(y)
    return coded(y, factor), factor.reciprocal()


def row_power_of_2(y, s):
    factor = power_of_2(factor_of(y))
    return coded(y, factor), 1.0 / factor


def row_of_another_dtype(y, s):
    factor = factor_of(y.detach(), dtype=E5M2)
    return coded(y, factor, E5M2), factor.view(-1, 1).reciprocal()


def row_without_casts(y, s):
    peak = y.float().abs().max(-1, keepdim=True)[0]
    factor = (peak.double().clamp_min(1e-12).reciprocal() * 448.0).float()
    product = torch.mul(factor, y) if y.dtype == F32 else torch.mul(factor, y.float())
    return product.clamp_min(-448.0).clamp_max(448.0).to(E4M3), 1 / factor


def power_of_2_kept(y, s):
    """The factor of encoding is a result."""
    factor = power_of_2(factor_of(y))
    return coded(y, factor), factor, factor.reciprocal()


def codes_alone(y, s):
    return (coded(y, factor_of(y)),)


def block(y, s):
    """As torchao's reference of the 1×128 cast."""
    groups = y.reshape(-1, 128)
    peak = groups.abs().max(dim=1, keepdim=True).values.to(F64)
    factor = (448.0 / torch.clamp(peak, min=1e-12, max=float("inf"))).to(F32)
    q = (groups * factor).clamp(min=-448.0, max=448.0).to(E4M3).reshape(y.shape)
    return q, 1.0 / factor.reshape(-1, y.shape[-1] // 128).to(torch.float)


def block_power_of_2(y, s):
    groups = y.unflatten(-1, (-1, 128))
    factor = power_of_2(factor_of(groups, dtype=E5M2))
    return coded(groups, factor, E5M2), factor.squeeze(-1)


def static(y, s):
    return ((y.float() * s.reciprocal()).clamp(-448.0, 448.0).to(E4M3),)


def static_quotient(y, s):
    return (coded(y, 1.0 / s, E5M2),)


CHAINS = {
    f.__name__: f
    for f in (
        *(row, row_power_of_2, row_of_another_dtype, row_without_casts, power_of_2_kept),
        *(codes_alone, block, block_power_of_2, static, static_quotient),
    )
}
NORMS = {
    "rms_norm": lambda f, x, r, w: f.rms_norm(x, (N,), w, EPS),
    "layer_norm": lambda f, x, r, w: f.layer_norm(x, (N,), w, eps=EPS),
    "add_rms_norm": lambda f, x, r, w: f.rms_norm(x + r, (N,), w, EPS),
    "add_layer_norm": lambda f, x, r, w: f.layer_norm(x + r, (N,), w, eps=EPS),
}


class Quantized(nn.Module):
    """A norm and a chain. more: other results that are made of y."""

    def __init__(self, chain, norm="rms_norm", functions=F, more=lambda y: ()):
        super().__init__()
        self.chain, self.norm, self.functions, self.more = chain, norm, functions, more

    def forward(self, x, r, w, s):
        y = NORMS[self.norm](self.functions, x, r, w)
        return *self.chain(y, s), *self.more(y)


def inputs(*shape, dtype=BF16):
    x, r = random(*shape, N, dtype=dtype), random(*shape, N, dtype=dtype, seed=1)
    x.view(-1, N)[0] = r.view(-1, N)[0] = 0.0
    return x, r, random(N, dtype=dtype, seed=2), torch.tensor([0.0123])


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        kind = torch.uint8 if a.dtype.itemsize == 1 else a.dtype
        assert torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def keeps_factor(y, s):
    return coded(y, factor := factor_of(y)), factor


def groups_of_64(y, s):
    groups = y.view(-1, 64)
    return (coded(groups, factor_of(groups)),)


def scale_of_y(y, s):
    scale = y.float().abs().amax().view(1) / 448.0
    return (coded(y, 1.0 / scale),)


def written_before(y, s):
    factor = factor_of(y)
    y.mul_(2)
    return (coded(y, factor),)


# Chains that no op computes, with the reason.
LEFT = {
    "keeps its factor": (keeps_factor, "uses its factor"),
    "in float32": (lambda y, s: (coded(y, factor_of(y, wide=F32)),), "float32"),
    "another eps": (
        lambda y, s: (coded(y, factor_of(y, eps=1e-4)),),
        "is not clamped to at least 1e-12",
    ),
    "another limit": (
        lambda y, s: (coded(y, factor_of(y, limit=240.0)),),
        "is not 448 divided by",
    ),
    "unclamped": (lambda y, s: ((y.float() * factor_of(y)).to(E4M3),), "not clamped to ±448"),
    "groups of 64": (groups_of_64, "its groups have 64 elements"),
    "columns": (lambda y, s: (coded(y, factor_of(y, 0)),), "does not reduce the last dimensions"),
    "of another tensor": (lambda y, s: (coded(y, factor_of(y * 2)),), "its factor is made of"),
    "quotient": (
        lambda y, s: ((y.float() / s).clamp(-448.0, 448.0).to(E4M3),),
        "divides by its scale",
    ),
    "given factor": (lambda y, s: (coded(y, s),), "is given; the op takes 1 / factor"),
    "scale of y": (scale_of_y, "is computed after the norm"),
    "in 16 bits": (
        lambda y, s: ((y * s.to(y.dtype)).clamp(-448.0, 448.0).to(E4M3),),
        "not float32",
    ),
    "a cast alone": (lambda y, s: (y.to(E4M3),), "is no product"),
    "written before": (written_before, "may write to a tensor"),
}
