"""RMSNorm of the heads of queries and keys with rotary embedding, as in attention."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.op import DTYPES, EPS, Case, Op
from tilenorm.launch.calls import Sizes
from tilenorm.spec import NormSpec, Rotation


def _eager(q, k, cos, sin, weight, key_weight):
    """q and k of shape (B, S, H, D), by the operations of Hugging Face's models."""

    def rotated(x: Tensor, weight: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        y = (weight * normed.to(x.dtype)).transpose(1, 2)
        first, second = y.chunk(2, -1)
        y = y * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)
        return y.transpose(1, 2)

    return rotated(q, weight), rotated(k, key_weight)


class Rotated(Op):
    """A case's M counts the heads of q and of k of all tokens, and its groups are samples.

    q and k are views of one projection (B, S, (H + 2 · key's H) · D), and cos and sin have the
    shape (1, S, D) and the dtype of q.
    """

    ways = ("call",)
    axis = 1
    trained = ("q", "k", "weight", "key_weight")

    def shapes(self, case: Case) -> dict[str, tuple[int, ...]]:
        tokens = case.groups, case.m // (case.groups * self.unit)
        by_name = dict.fromkeys(("q", "y"), (*tokens, self.heads, case.n))
        by_name |= dict.fromkeys(("k", "key_y"), (*tokens, self.key_heads, case.n))
        by_name |= dict.fromkeys(("cos", "sin"), (1, tokens[1], case.n))
        return by_name | dict.fromkeys(self.columns, (case.n,))

    def spec(self, case: Case, **fields) -> NormSpec:
        dtype = case.dtype
        fields |= {"key": dtype, "rotation": Rotation(case.n, case.n, table=dtype)}
        columns = dict.fromkeys(self.columns, dtype)
        return NormSpec.of(self.name.split()[0], case.n, dtype, **columns, **fields)

    def sizes(self, case: Case) -> Sizes:
        tokens = case.m // (case.groups * self.unit)
        return Sizes(case.groups, tokens, self.heads, self.key_heads)

    def small(self, n: int) -> Case:
        return super().small(128)

    def made(self, case: Case, device: str) -> list[Tensor]:
        make = torch.Generator(device).manual_seed(case.m * case.n + case.n)
        like: dict[str, Any] = {"generator": make, "device": device}
        shapes, dtype = self.shapes(case), DTYPES[case.dtype]
        heads = self.heads, self.key_heads, self.key_heads
        packed = torch.randn(*shapes["q"][:2], sum(heads), case.n, **like).to(dtype)
        q, k, _ = packed.split(heads, 2)
        frequencies = 1e4 ** -torch.linspace(0, 1, case.n // 2, device=device)
        angles = torch.arange(shapes["cos"][1], device=device)[:, None] * frequencies
        angles = torch.cat((angles, angles), -1)[None]
        weights = [(0.25 + 0.5 * torch.rand(case.n, **like)).to(dtype) for _ in self.columns]
        q, k, *weights = (x.requires_grad_() for x in (q, k, *weights))
        return [q, k, angles.cos().to(dtype), angles.sin().to(dtype), *weights]


def _op(heads: int, key_heads: int) -> Rotated:
    rows, columns = ("q", "k", "cos", "sin"), ("weight", "key_weight")
    name, how = f"rms_norm_rope {heads}/{key_heads}", {"heads": heads, "key_heads": key_heads}
    return Rotated(name, _eager, rows, columns, ("y", "key_y"), **how)


# The heads of Qwen 3 8B, Qwen 3 32B and Gemma 3 12B.
ROTATED = (_op(32, 8), _op(64, 8), _op(16, 8))
# (op, elements of a head): the models', and heads of 64.
SIZES = ((ROTATED[0], 128), (ROTATED[1], 128), (ROTATED[2], 256), (ROTATED[0], 64))


def tilenorm(op: Rotated) -> Callable:
    import tilenorm as tn

    return lambda q, k, cos, sin, weight, key_weight: tn.rms_norm_rope(
        q, q.shape[-1:], cos, sin, weight, EPS, key=k, key_weight=key_weight
    )


def liger(rms_norm: Callable, rope: Callable) -> Callable:
    """Two norms, and the rotation over their results, by Liger's functions."""

    def run(q, k, cos, sin, weight, key_weight):
        rest = EPS, 0.0, "llama", True, None
        normed = (rms_norm(x, w, *rest).transpose(1, 2) for x, w in ((q, weight), (k, key_weight)))
        return tuple(y.transpose(1, 2) for y in rope(*normed, cos, sin)[:2])

    return run
