"""What follows from the shape of an input, for a plan: what is allocated, and how tensors are read.

It is found once for each shape, and kept.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..launch.plan import BackwardPlan, ForwardPlan, GroupedPlan
from ..launch.scales import Scales
from ..spec import NormSpec
from .layout import MOST_SHAPES, Views, contiguous_strides_of, group_stride

MOST_SCALES = 2**31 - 1  # the kernels number scales in 32 bits


class Fresh(NamedTuple):
    """The shape, strides and dtype of a tensor to be allocated."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Layout(NamedTuple):
    """What follows from the shape of an input.

    rows: how many. groups: how many, of a backward pass by group, in a tuple; else (). made: what
    is allocated: the results in their order, partials and slots, and the sums by group; None for
    what is absent. matrix: (rows, hidden), or None where the results with rows are such a matrix.
    views: see layout.as_read. scales: of a quantised norm. cleared: the places of the results that
    the kernels add to, or do not write whole. repeated: by the eps, what repeats the launches of a
    call; None until there were two calls.
    """

    rows: int
    groups: tuple[int, ...]
    made: tuple[Fresh | None, ...]
    matrix: tuple[int, int] | None
    views: Views
    scales: Scales | None
    cleared: tuple[int, ...]
    repeated: dict[float, Callable | None]


class Layouts(dict):
    """The Layout of each shape that a plan has met, the first MOST_SHAPES of them. Where tensors
    lie by group, a key has their shapes, strides and item sizes, too.

    read: how each tensor that is read lies, as Port.lies. there: whether it is there. made: how
    each result lies, and its dtype; None for a result that is absent. with_rows: the places of the
    results that have rows. grouped: the places of the tensors that lie by group.
    """

    def __init__(
        self,
        plan: ForwardPlan | BackwardPlan,
        read: Sequence[str],
        there: Sequence[bool],
        made: Sequence[tuple[str, str] | None],
    ):
        super().__init__()
        self._plan, self._read, self._made = plan, (read, there), tuple(made)
        self.with_rows = [i for i, m in enumerate(made) if m is not None and m[0] == "rows"]
        each = enumerate(zip(read, there, strict=True))
        self.grouped = [i for i, (lies, is_there) in each if lies == "group" and is_there]

    def repeated(self, shape: torch.Size, eps: float) -> Callable | None:
        """What repeats calls with inputs of a shape; None before there were two."""
        layout = self.get(shape)
        return layout and layout.repeated.get(eps)

    def __missing__(self, key: Any) -> Layout:
        plan, spec = self._plan, self._plan.spec
        hidden, how = spec.hidden, spec.quantized
        groups: tuple[int, ...] = ()
        shape, by_group = key, ()
        if self.grouped:
            shape, *keys = key
            groups = (keys[0][0].numel() // hidden,)
            by_group = _by_group(spec, self.grouped, keys)
        rows = shape.numel() // hidden
        matrix = rows, hidden
        partials = group_sums = None
        if rows and isinstance(plan, BackwardPlan):
            partials = plan.partials(rows, *groups)
        if rows and isinstance(plan, GroupedPlan):
            group_sums = plan.group_sums(rows, groups[0])
        slots = plan.slots(rows) if rows else None
        scales, cleared = None, ()
        if how is not None:
            scales = Scales.of(how, hidden, rows)
            if scales.count > MOST_SCALES:
                raise NotImplementedError(
                    f"{spec.op}: the kernels write up to {MOST_SCALES} scales, got {scales.count}"
                )
            added = ("one", "scales") if scales.padding else ("one",)
            cleared = tuple([i for i, made in enumerate(self._made) if made and made[0] in added])
        made = [m and _fresh(*m, tuple(shape), spec, rows, groups, scales) for m in self._made]
        made.append(partials and Fresh(partials, (partials[1], 1), torch.float32))
        made.append(slots and Fresh(slots, (slots[1], 1), torch.int32))
        if isinstance(plan, GroupedPlan):
            made.append(group_sums and Fresh(group_sums, (hidden, 1), torch.float32))
        layout = Layout(
            rows,
            groups if isinstance(plan, BackwardPlan) else (),
            tuple(made),
            None if shape == matrix else matrix,
            Views.of(spec, rows, shape, *self._read, by_group),
            scales,
            cleared,
            {},
        )
        if len(self) < MOST_SHAPES:
            self[key] = layout
        return layout


def _by_group(
    spec: NormSpec, places: list[int], keys: Sequence[tuple[torch.Size, tuple, int]]
) -> tuple | None:
    """Views.by_group of tensors of these places. keys: the shape, strides and item size of each."""
    strides = [group_stride(shape, apart, item, spec) for shape, apart, item in keys]
    if None in strides:
        return None
    shape = keys[0][0].numel() // spec.hidden, spec.hidden
    return tuple([(i, shape, (stride, 1)) for i, stride in zip(places, strides, strict=True)])


def _fresh(
    lies: str,
    dtype: str,
    shape: tuple,
    spec: NormSpec,
    rows: int,
    groups: tuple[int, ...],
    scales: Scales | None,
) -> Fresh:
    if lies == "rows":
        return Fresh(shape, contiguous_strides_of(shape), getattr(torch, dtype))
    if lies == "group":
        return Fresh((*groups, spec.hidden), (spec.hidden, 1), getattr(torch, dtype))
    sizes = {"number": rows, "affine": spec.hidden * (spec.heads or 1), "one": 1}
    if lies == "scales":
        return Fresh((scales.count,), (1,), getattr(torch, scales.dtype))
    return Fresh((sizes[lies],), (1,), getattr(torch, dtype))
