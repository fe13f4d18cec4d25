"""Modulated norms as models write them, for tests of the FX pass and of patch.

The blocks compute what diffusers' blocks of these models compute between their layers; linear
layers stand for attention and MLP.
"""

from collections.abc import Callable
from random import Random
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.helpers import EPS, random

N, BATCH, TOKENS = 48, 2, 6


def norm_of(affine: bool = False) -> nn.LayerNorm:
    return nn.LayerNorm(N, eps=EPS, elementwise_affine=affine)


class Float32LayerNorm(nn.LayerNorm):
    """Computes in float32, as Wan's does, whatever the input's dtype."""

    def forward(self, x):
        wide = [None if p is None else p.float() for p in (self.weight, self.bias)]
        return F.layer_norm(x.float(), self.normalized_shape, *wide, self.eps).to(x.dtype)


class AdaptiveNorm(nn.Module):
    """A norm and its modulation, and `more` other chunks of the projection of an embedding."""

    def __init__(self, more: int):
        super().__init__()
        self.norm, self.linear = norm_of(), nn.Linear(N, (2 + more) * N)
        self.chunks = 2 + more

    def forward(self, x, emb):
        shift, scale, *others = self.linear(F.silu(emb)).chunk(self.chunks, dim=1)
        x = self.norm(x) * (1 + scale[:, None]) + shift[:, None]
        return x, *others


class DiT(nn.Module):
    """Also SD3 and the image stream of Flux."""

    def __init__(self):
        super().__init__()
        self.before, self.after = AdaptiveNorm(4), norm_of()
        self.attention, self.mlp = nn.Linear(N, N), nn.Linear(N, N)

    def forward(self, x, emb):
        normed, gate, shift, scale, last = self.before(x, emb)
        h = gate.unsqueeze(1) * self.attention(normed)
        x = h + x
        normed = self.after(x)
        normed = normed * (1 + scale[:, None]) + shift[:, None]
        h = last.unsqueeze(1) * self.mlp(normed)
        return h + x


class Wan(nn.Module):
    """The modulation is in float32. The second norm has none."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(random(1, 6, N, seed=3) / N**0.5)
        self.norm1, self.norm3 = (Float32LayerNorm(N, EPS, False) for _ in range(2))
        self.norm2 = Float32LayerNorm(N, EPS)
        self.attention, self.cross, self.mlp = (nn.Linear(N, N) for _ in range(3))
        self.time = nn.Linear(N, 6 * N)

    def forward(self, x, emb):
        time = self.time(emb).unflatten(1, (6, -1))
        parts = (self.table + time.float()).chunk(6, dim=1)
        shift, scale, gate, shift2, scale2, gate2 = parts
        normed = (self.norm1(x.float()) * (1 + scale) + shift).type_as(x)
        x = (x.float() + self.attention(normed) * gate).type_as(x)
        normed = self.norm2(x.float()).type_as(x)
        x = x + self.cross(normed)
        normed = (self.norm3(x.float()) * (1 + scale2) + shift2).type_as(x)
        return (x.float() + self.mlp(normed).float() * gate2).type_as(x)


class Last(nn.Module):
    """diffusers' AdaLayerNormContinuous."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = norm_of(), nn.Linear(N, 2 * N)

    def forward(self, x, emb):
        scale, shift = torch.chunk(self.linear(F.silu(emb).to(x.dtype)), 2, dim=1)
        return self.norm(x) * (1 + scale)[:, None, :] + shift[:, None, :]


class Lumina(nn.Module):
    """An RMSNorm without shift."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(N, eps=EPS), nn.Linear(N, 2 * N)

    def forward(self, x, emb):
        scale, gate = self.linear(F.silu(emb)).chunk(2, dim=1)
        return x + gate.unsqueeze(1) * (self.norm(x) * (1 + scale[:, None]))


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x, emb):
        for block in self.blocks:
            x = block(x, emb)
        return x


LAYER, RESIDUAL, GATED = (
    f"modulated_layer_norm{more}" for more in ("", " with residual", " with residual and gate")
)
RMS = "modulated_rms_norm"
# The kinds of op that a stack of blocks becomes.
MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "DiT": (lambda: Stack(DiT(), DiT(), Last()), [LAYER, *[GATED] * 4]),
    "Wan": (
        lambda: Stack(Wan(), Wan(), Last()),
        [LAYER, "layer_norm", RESIDUAL, GATED, "layer_norm", RESIDUAL, GATED],
    ),
    "Lumina": (lambda: Stack(Lumina(), Lumina()), [RMS, f"{RMS} with residual and gate"]),
}


def model_and_inputs(name: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    module = MODELS[name][0]().to(dtype)
    for part in module.modules():
        if isinstance(part, Wan):  # as diffusers keeps it
            part.table.data = part.table.data.float()
    return module, random(BATCH, TOKENS, N, dtype=dtype), random(BATCH, N, dtype=dtype, seed=1)


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
