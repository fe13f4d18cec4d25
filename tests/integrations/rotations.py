"""Norms of queries and keys with their rotary embedding, as Hugging Face writes them."""

from collections.abc import Callable
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from tests.support.calls import EPS, random

BATCH, TOKENS, HEADS, KEYS, D = 2, 5, 4, 2, 16


def rotate_half(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def rotate(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (q * cos) + (rotate_half(q) * sin)


def normalised(x: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)


# How a norm applies its weight, in which dtypes.
NORMS: dict[str, Callable] = {
    "Qwen 3": lambda x, w: w * normalised(x).to(x.dtype),
    "Gemma 3": lambda x, w: (normalised(x) * (1.0 + w.float())).type_as(x),
    "OLMo 2": lambda x, w: (w * normalised(x)).to(x.dtype),
    "no weight": lambda x, w: normalised(x).to(x.dtype),
}
EARLY = ("Qwen 3", "no weight")


def split(x: Tensor) -> Tensor:
    return x.view(BATCH, TOKENS, -1, D)


# From a projection (BATCH, TOKENS, heads · D) to rotated heads: where the norm stands, and whether
# heads are behind tokens.
LAYOUTS: dict[str, tuple[Callable, int]] = {
    "norm, transpose": (lambda x, norm: norm(split(x)).transpose(1, 2), 1),
    "transpose, norm": (lambda x, norm: norm(split(x).transpose(1, 2)), 1),
    "norm, permute": (lambda x, norm: norm(split(x)).permute(0, 2, 1, 3), 1),
    "of tokens": (lambda x, norm: split(norm(x)).transpose(1, 2), 1),
    "heads last": (lambda x, norm: norm(split(x)), 2),
}


class Drawn(NamedTuple):
    """name: for messages. function: of tensors. exact: whether the op has its bits."""

    name: str
    function: Callable
    tensors: tuple[Tensor, ...]
    exact: bool


def drawn(rng: Random) -> Drawn:
    dtype = rng.choice((torch.float32, torch.bfloat16, torch.float16))
    table = rng.choice((dtype, dtype, torch.float32))
    norm, (layout, heads) = rng.choice(list(NORMS)), LAYOUTS[label := rng.choice(list(LAYOUTS))]
    batch, packed = rng.choice((1, BATCH)), rng.random() < 0.5
    cast = table != dtype

    def function(qkv, w, wk, cos, sin):
        q, k = qkv[..., : HEADS * D], qkv[..., HEADS * D : (HEADS + KEYS) * D]
        q, k = (q, k) if packed else (q * 1, k * 1)
        cos, sin = cos.unsqueeze(heads), sin.unsqueeze(heads)
        q, k = layout(q, lambda x: NORMS[norm](x, w)), layout(k, lambda x: NORMS[norm](x, wk))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return (q.to(dtype), k.to(dtype)) if cast else (q, k)

    sizes = (HEADS * D, KEYS * D) if label == "of tokens" else (D, D)
    weights = [random(n, dtype=dtype, seed=seed) for seed, n in enumerate(sizes)]
    angles = random(batch, TOKENS, D // 2, seed=5).repeat(1, 1, 2)
    tables = [t.to(table) for t in (angles.cos(), angles.sin())]
    qkv = random(BATCH, TOKENS, (HEADS + 2 * KEYS) * D, dtype=dtype, seed=6)
    exact = dtype == torch.float32 or (not cast and norm in EARLY)
    name = f"{norm}, {label}, {dtype}, tables {table} of {batch}, packed {packed}"
    return Drawn(name, function, (qkv, *weights, *tables), exact)
