"""The cuTile implementation of heads that are rotated: how tensors are read, and bound calls.

The kernels take heads as (B, S, H, D), in place wherever these dimensions have one stride each:
queries and keys may be views of one projection, and what is made may have heads before tokens.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..launch.calls import ABSENT, HeadsBack, HeadsIn, RopeBackwardArrays, RopeForwardArrays, Sizes
from ..launch.rope import RopeBackwardPlan, RopeForwardPlan
from ..spec import NormSpec
from ..table import LIES, OF_KEY, OPS
from .cutile import Run, bind_pass, on_device
from .layout import MAX_STRIDE, MOST_SHAPES, VECTOR_BYTES, contiguous_strides_of
from .shapes import Fresh, Layout
from .torch_private import reinterpret

IN_VECTORS = ("rows", "key", "output", "table")


class Read(NamedTuple):
    """How a tensor is read. lies: as Port.lies; "output" lies as what a forward pass makes, and
    "vector" in one row. strides: in place; None if the tensor is copied first.
    """

    place: int
    lies: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None


class Views(NamedTuple):
    """How the tensors of a call are read. tokens: their shape. by_group: None if one is copied."""

    reads: tuple[Read, ...]
    tokens: tuple[int, ...]
    by_group: tuple | None


class Made(NamedTuple):
    """A result. like: the place of the tensor that has its shape, or whose rows have a number."""

    like: int
    lies: str
    dtype: str


class RotatedLayouts(dict):
    """As shapes.Layouts. A key has the shape of the input, and then of each tensor that is there
    its shape, strides and item size.

    read: how each tensor lies; None for one that is not read. heads: the places of the input and of
    the key, if there is one. made: None for a result that is absent.
    """

    with_rows: Sequence[int] = ()

    def __init__(
        self,
        plan: RopeForwardPlan | RopeBackwardPlan,
        read: Sequence[str | None],
        heads: Sequence[int],
        made: Sequence[Made | None],
    ):
        super().__init__()
        self._plan, self._heads, self._made = plan, heads, made
        self._lies = {place: lies for place, lies in enumerate(read) if lies}
        self.grouped = list(self._lies)

    def __missing__(self, key: Any) -> Layout:
        plan, spec, tokens, given = self._plan, self._plan.spec, tuple(key[0][:-2]), {}
        for place, (shape, strides, item_bytes) in zip(self.grouped, key[1:], strict=True):
            dtype = getattr(torch, f"int{8 * item_bytes}")  # of any tensor of such items
            given[place] = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        there = any(given[place].numel() for place in self._heads)
        heads = [given[place].shape[-2] for place in self._heads]
        sizes: Any = Sizes(prod(tokens[:-1]), tokens[-1], *heads) if there else ()
        fresh, written, reads = [], [], []
        for place, made in enumerate(self._made):
            how = made and _fresh(spec, made, given[made.like])
            fresh.append(how)
            if there and how:
                empty = torch.empty_strided(how.shape, how.strides, device="meta")
                written.append(_read_of(spec, place, made.lies, empty, tokens))
        if isinstance(plan, RopeBackwardPlan):
            partials = plan.partials(sizes) if there else None
            fresh.append(partials and Fresh(partials, (partials[1], 1), torch.float32))
        if there:
            each = self._lies.items()
            reads = [_read_of(spec, place, lies, given[place], tokens) for place, lies in each]
        in_place = None not in [read.strides for read in reads]
        views: Any = Views(tuple(reads), tokens, () if in_place else None)
        matrix: Any = tuple(written)
        layout = Layout(sizes, (), tuple(fresh), matrix, views, None, (), {})
        if len(self) < MOST_SHAPES:
            self[key] = layout
        return layout


def _fresh(spec: NormSpec, made: Made, like: Tensor) -> Fresh:
    shape = tuple(like.shape)
    if made.lies == "output" and spec.rotation.heads_first:
        shape = tuple(like.transpose(1, 2).shape)
    if made.lies == "number":
        shape = (prod(shape[: -2 if spec.by_token else -1]),)
    return Fresh(shape, contiguous_strides_of(shape), getattr(torch, made.dtype))


def _turned(spec: NormSpec, lies: str, t: Tensor, tokens: tuple[int, ...]) -> Tensor:
    """A view with heads behind tokens, and of all tokens where a table or positions serve many."""
    if lies == "output" and spec.rotation.heads_first:
        return t.transpose(1, 2)
    if lies == "table" and not spec.rotation.positions:
        return t.expand(*tokens, t.shape[-1])
    return t.expand(tokens) if lies == "tokens" else t


def _shape_of(spec: NormSpec, lies: str, turned: Tensor, tokens: tuple[int, ...]) -> tuple:
    """The shape in which the kernels take a tensor."""
    batch, head = (prod(tokens[:-1]), tokens[-1]), spec.rotation.head
    if lies == "vector" or (lies == "affine" and not spec.by_token):
        return (turned.numel(),)
    if lies == "affine":
        return turned.numel() // head, head
    if lies == "table" and spec.rotation.positions:
        return tuple(turned.shape)
    if lies == "tokens" or (lies == "number" and spec.by_token):
        return batch
    if lies == "number":
        return *batch, turned.numel() // prod(batch)
    return *batch, *turned.shape[len(tokens) :]


def _read_of(spec: NormSpec, place: int, lies: str, t: Tensor, tokens: tuple[int, ...]) -> Read:
    """How a tensor is read: in place if its dimensions are evenly spaced, its last stride is 1,
    and, where heads are whole vectors, each head and each row of a table starts on 16 bytes.
    """
    turned = _turned(spec, lies, t, tokens)
    shape = _shape_of(spec, lies, turned, tokens)
    try:
        strides = list(turned.view(shape).stride())
    except RuntimeError:  # the leading dimensions do not merge
        return Read(place, lies, shape, None)
    # An extent of 1 may have any stride, and the compiler reads by what the stride is.
    inner = 1
    for i in reversed(range(len(shape))):
        strides[i] = inner if shape[i] == 1 else strides[i]
        inner = shape[i] * strides[i]
    unit = VECTOR_BYTES // t.element_size() if spec.aligned and lies in IN_VECTORS else 1
    fits = strides[-1] == 1 and max(strides) < MAX_STRIDE
    fits = fits and not any(stride % unit for stride in strides[:-1])
    return Read(place, lies, shape, tuple(strides) if fits else None)


def as_read(tensors: Sequence[Tensor | None], spec: NormSpec, views: Views) -> list:
    """The tensors as the kernels read them, copied only where they cannot be read in place."""
    read, aligned = list(tensors), spec.aligned
    for place, lies, shape, strides in views.reads:
        t: Any = tensors[place]
        if strides is None or (aligned and t.data_ptr() % VECTOR_BYTES):
            turned = _turned(spec, lies, t, views.tokens)
            t = turned.clone(memory_format=torch.contiguous_format)
            strides = contiguous_strides_of(shape)
        read[place] = reinterpret(t, shape, strides)
    return read


def as_written(made: list, _: Sequence, written: Sequence[Read], *__) -> list:
    """The results as the kernels write them."""
    views = list(made)
    for place, _lies, shape, strides in written:
        views[place] = reinterpret(made[place], shape, strides)
    return views


def bind_forward(plan: RopeForwardPlan, run: Run = on_device) -> Callable:
    """As cutile.bind_forward."""
    spec, op, save = plan.spec, OPS[plan.spec.op], plan.save
    taken, there = [port.name for port in op.takes], [spec.dtype_of(role) for role in op.roles]
    lies = [port.lies if dtype else None for port, dtype in zip(op.takes, there, strict=True)]
    made: list[Made | None] = []
    for port in op.makes:
        like = taken.index(port.given or "input")
        kind = ("number", "float32") if port.lies == "number" else ("output", spec.dtype)
        absent = not lies[like] or (port.lies == "number" and not save)
        made.append(None if absent else Made(like, *kind))
    heads = [taken.index(name) for name in ("input", "key") if lies[taken.index(name)]]

    def arrays_of(read: Sequence, written: Sequence) -> tuple:
        x, cos, sin, weight, key, key_weight, positions = _present(read, lies)
        y, key_y, rstd, key_rstd = _present(written, made)
        of_key = tuple(HeadsIn(key, key_weight, key_y, key_rstd)) if spec.key else ABSENT
        first = tuple(HeadsIn(x, weight, y, rstd))
        return RopeForwardArrays(first, of_key, cos, sin, positions)

    layouts = RotatedLayouts(plan, lies, heads, made)
    execute = bind_pass(plan, layouts, arrays_of, run, 0, as_read, as_written)

    def forward(tensors: tuple, eps: float) -> tuple[Tensor | None, ...]:
        made, _ = execute(tensors, eps)
        return tuple(made)

    return forward


def bind_backward(plan: RopeBackwardPlan, kept: tuple[str, ...], run: Run = on_device) -> Callable:
    """As cutile.bind_backward. dsum: the gradient of the rotated key."""
    spec, needs = plan.spec, plan.needs
    of_input, of_key = needs.dx or needs.dw, needs.dkey or needs.dkey_weight
    read: list[str | None] = ["output" if of_input else None, "output" if of_key else None]
    read += [LIES[role] for role in kept]
    places = {role: 2 + i for i, role in enumerate(kept)}
    made: list[Made | None] = []
    asked = needs.dx, needs.dw, needs.dkey, needs.dkey_weight
    for need, role in zip(asked, ("x", "weight", *OF_KEY), strict=True):
        kind = "rows" if role in ("x", "key") else "vector"
        made.append(Made(places[role], kind, spec.dtype_of(role) or "") if need else None)
    heads = [places[role] for role in ("x", "key") if role in places]

    def arrays_of(read_: Sequence, written: Sequence) -> tuple:
        dy, dkey_y, *saved = _present(read_, read)
        of = dict.fromkeys(("weight", "key", "key_weight", "positions", "key_rstd"), ABSENT)
        of |= dict(zip(kept, saved, strict=True))
        dx, dw, dkey, dkey_weight = _present(written[:4], made)
        first = tuple(HeadsBack(of["x"], dy, of["weight"], of["rstd"], dx))
        second = tuple(HeadsBack(of["key"], dkey_y, of["key_weight"], of["key_rstd"], dkey))
        groups = first if of_input else ABSENT, second if of_key else ABSENT
        partials = written[4] if needs.dw or needs.dkey_weight else ABSENT
        tables = of["cos"], of["sin"], of["positions"]
        return RopeBackwardArrays(*groups, *tables, partials, dw, dkey_weight)

    layouts = RotatedLayouts(plan, read, heads, made)
    execute = bind_pass(plan, layouts, arrays_of, run, 2, as_read, as_written)

    def backward(
        dy: Tensor | None,
        dsum: Tensor | None,
        saved: Sequence[Tensor],
        eps: float = 0.0,
        more: Sequence[Tensor] = (),
    ) -> tuple[Tensor | None, ...]:
        incoming = dy if of_input else None, dsum if of_key else None
        made, layout = execute((*incoming, *saved), 0.0)
        dx, dw, dkey, dkey_weight = made[:4]
        for sums in (dw, dkey_weight):
            if sums is not None and not layout.rows:
                sums.zero_()
        return dx, None, None, dw, None, *((dkey, dkey_weight) if spec.key else ())

    return backward


def _present(arrays: Sequence, there: Sequence) -> list:
    """The arrays, of which some are absent."""
    return [array if is_there else ABSENT for array, is_there in zip(arrays, there, strict=True)]
