"""Modulated norms as models write them, for tests of the FX pass."""

from collections.abc import Callable
from random import Random
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.calls import EPS, random

N, BATCH, TOKENS = 48, 2, 6


LAYER, GATED = "modulated_layer_norm", "modulated_layer_norm with residual and gate"


def gated(x, residual, gate, scale):
    s = residual + gate[:, None] * x
    return F.layer_norm(s, (N,), eps=EPS) * (1 + scale[:, None]), s


class Drawn(NamedTuple):
    """A drawn spelling. name: for messages. op: what it becomes. tensors: its arguments."""

    name: str
    op: str
    function: Callable
    tensors: tuple[Tensor, ...]


# What lies by group as it is stored, and how it comes beside x, of shape (BATCH, TOKENS, N).
VIEWS = {
    "[:, None]": ((BATCH,), lambda t: t[:, None]),
    "[:, None, :]": ((BATCH,), lambda t: t[:, None, :]),
    "unsqueeze": ((BATCH,), lambda t: t.unsqueeze(1)),
    "view": ((BATCH,), lambda t: t.view(BATCH, 1, N)),
    "as it is": ((BATCH, 1), lambda t: t),
    "by token": ((BATCH, TOKENS), lambda t: t),
    "squeeze": ((BATCH, TOKENS, 1), lambda t: t.squeeze(2)),
    "one": ((1, 1), lambda t: t),
    "one row": ((), lambda t: t[None, None]),
}


def chunk(tensors: Tensor, place: int) -> Tensor:
    return tensors.chunk(3, -1)[place]


def drawn(rng: Random) -> Drawn:
    dtype = rng.choice((torch.float32, torch.bfloat16, torch.float16))
    own = rng.choice((dtype, torch.float32))
    groups, view = VIEWS[label := rng.choice(list(VIEWS))]
    norm = rng.choice(("rms", "layer", "rms, written out"))
    cast, affine, shifted = rng.random() < 0.5, rng.random() < 0.5, rng.random() < 0.8
    before = rng.choice(("x", "residual", "gated"))
    swap = [rng.random() < 0.5 for _ in range(5)]
    one, late = rng.choice((1, 1.0)), rng.random() < 0.3

    def both(a, b, place):
        return (b, a) if swap[place] else (a, b)

    def plus_one(t):
        return one + t if swap[0] else t + one

    def function(x, residual, by_group, weight, bias):
        scale, shift, gate = (chunk(by_group, i) for i in range(3))
        if cast:
            scale, shift, gate = scale.float(), shift.float(), gate.float()
        s = x
        if before == "gated":
            a, b = both(view(gate), x, 1)
            s = a * b
        if before != "x":
            a, b = both(residual.float() if cast else residual, s, 2)
            s = (a + b).to(x.dtype)
        u = s.float() if cast else s
        if norm == "layer":
            y = F.layer_norm(u, (N,), eps=EPS)
        elif norm == "rms":
            y = F.rms_norm(u, (N,), eps=EPS)
        else:
            wide = u.float()
            y = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(u.dtype)
        if affine:
            y = y * weight.to(u.dtype) + bias.to(u.dtype)
        factor = view(plus_one(scale)) if late else plus_one(view(scale))
        a, b = both(y, factor, 3)
        y = a * b
        if shifted:
            a, b = both(y, view(shift), 4)
            y = a + b
        return y.to(x.dtype), s

    rows = [random(BATCH, TOKENS, N, dtype=dtype, seed=seed) for seed in (0, 1)]
    by_group = random(*groups, 3 * N, dtype=own, seed=2)
    affines = [random(N, dtype=dtype, seed=seed) for seed in (3, 4)]
    more = {"x": "", "residual": " with residual", "gated": " with residual and gate"}[before]
    kind = f"modulated_{norm[:3].replace('lay', 'layer')}_norm{more}"
    name = f"{norm}, {label}, {dtype}, {own}, {before}, cast {cast}, affine {affine}, late {late}"
    return Drawn(name, kind, function, (*rows, by_group, *affines))
