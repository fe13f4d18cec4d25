"""Drawn calls of heads that are normalised and rotated: tensors and true results."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from tilenorm.launch.calls import Sizes
from tilenorm.spec import NormSpec, Rotation
from tilenorm.table import OPS

from .cases import DTYPES
from .oracle import Truth

EPS = 1e-6


def drawn(rng: Random) -> tuple[NormSpec, Sizes]:
    dtype = rng.choice(DTYPES)
    head = rng.choice((2, 6, 7, 8, 20, 32, 40, 48, 64, 80, 96))
    dim = rng.choice((head // 2 * 2, head // 2 * 2, max(2, head // 4 * 2), max(2, head // 8 * 2)))
    positions = rng.choice((None, None, "int32", "int64"))
    interleaved, full, heads_first = (rng.random() < 0.5 for _ in range(3))
    table = rng.choice((dtype, *DTYPES))
    rotation = Rotation(dim, head, interleaved, table, full, positions, heads_first)
    sizes = Sizes(rng.choice((1, 2)), rng.choice((1, 3, 9, 17)), rng.randint(1, 6), 0)
    if rng.random() < 0.7:
        sizes = sizes._replace(key_heads=rng.randint(1, 3))
    given = {"rotation": rotation, "rounding": rng.choice(("late", "late", "early"))}
    given["weight"] = rng.choice((None, dtype, dtype, *DTYPES))
    if given["weight"]:
        given["offset"] = rng.choice((0.0, 0.0, 1.0))
    if sizes.key_heads:
        given["key"] = dtype
        given["key_weight"] = given["weight"] and rng.choice((given["weight"], *DTYPES))
    hidden = head
    if rng.random() < 0.3 and sizes.heads > 1:
        hidden = head * sizes.heads
        given["key_hidden"] = head * sizes.key_heads
    return NormSpec("rms", hidden, dtype, **given), sizes


@dataclass
class Inputs:
    """The tensors of a call, as Executor takes them. x, key: (batch, tokens, heads, D) views of one
    packed tensor, and dy and dsum, the gradient of the rotated key, of another. cos, sin: (batch or
    1, tokens, columns), or (rows, columns) where there are positions, (batch, tokens).
    """

    x: Tensor
    weight: Tensor | None
    dy: Tensor
    key: Tensor | None
    key_weight: Tensor | None
    dsum: Tensor | None
    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    eps: float = EPS

    @classmethod
    def random(cls, spec: NormSpec, sizes: Sizes, seed: int) -> "Inputs":
        generator, how = torch.Generator().manual_seed(seed), spec.rotation
        batch, tokens, heads, key_heads = sizes
        D = how.head

        def normal(dtype: str | None, *shape: int) -> Tensor | None:
            if dtype is None:
                return None
            return torch.randn(shape, generator=generator).to(getattr(torch, dtype))

        def packed() -> tuple[Tensor, Tensor | None]:
            qkv = normal(spec.dtype, batch, tokens, (heads + 2 * key_heads) * D)
            qkv = qkv.unflatten(-1, (-1, D))
            return qkv[:, :, :heads], qkv[:, :, heads : heads + key_heads] if key_heads else None

        def weight(dtype: str | None, count: int) -> Tensor | None:
            return normal(dtype, *((count, D) if spec.by_token else (D,)))

        (x, key), dys = packed(), packed()
        dy, key_dy = (dy if dy is None else made_as(spec, dy) for dy in dys)
        columns, positions = how.dim if how.full else how.dim // 2, None
        shape = (batch if seed % 2 else 1, tokens, columns)
        if how.positions:
            shape, kind = (tokens + 5, columns), getattr(torch, how.positions)
            positions = torch.randint(tokens + 5, (batch, tokens), generator=generator).to(kind)
        cos, sin = normal(how.table, *shape), normal(how.table, *shape)
        weights = weight(spec.weight, heads), weight(spec.key_weight, key_heads)
        return cls(x, weights[0], dy, key, weights[1], key_dy, cos, sin, positions)

    def tensors(self, spec: NormSpec) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self, role) for role in OPS[spec.op].roles)

    def saved(self, spec: NormSpec) -> tuple[Tensor, ...]:
        """What a backward pass reads of the forward pass, with the true rstd."""
        found = {name: truth.value.float() for name, truth in truths(spec, self).items()}
        return tuple(
            found[r] if r.endswith("rstd") else getattr(self, r) for r in spec.kernel_reads
        )

    def turns(self, spec: NormSpec) -> tuple[Tensor, ...]:
        """cos and sin of the first elements, and of the second, (batch, tokens, 1, dim / 2)."""
        how, found = spec.rotation, []
        for table in (self.cos, self.sin):
            rows = table if self.positions is None else table[self.positions.long()]
            rows = rows[:, :, None]
            found.append((rows, rows) if not how.full else split(rows, how))
        (cos, cos2), (sin, sin2) = found
        return cos, sin, cos2, sin2


def made_as(spec: NormSpec, heads: Tensor) -> Tensor:
    """Heads as the op makes them: behind their tokens or before; and the other way round."""
    return heads.transpose(1, 2) if spec.rotation.heads_first else heads


def split(rows: Tensor, how: Rotation) -> tuple[Tensor, Tensor]:
    """The elements that are rotated into each other."""
    rows = rows[..., : how.dim]
    return (rows[..., ::2], rows[..., 1::2]) if how.interleaved else rows.chunk(2, -1)


def rotated(
    rows: Tensor, how: Rotation, cos, sin, cos2, sin2, product: Callable = torch.mul
) -> Tensor:
    one, two = split(rows, how)
    both = product(one, cos) - product(two, sin), product(two, cos2) + product(one, sin2)
    pairs = torch.stack(both, -1).flatten(-2) if how.interleaved else torch.cat(both, -1)
    return torch.cat((pairs, rows[..., how.dim :]), -1)


def truths(spec: NormSpec, inputs: Inputs) -> dict[str, Truth]:
    """The true results by their roles: y, rstd, dx and dw, and those of the key."""
    turns = [t.double() for t in inputs.turns(spec)]
    found = {}
    for names, x, w, dy in (
        ("y rstd dx dw", inputs.x, inputs.weight, inputs.dy),
        ("key_y key_rstd dkey dkey_weight", inputs.key, inputs.key_weight, inputs.dsum),
    ):
        if x is not None:
            results = _truths(spec, x.double(), w, made_as(spec, dy).double(), turns)
            found |= dict(zip(names.split(), results, strict=w is not None))
    return found


def _truths(spec: NormSpec, x: Tensor, w: Tensor | None, dy: Tensor, turns) -> list[Truth]:
    how, dims = spec.rotation, (-2, -1) if spec.by_token else (-1,)
    rstd = (x.square().mean(dims, keepdim=True) + EPS).rsqrt()
    x_hat = x * rstd
    gain = torch.ones(how.head).double() if w is None else w.double() + spec.offset
    n = (x_hat * gain).requires_grad_()
    size = n.detach().abs().requires_grad_()
    y, (cos, sin, cos2, sin2) = rotated(n, how, *turns), (t.abs() for t in turns)
    y_size = rotated(size, how, cos, -sin, cos2, sin2)  # -sin: each term is added
    (a,), (a_size,) = torch.autograd.grad(y, n, dy), torch.autograd.grad(y_size, size, dy.abs())
    g, g_size = a * gain, a_size * gain.abs()
    dx = rstd * (g - x_hat * (g * x_hat).mean(dims, keepdim=True))
    dx_size = rstd * (g_size + x_hat.abs() * (g_size * x_hat.abs()).mean(dims, keepdim=True))
    y, y_size = made_as(spec, y.detach()), made_as(spec, y_size.detach())
    found = [Truth(y, y_size), Truth(rstd.flatten(), rstd.flatten()), Truth(dx, dx_size)]
    if w is not None:
        shared = (0, 1) if spec.by_token else (0, 1, 2)
        sums = (t.sum(shared).flatten() for t in (a * x_hat, a_size * x_hat.abs()))
        found.append(Truth(*sums))
    return found


def hugging_face(spec: NormSpec, inputs: Inputs, results: dict[str, Tensor]) -> dict[str, Tensor]:
    """y of the input and of the key in Hugging Face's spelling, given rstd: every product and every
    sum is rounded to the input's dtype.
    """
    found, turns = {}, [t.float() for t in inputs.turns(spec)]
    for name, x, w in (("", inputs.x, inputs.weight), ("key_", inputs.key, inputs.key_weight)):
        if x is None:
            continue

        def rounded(t: Tensor, dtype=x.dtype) -> Tensor:
            return t.to(dtype).float()

        one_each = x.shape[:2] if spec.by_token else x.shape[:3]
        n = rounded(x.float() * results[f"{name}rstd"].view(*one_each, *[1] * (4 - len(one_each))))
        if w is not None:
            n = rounded(n * (w.float() + spec.offset))
        y = rotated(n, spec.rotation, *turns, lambda a, b: rounded(a * b))
        found[f"{name}y"] = made_as(spec, y.to(x.dtype)).contiguous()
    return found
