"""Norms as people spell them, for tests of the FX pass: by name, with the formula of each."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.calls import EPS, FAMILY, GATED, LAYER, RMS, Form

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
}
AROUND = {
    "weight first": (RMS, lambda x, w, b: w * x / torch.sqrt(squares(x) + EPS) + b),
    "weight with the root": (RMS, lambda x, w, b: x * (torch.rsqrt(squares(x) + EPS) * w) + b),
    "scale last": (RMS, lambda x, w, b: b + x / (squares(x) * 4 + 4 * EPS).sqrt() * w * 2),
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


SPELLINGS = {
    f"layer, {n}": Spelling(LAYER, lambda x, w, b, f=f: f(x) * w + b) for n, f in LAYERS.items()
}
SPELLINGS |= {
    f"rms, {n}": Spelling(RMS, lambda x, w, b, f=f: w * f(x) + b) for n, f in RMSES.items()
}
SPELLINGS |= {name: Spelling(*row) for name, row in AROUND.items()}


def every_spelling(input, gate, weight, bias) -> list[Tensor]:
    """Each in float32. One graph with all takes a tenth of the time of a graph for each."""
    results = []
    for form, function in SPELLINGS.values():
        tensors = (input, gate, weight, bias) if form.other else (input, weight, bias)
        results.append(function(*(t.float() for t in tensors)).to(input.dtype))
    return results
