"""Drawn calls of heads that are normalised and rotated: tensors, launches and true results."""

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from tests.cases import DTYPES
from tests.oracle import Truth
from tilenorm.launch.arrays import RopeBackwardArrays, RopeForwardArrays
from tilenorm.launch.calls import Needs, Sizes, every_gradient
from tilenorm.launch.plan import plan_backward, plan_forward
from tilenorm.spec import NormSpec, Rotation

EPS = 1e-6


def drawn(rng: Random, **fields) -> tuple[NormSpec, Sizes]:
    """A spec and sizes. fields: of the spec, not drawn."""
    dtype = fields.pop("dtype", rng.choice(DTYPES))
    head = rng.choice((2, 6, 7, 8, 20, 32, 40, 48, 64, 80, 96))
    dim = rng.choice((head // 2 * 2, head // 2 * 2, max(2, head // 4 * 2), max(2, head // 8 * 2)))
    positions = rng.choice((None, None, "int32", "int64"))
    rotation = Rotation(
        dim, head, rng.random() < 0.5, rng.choice((dtype, *DTYPES)), rng.random() < 0.5, positions
    )
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
    return NormSpec("rms", hidden, dtype, **given | fields), sizes


@dataclass
class Inputs:
    """The tensors of a call. x, key, dy, key_dy: (batch, tokens, heads, D) views of one packed
    tensor. cos, sin, positions: as the kernels take them.
    """

    x: Tensor
    weight: Tensor | None
    dy: Tensor
    key: Tensor | None
    key_weight: Tensor | None
    key_dy: Tensor | None
    cos: Tensor
    sin: Tensor
    positions: Tensor | None

    @classmethod
    def random(cls, spec: NormSpec, sizes: Sizes, seed: int, device: str = "cpu") -> "Inputs":
        generator, how = torch.Generator().manual_seed(seed), spec.rotation
        batch, tokens, heads, key_heads = sizes
        D = how.head

        def normal(dtype: str | None, *shape: int) -> Tensor | None:
            if dtype is None:
                return None
            values = torch.randn(shape, generator=generator)
            return values.to(getattr(torch, dtype)).to(device)

        def packed() -> tuple[Tensor, Tensor | None]:
            qkv = normal(spec.dtype, batch, tokens, (heads + 2 * key_heads) * D)
            qkv = qkv.unflatten(-1, (-1, D))
            return qkv[:, :, :heads], qkv[:, :, heads : heads + key_heads] if key_heads else None

        def weight(dtype: str | None, count: int) -> Tensor | None:
            return normal(dtype, *((count, D) if spec.by_token else (D,)))

        (x, key), (dy, key_dy) = packed(), packed()
        columns, positions = how.dim if how.full else how.dim // 2, None
        shape = (batch if seed % 2 else 1, tokens, columns)
        if how.positions:
            shape, kind = (tokens + 5, columns), getattr(torch, how.positions)
            positions = torch.randint(tokens + 5, (batch, tokens), generator=generator)
            positions = positions.to(kind).to(device)
        cos, sin = normal(how.table, *shape), normal(how.table, *shape)
        if positions is None:
            cos, sin = cos.expand(batch, -1, -1), sin.expand(batch, -1, -1)
        weights = weight(spec.weight, heads), weight(spec.key_weight, key_heads)
        return cls(x, weights[0], dy, key, weights[1], key_dy, cos, sin, positions)

    def turns(self, spec: NormSpec) -> tuple[Tensor, ...]:
        """cos and sin of the first elements, and of the second, (batch, tokens, 1, dim / 2)."""
        how, found = spec.rotation, []
        for table in (self.cos, self.sin):
            rows = table if self.positions is None else table[self.positions.long()]
            rows = rows[:, :, None]
            found.append((rows, rows) if not how.full else split(rows, how))
        (cos, cos2), (sin, sin2) = found
        return cos, sin, cos2, sin2


def split(rows: Tensor, how: Rotation) -> tuple[Tensor, Tensor]:
    """The elements that are rotated into each other."""
    rows = rows[..., : how.dim]
    return (rows[..., ::2], rows[..., 1::2]) if how.interleaved else rows.chunk(2, -1)


def with_pair(rows: Tensor, first: Tensor, second: Tensor, how: Rotation) -> Tensor:
    """The rows with others for the elements that are rotated."""
    if how.interleaved:
        both = torch.stack((first, second), -1).flatten(-2)
    else:
        both = torch.cat((first, second), -1)
    return torch.cat((both, rows[..., how.dim :]), -1)


def forward(executor, spec, sizes, inputs, outputs=None, **how) -> dict[str, Tensor]:
    """y and rstd, and those of the key. outputs: as what y and the key's y are allocated."""
    plan = plan_forward(spec, executor.target, True)
    made, groups = {}, []
    numbers = (sizes.batch, sizes.tokens)
    for name, x, w, count in (
        ("", inputs.x, inputs.weight, sizes.heads),
        ("key_", inputs.key, inputs.key_weight, sizes.key_heads),
    ):
        if x is None:
            groups.append(())
            continue
        y = torch.full(x.shape, torch.nan, dtype=x.dtype, device=x.device)
        if outputs == "heads first":
            y = y.transpose(1, 2).contiguous().transpose(1, 2)
        shape = numbers if spec.by_token else (*numbers, count)
        rstd = torch.full(shape, torch.nan, device=x.device)
        made |= {f"{name}y": y, f"{name}rstd": rstd}
        groups.append((x, () if w is None else w, y, rstd))  # of HeadsIn
    tables = inputs.cos, inputs.sin, () if inputs.positions is None else inputs.positions
    executor.run(**how)(plan.launches(sizes, EPS), RopeForwardArrays(*groups, *tables), 0)
    return made


def backward(executor, spec, sizes, inputs, needs: Needs | None = None, **how) -> dict[str, Tensor]:
    """The needed gradients."""
    needs = needs or every_gradient(spec)
    plan = plan_backward(spec, executor.target, needs)
    made, groups, rstds = {}, [], rstds_of(spec, inputs)
    for name, x, dy, w, dx, dw in (
        ("", inputs.x, inputs.dy, inputs.weight, needs.dx, needs.dw),
        ("key_", inputs.key, inputs.key_dy, inputs.key_weight, needs.dkey, needs.dkey_weight),
    ):
        if not (dx or dw):
            groups.append(())
            continue
        grad = torch.full(x.shape, torch.nan, dtype=x.dtype, device=x.device) if dx else ()
        if dx:
            made[f"{name}dx"] = grad
        if dw:
            made[f"{name}dw"] = torch.full_like(w.flatten(), torch.nan)
        weight = () if w is None else w
        groups.append((x, dy, weight, rstds[f"{name}rstd"], grad))  # of HeadsBack
    tables = inputs.cos, inputs.sin, () if inputs.positions is None else inputs.positions
    shape = plan.partials(sizes)
    partials = () if shape is None else torch.full(shape, torch.nan, device=inputs.x.device)
    sums = (made.get("dw", ()), made.get("key_dw", ()))
    executor.run(**how)(
        plan.launches(sizes), RopeBackwardArrays(*groups, *tables, partials, *sums), 0
    )
    return made


def rstds_of(spec: NormSpec, inputs: Inputs) -> dict[str, Tensor]:
    """The true rstd of the input and of the key, float32."""
    found = {}
    for name, x in (("rstd", inputs.x), ("key_rstd", inputs.key)):
        if x is not None:
            dims = (-2, -1) if spec.by_token else -1
            found[name] = (x.double().square().mean(dims) + EPS).rsqrt().float()
    return found


def truths(spec: NormSpec, inputs: Inputs) -> dict[str, Truth]:
    """The true y, rstd, dx and dw of the input and, with "key_" before their names, of the key."""
    found = {}
    for name, x, w, dy in (
        ("", inputs.x, inputs.weight, inputs.dy),
        ("key_", inputs.key, inputs.key_weight, inputs.key_dy),
    ):
        if x is not None:
            turns = [t.double() for t in inputs.turns(spec)]
            every = _truths(spec, x.double(), w, dy.double(), turns)
            found |= {f"{name}{what}": truth for what, truth in every.items()}
    return found


def _truths(spec, x, w, dy, turns) -> dict[str, Truth]:
    how, dims = spec.rotation, (-2, -1) if spec.by_token else (-1,)
    rstd = (x.square().mean(dims, keepdim=True) + EPS).rsqrt()
    x_hat = x * rstd
    gain = torch.ones(how.head).double() if w is None else w.double() + spec.offset
    cos, sin, cos2, sin2 = turns

    def rotated(n, sign, cos, sin, cos2, sin2):
        n1, n2 = split(n, how)
        return with_pair(n, n1 * cos - sign * n2 * sin, n2 * cos2 + sign * n1 * sin2, how)

    absolute = [t.abs() for t in turns]
    n, size = x_hat * gain, (x_hat * gain).abs()
    a = rotated(dy, -1, cos, sin2, cos2, sin)
    a1, a2 = split(dy.abs(), how)
    c, s, c2, s2 = absolute
    a_size = with_pair(dy.abs(), a1 * c + a2 * s2, a2 * c2 + a1 * s, how)
    n1, n2 = split(size, how)
    y_size = with_pair(size, n1 * c + n2 * s, n2 * c2 + n1 * s2, how)
    g = a * gain
    mean = (g * x_hat).mean(dims, keepdim=True)
    g_size = a_size * gain.abs()
    dx_size = rstd * (g_size + x_hat.abs() * (g_size * x_hat.abs()).mean(dims, keepdim=True))
    shared = (0, 1) if spec.by_token else (0, 1, 2)
    result = {
        "y": Truth(rotated(n, 1, *turns), y_size),
        "rstd": Truth(rstd.squeeze(dims), rstd.squeeze(dims)),
        "dx": Truth(rstd * (g - x_hat * mean), dx_size),
    }
    if w is not None:
        sums = (t.sum(shared).flatten() for t in (a * x_hat, a_size * x_hat.abs()))
        result["dw"] = Truth(*sums)
    return result


def hugging_face(spec: NormSpec, inputs: Inputs, rstds: dict[str, Tensor]) -> dict[str, Tensor]:
    """y of the input and of the key in Hugging Face's spelling, given rstd: every product and every
    sum is rounded to the input's dtype.
    """
    found, how = {}, spec.rotation
    cos, sin, cos2, sin2 = (t.float() for t in inputs.turns(spec))
    for name, x, w in (("", inputs.x, inputs.weight), ("key_", inputs.key, inputs.key_weight)):
        if x is None:
            continue
        dtype, rstd = x.dtype, rstds[f"{name}rstd"]
        rstd = rstd[..., None, None] if spec.by_token else rstd[..., None]
        n = (x.float() * rstd).to(dtype).float()
        if w is not None:
            n = (n * (w.float() + spec.offset)).to(dtype).float()
        n1, n2 = split(n, how)

        def product(a, b, dtype=dtype):
            return (a * b).to(dtype).float()

        first, second = product(n1, cos) - product(n2, sin), product(n2, cos2) + product(n1, sin2)
        found[f"{name}y"] = with_pair(n, first, second, how).to(dtype)
    return found
