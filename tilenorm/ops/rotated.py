"""The cuTile implementation of heads that are rotated: how tensors are read, and bound calls.

The kernels take heads as (B, S, H, D), in place wherever these dimensions have one stride each:
queries and keys may be views of one projection, and what is made may have heads before tokens.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..launch.arrays import HeadsBack, HeadsIn, RopeBackwardArrays, RopeForwardArrays
from ..launch.calls import ABSENT, Sizes
from ..launch.rope import RopeBackwardPlan, RopeForwardPlan
from ..spec import NormSpec
from ..table import LIES, OF_KEY, OPS
from .cutile import Run, bind_pass, on_device
from .layout import MAX_STRIDE, VECTOR_BYTES, contiguous_strides_of
from .reference import STATISTICS
from .shapes import Fresh, Layout, Layouts, key_of
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


class RotatedLayouts(Layouts):
    """As Layouts, where `grouped` are all tensors that are read.

    heads: the places of the input and of the key, if there is one. made: None for a result that is
    absent.
    """

    def __init__(
        self,
        plan: RopeForwardPlan | RopeBackwardPlan,
        input: int,
        read: Sequence[tuple[str, str | None]],
        heads: Sequence[int],
        made: Sequence[Made | None],
    ):
        super().__init__(plan, input, read, ())
        self._heads, self._results = heads, made
        self.grouped = [place for place, (_, dtype) in enumerate(read) if dtype]
        self.key_of = partial(key_of, input, self.grouped)

    def _layout_of(self, key: Any) -> Layout:
        plan: Any = self._plan
        spec, tokens, given = plan.spec, tuple(key[0][:-2]), {}
        for place, (shape, strides) in zip(self.grouped, key[1:], strict=True):
            dtype = getattr(torch, self._read[place][1] or "")
            given[place] = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        there = any(given[place].numel() for place in self._heads)
        heads = [given[place].shape[-2] for place in self._heads]
        sizes = Sizes(*_sequences(tokens), *heads) if there else ()
        fresh, written, reads = [], [], []
        for place, made in enumerate(self._results):
            how = made and _fresh(spec, made, given[made.like])
            fresh.append(how)
            if there and made and how:
                empty = torch.empty_strided(how.shape, how.strides, device="meta")
                as_matrix = _read_of(spec, place, made.lies, empty, tokens)
                written.append((place, as_matrix.shape, as_matrix.strides))
        if isinstance(plan, RopeBackwardPlan):
            partials = plan.partials(sizes) if there else None
            fresh.append(partials and Fresh(partials, (partials[1], 1), torch.float32))
        if there:
            each = [(place, self._read[place][0], given[place]) for place in self.grouped]
            reads = [_read_of(spec, *how, tokens) for how in each]
        in_place = None not in [read.strides for read in reads]
        views = Views(tuple(reads), tokens, () if in_place else None)
        # A sum over no tokens is zeros.
        sums = [i for i, made in enumerate(self._results) if made and made.lies == "vector"]
        cleared = () if there else tuple(sums)
        return Layout(sizes, (), tuple(fresh), tuple(written), views, None, cleared, {})


def _sequences(tokens: tuple[int, ...]) -> tuple[int, int]:
    """How many sequences there are, and the tokens of each. A block has tokens of one sequence: so
    tokens that are their sequences' only ones, as where a model decodes, count as one sequence.
    """
    batch, count = prod(tokens[:-1]), tokens[-1]
    return (1, batch) if count == 1 else (batch, count)


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
    batch, head = _sequences(tokens), spec.rotation.head
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

    Raises NotImplementedError for sequences whose distance the kernels cannot hold.
    """
    turned = _turned(spec, lies, t, tokens)
    shape = _shape_of(spec, lies, turned, tokens)
    if shape[0] > 1 and (elements := prod(shape[1:])) >= MAX_STRIDE:
        raise NotImplementedError(
            f"{spec.op}: the kernels take sequences of less than {MAX_STRIDE} elements where there"
            f" are several, got {elements}; backend='reference' takes them"
        )
    try:
        strides = list(turned.view(shape).stride())
    except RuntimeError:  # the leading dimensions do not merge
        return Read(place, lies, shape, None)
    # An extent of 1 may have any stride, and the compiler reads by what the stride is.
    inner = 1
    for i in reversed(range(len(shape))):
        strides[i] = min(inner, VECTOR_BYTES * shape[-1]) if shape[i] == 1 else strides[i]
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


