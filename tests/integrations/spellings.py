"""Norms as people spell them, for tests of the FX pass: by name, with the formula of each."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ..ops.helpers import EPS, FAMILY, GATED, LAYER, RMS, Form

N = 48
SIGMOID = FAMILY["gated_rms_norm, sigmoid"]


def mean(x):
    return x.mean(-1, keepdim=True)


def squares(x):
    return x.pow(2).mean(-1, keepdim=True)


def by_var_mean(x):
    variance, center = torch.var_mean(x, -1, correction=0, keepdim=True)
    return (x - center) * torch.rsqrt(variance + EPS)


def by_sums(x):
    center = torch.sum(x, -1, keepdim=True) / N
    return (x - center).div((((x - center) ** 2).sum(-1, True) / N + EPS).sqrt())


# x̂, by the name of its spelling.
LAYERS = {
    "mean of squares": lambda x: (x - mean(x)) / torch.sqrt(squares(x - mean(x)) + EPS),
    "var": lambda x: (x - mean(x)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + EPS),
    "var of centred": lambda x: (x - mean(x)) * ((x - mean(x)).var(-1, False, True) + EPS) ** -0.5,
    "var_mean": by_var_mean,
    "std": lambda x: (
        (x - mean(x)) / (torch.std(x, -1, correction=0, keepdim=True) ** 2 + EPS) ** 0.5
    ),
    "sums": by_sums,
}
RMSES = {
    "sum / n": lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / N + EPS),
    "1 / sqrt": lambda x: x * (1 / torch.sqrt(squares(x) + EPS)),
    "reciprocal": lambda x: torch.sqrt(mean(x * x) + EPS).reciprocal() * x,
    "/ sqrt": lambda x: x / (squares(x) + EPS).sqrt(),
    "** -0.5": lambda x: x * (squares(x) + EPS) ** -0.5,
    "true_divide": lambda x: torch.multiply(x, torch.true_divide(1, torch.sqrt(squares(x) + EPS))),
    "methods": lambda x: x * x.square().mean((-1,), True).add(EPS).rsqrt(),
    "power": lambda x: (x.pow(2).mean(-1, True) + EPS).pow(-0.5) * x,
    "unsqueeze": lambda x: x * torch.rsqrt(x.square().mean(-1) + EPS).unsqueeze(-1),
    "None": lambda x: x * torch.rsqrt(x.square().mean(-1) + EPS)[..., None],
    "norm": lambda x: x * (x.norm(dim=-1, keepdim=True) ** 2 / N + EPS).rsqrt(),
    "torch.norm": lambda x: x / (torch.norm(x, 2, -1, True).square() * (1 / N) + EPS).sqrt(),
    "linalg": lambda x: x / (torch.linalg.norm(x, dim=-1, keepdim=True).pow(2) / N + EPS).sqrt(),
}
# With eps = 0.
LENGTHS = {
    "norm": lambda x: x / (x.norm(dim=-1, keepdim=True) * N**-0.5),
    "vector_norm": lambda x: N**0.5 * (x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)),
    "normalize": lambda x: F.normalize(x, dim=-1, eps=0) * N**0.5,
}
AROUND = {
    "weight first": (RMS, lambda x, w, b: w * x / torch.sqrt(squares(x) + EPS) + b),
    "weight with the root": (RMS, lambda x, w, b: x * (torch.rsqrt(squares(x) + EPS) * w) + b),
    "scale last": (RMS, lambda x, w, b: b + x / (squares(x) * 4 + 4 * EPS).sqrt() * w * 2),
    "weight first, layer": (
        LAYER,
        lambda x, w, b: w * (x - mean(x)) / (x.var(-1, False, True) + EPS).sqrt() + b,
    ),
    "torch.rms_norm": (RMS, lambda x, w, b: torch.rms_norm(x, (N,), weight=w, eps=EPS) + b),
    "F.rms_norm * w": (RMS, lambda x, w, b: w * F.rms_norm(x, (N,), eps=EPS) + b),
    "F.layer_norm * w + b": (LAYER, lambda x, w, b: b + F.layer_norm(x, (N,), eps=EPS) * w),
    "silu": (GATED, lambda x, z, w, b: (F.rms_norm(x, (N,), w, EPS) + b) * F.silu(z)),
    "z sigmoid(z)": (
        GATED,
        lambda x, z, w, b: z * z.sigmoid() * (x * torch.rsqrt(squares(x) + EPS) * w + b),
    ),
    "sigmoid": (SIGMOID, lambda x, z, w, b: (RMSES["/ sqrt"](x) * w + b) * torch.sigmoid(z)),
    "silu, layer": (
        FAMILY["gated_layer_norm"],
        lambda x, z, w, b: F.silu(z) * F.layer_norm(x, (N,), w, b, EPS),
    ),
}


class Spelling(NamedTuple):
    form: Form
    function: Callable
    eps: float = EPS


SPELLINGS = {
    **{
        f"layer, {name}": Spelling(LAYER, lambda x, w, b, f=f: f(x) * w + b)
        for name, f in LAYERS.items()
    },
    **{
        f"rms, {name}": Spelling(RMS, lambda x, w, b, f=f: w * f(x) + b)
        for name, f in RMSES.items()
    },
    **{
        f"rms without eps, {name}": Spelling(RMS, lambda x, w, b, f=f: f(x) * w + b, 0.0)
        for name, f in LENGTHS.items()
    },
    **{name: Spelling(form, function) for name, (form, function) in AROUND.items()},
    "F.rms_norm without eps": Spelling(
        RMS, lambda x, w, b: F.rms_norm(x, (N,), w) + b, torch.finfo(torch.float32).eps
    ),
}


def module_of(function: Callable) -> nn.Module:
    module = nn.Module()
    module.forward = function
    return module
