"""What follows from the shape of an input, for a plan: what is allocated, and how tensors are read.

It is found once for each shape, and kept. Heads that are rotated the kernels take as (B, S, H, D),
in place wherever these dimensions have one stride each: queries and keys may be views of one
projection, and what is made may have heads before tokens.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...launch.calls import Sizes
from ...launch.plan import BackwardPlan, ForwardPlan, GroupedPlan
from ...launch.rope import RopeBackwardPlan
from ...launch.scales import Scales
from ...spec import NormSpec
from ..pytorch.torch_private import reinterpret
from .quantize import SCALE_DTYPES
from .reading import MAX_STRIDE, MOST_SHAPES, VECTOR_BYTES, as_read, contiguous_strides_of, reading

MOST_SCALES = 2**31 - 1  # the kernels number scales in 32 bits
IN_VECTORS = ("rows", "key", "heads", "table")


class Fresh(NamedTuple):
    """A contiguous tensor to be allocated."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: str) -> "Fresh":
        return cls(shape, contiguous_strides_of(shape), getattr(torch, dtype))


class Layout(NamedTuple):
    """What follows from the shape of an input.

    rows: how many; where heads are rotated the Sizes, or () if there are none. groups: how many, of
    a backward pass by group, in a tuple; else (). made: what is allocated: the results in their
    order, partials and slots, and the sums by group; None for what is absent. written: the place,
    shape and strides of each result that the kernels write as a matrix or a vector, where it is
    none. shown: the place, shape, strides and dtype of each result that a caller gets as another
    view of its memory. lies: how the tensors lie that are read, see as_read. cleared: the places
    of the results that the kernels add to, or do not write whole.
    """

    rows: Any
    groups: tuple[int, ...]
    made: tuple[Fresh | None, ...]
    written: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]
    shown: tuple[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    lies: Any
    cleared: tuple[int, ...]


class Layouts(dict):
    """The Layout of each shape that a plan has met, the first MOST_SHAPES of them.

    input: the place of the input among the tensors that are read. read: how each of these lies, as
    Port.lies, and its dtype, None for an absent one. made: how each result lies, and its dtype;
    None for a result that is absent. likes: where heads are rotated, for each result that is made,
    the place of the tensor that has its shape, or whose rows have a number.

    A key has the shape of the input, that of the tensor at `like`, and the shapes and strides of
    the tensors at `grouped`. like: the place of a parameter whose shape the gradients of parameters
    have, else that of the input. grouped: the places of what lies by group, or of all tensors where
    heads are rotated.
    """

    def __init__(
        self,
        plan: ForwardPlan | BackwardPlan,
        input: int,
        read: Sequence[tuple[str, str | None]],
        made: Sequence[tuple[str, str] | None],
        likes: Sequence[int] = (),
    ):
        super().__init__()
        self.input, self._plan, self._likes = input, plan, likes
        self._read, self._made = tuple(read), tuple(made)
        there = [(i, lies) for i, (lies, dtype) in enumerate(read) if dtype]
        rotated = plan.spec.rotation is not None
        self.grouped = tuple([i for i, lies in there if lies == "group" or rotated])
        affine = [i for i, lies in there if lies == "affine" and not rotated]
        self.like = affine[0] if affine and hasattr(plan, "needs") else input

    as_read = staticmethod(as_read)

    def of(self, tensors: Sequence[Any]) -> Layout:
        """The Layout of a call's tensors."""
        key = tensors[self.input].shape, tensors[self.like].shape
        return self[key + tuple([(tensors[i].shape, tensors[i].stride()) for i in self.grouped])]

    def __missing__(self, key: Any) -> Layout:
        layout = self._layout_of(key)
        if len(self) < MOST_SHAPES:
            self[key] = layout
        return layout

    def _layout_of(self, key: Any) -> Layout:
        plan: Any = self._plan
        spec, hidden, how = plan.spec, plan.spec.hidden, plan.spec.quantized
        backward = isinstance(plan, BackwardPlan)
        groups: tuple[int, ...] = ()
        shape, like, *grouped = key
        of_groups = ()
        if grouped:
            of_groups, _ = grouped[0]
            groups = (of_groups.numel() // hidden,)
        rows = shape.numel() // hidden
        scratch = [(rows and backward and plan.partials(rows, *groups), "float32")]
        scratch.append((rows and plan.slots(rows), "int32"))
        if isinstance(plan, GroupedPlan):
            scratch.append((rows and plan.group_sums(rows, *groups), "float32"))
        scales = None
        # A sum over no rows is zeros.
        added = () if rows else ("affine", "group")
        if how is not None:
            scales = Scales.of(how, hidden, rows)
            if scales.count > MOST_SCALES:
                raise NotImplementedError(
                    f"{spec.op}: the kernels write up to {MOST_SCALES} scales, got {scales.count}"
                )
            added = ("one", "scales") if scales.padding else ("one",)
        cleared = tuple([i for i, made in enumerate(self._made) if made and made[0] in added])
        shapes = {"rows": tuple(shape), "group": tuple(of_groups), "number": (rows,), "one": (1,)}
        shapes["affine"] = tuple(like)
        shapes |= {"scales": (scales.count,)} if scales else {}
        as_written = {"rows": (rows, hidden), "group": (*groups, hidden), "affine": (like.numel(),)}
        made, written, shown = [], [], []
        for place, result in enumerate(self._made):
            lies, dtype = result or ("", "")
            made.append(result and Fresh.of(shapes[lies], dtype or scales.dtype))
            if lies in as_written and shapes[lies] != (shape_written := as_written[lies]):
                written.append((place, shape_written, contiguous_strides_of(shape_written)))
            if lies == "one":
                shown.append((place, (1,), (1,), torch.float32))
            if lies == "scales":
                shown.append((place, scales.shape, scales.strides, SCALE_DTYPES[scales.dtype]))
        made += [Fresh.of(shape, dtype) if shape else None for shape, dtype in scratch]
        read = reading(spec, [lies for lies, _ in self._read])
        groups = groups if backward else ()
        return Layout(rows, groups, tuple(made), tuple(written), tuple(shown), read, cleared)


class Read(NamedTuple):
    """How a tensor is read. lies: as Port.lies; "vector" lies in one row. strides: of the tensor in
    place; None if it is copied first.
    """

    place: int
    lies: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None


def _heads_as_read(tensors: Sequence[Tensor | None], spec: NormSpec, how: tuple) -> list:
    """The tensors as the kernels read them, copied only where they cannot be read in place.

    how: the tokens' shape, and how each tensor that is there is read.
    """
    read, aligned, (tokens, reads) = list(tensors), spec.aligned, how
    for place, lies, shape, strides in reads:
        t: Any = tensors[place]
        if strides is None or (aligned and t.data_ptr() % VECTOR_BYTES):
            turned = _turned(spec, lies, t, tokens)
            t = turned.clone(memory_format=torch.contiguous_format)
            strides = contiguous_strides_of(shape)
        read[place] = reinterpret(t, shape, strides)
    return read


class RotatedLayouts(Layouts):
    """As Layouts, of heads that are rotated."""

    as_read = staticmethod(_heads_as_read)

    def _layout_of(self, key: Any) -> Layout:
        plan: Any = self._plan
        spec, tokens, given = plan.spec, tuple(key[0][:-2]), {}
        for place, (shape, strides) in zip(self.grouped, key[2:], strict=True):
            dtype = getattr(torch, self._read[place][1] or "")
            given[place] = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        heads = [t for place, t in given.items() if self._read[place][0] in ("rows", "key")]
        there = any(t.numel() for t in heads)
        sizes = Sizes(*_sequences(tokens), *[t.shape[-2] for t in heads]) if there else ()
        fresh, written, reads = [], [], []
        for place, (made, like) in enumerate(zip(self._made, self._likes, strict=True)):
            how = made and _fresh(spec, *made, given[like])
            fresh.append(how)
            if there and made and how:
                empty = torch.empty_strided(how.shape, how.strides, device="meta")
                as_matrix = _read_of(spec, place, made[0], empty, tokens)
                written.append((place, as_matrix.shape, as_matrix.strides))
        if isinstance(plan, RopeBackwardPlan):
            partials = plan.partials(sizes) if there else None
            fresh.append(partials and Fresh.of(partials, "float32"))
        if there:
            each = [(place, self._read[place][0], given[place]) for place in self.grouped]
            reads = [_read_of(spec, *how, tokens) for how in each]
        # A sum over no tokens is zeros.
        sums = [i for i, made in enumerate(self._made) if made and made[0] == "vector"]
        cleared = () if there else tuple(sums)
        return Layout(sizes, (), tuple(fresh), tuple(written), (), (tokens, reads), cleared)


def _sequences(tokens: tuple[int, ...]) -> tuple[int, int]:
    """How many sequences there are, and the tokens of each. A block has tokens of one sequence: so
    tokens that are their sequences' only ones, as where a model decodes, count as one sequence.
    """
    batch, count = prod(tokens[:-1]), tokens[-1]
    return (1, batch) if count == 1 else (batch, count)


def _fresh(spec: NormSpec, lies: str, dtype: str, like: Tensor) -> Fresh:
    shape = tuple(like.shape)
    if lies == "heads" and spec.rotation.heads_first:
        shape = tuple(like.transpose(1, 2).shape)
    if lies == "number":
        shape = (prod(shape[: -2 if spec.by_token else -1]),)
    return Fresh.of(shape, dtype)


def _turned(spec: NormSpec, lies: str, t: Tensor, tokens: tuple[int, ...]) -> Tensor:
    """A view with heads behind tokens, and of all tokens where a table or positions serve many."""
    if lies == "heads" and spec.rotation.heads_first:
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