def bind_forward(plan: RopeForwardPlan, run: Run = on_device) -> Callable:
    """As cutile.bind_forward."""
    spec, op, save = plan.spec, OPS[plan.spec.op], plan.save
    taken, there = [port.name for port in op.takes], [spec.dtype_of(role) for role in op.roles]
    lies = [(port.lies, dtype) for port, dtype in zip(op.takes, there, strict=True)]
    made: list[Made | None] = []
    for port in op.makes:
        like = taken.index(port.given or "input")
        kind = ("number", "float32") if port.lies == "number" else ("output", spec.dtype)
        absent = not there[like] or (port.lies == "number" and not save)
        made.append(None if absent else Made(like, *kind))
    heads = [taken.index(name) for name in ("input", "key") if there[taken.index(name)]]

    def arrays_of(read: Sequence, written: Sequence) -> tuple:
        x, cos, sin, weight, key, key_weight, positions = _present(read, there)
        y, key_y, rstd, key_rstd = _present(written, made)
        of_key = tuple(HeadsIn(key, key_weight, key_y, key_rstd)) if spec.key else ABSENT
        first = tuple(HeadsIn(x, weight, y, rstd))
        return RopeForwardArrays(first, of_key, cos, sin, positions)

    layouts = RotatedLayouts(plan, 0, lies, heads, made)
    execute = bind_pass(plan, layouts, arrays_of, run, as_read)

    def forward(tensors: tuple, eps: float) -> tuple[Tensor | None, ...]:
        made, _ = execute(tensors, eps)
        return tuple(made)

    forward.layouts = layouts  # type: ignore[attr-defined]
    return forward


def bind_backward(plan: RopeBackwardPlan, kept: tuple[str, ...], run: Run = on_device) -> Callable:
    """As cutile.bind_backward. dsum: the gradient of the rotated key."""
    spec, needs = plan.spec, plan.needs
    of_input, of_key = needs.dx or needs.dw, needs.dkey or needs.dkey_weight
    read: list[tuple[str, str | None]]
    read = [("output", spec.dtype if need else None) for need in (of_input, of_key)]
    numbers = dict.fromkeys(STATISTICS, "float32")
    read += [(LIES[role], numbers.get(role) or spec.dtype_of(role)) for role in kept]
    there = [dtype for _, dtype in read]
    places = {role: 2 + i for i, role in enumerate(kept)}
    made: list[Made | None] = []
    roles = "x", None, None, "weight", None, *OF_KEY
    for need, role in zip(needs.gradients, roles, strict=True):
        kind = "rows" if role in ("x", "key") else "vector"
        made.append(Made(places[role], kind, spec.dtype_of(role) or "") if need and role else None)
    heads = [places[role] for role in ("x", "key") if role in places]

    def arrays_of(read_: Sequence, written: Sequence) -> tuple:
        dy, dkey_y, *saved = _present(read_, there)
        of = dict.fromkeys(("weight", "key", "key_weight", "positions", "key_rstd"), ABSENT)
        of |= dict(zip(kept, saved, strict=True))
        *gradients, partials = written
        dx, _, _, dw, _, dkey, dkey_weight = _present(gradients, made)
        first = tuple(HeadsBack(of["x"], dy, of["weight"], of["rstd"], dx))
        second = tuple(HeadsBack(of["key"], dkey_y, of["key_weight"], of["key_rstd"], dkey))
        groups = first if of_input else ABSENT, second if of_key else ABSENT
        partials = partials if needs.dw or needs.dkey_weight else ABSENT
        tables = of["cos"], of["sin"], of["positions"]
        return RopeBackwardArrays(*groups, *tables, partials, dw, dkey_weight)

    layouts = RotatedLayouts(plan, 2, read, heads, made)
    execute = bind_pass(plan, layouts, arrays_of, run, as_read)

    def backward(
        dy: Tensor | None,
        dsum: Tensor | None,
        saved: Sequence[Tensor],
        eps: float = 0.0,
        more: Sequence[Tensor] = (),
    ) -> tuple[Tensor | None, ...]:
        incoming = dy if of_input else None, dsum if of_key else None
        made, _ = execute((*incoming, *saved), 0.0)
        return tuple(made[:-1])

    backward.layouts = layouts  # type: ignore[attr-defined]
    return backward


def _present(arrays: Sequence, there: Sequence) -> list:
    """The arrays, of which some are absent."""
    return [array if is_there else ABSENT for array, is_there in zip(arrays, there, strict=True)]
