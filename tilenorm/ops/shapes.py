"""What follows from the shape of an input, for a plan: what is allocated, and how tensors are read.

It is found once for each shape, and kept.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..launch.plan import BackwardPlan, ForwardPlan, GroupedPlan
from ..launch.scales import Scales
from .layout import MOST_SHAPES, as_read, contiguous_strides_of, reading

MOST_SCALES = 2**31 - 1  # the kernels number scales in 32 bits


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
    shape and strides of each result that the kernels write as a matrix, where it is not one. lies:
    how the tensors lie that are read, see as_read. scales: of a quantised norm. cleared: the places
    of the results that the kernels add to, or do not write whole. repeated: by the eps, what
    repeats the launches of a call; None until there were two calls.
    """

    rows: Any
    groups: tuple[int, ...]
    made: tuple[Fresh | None, ...]
    written: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]
    lies: Any
    scales: Scales | None
    cleared: tuple[int, ...]
    repeated: dict[float, Callable | None]


class Layouts(dict):
    """The Layout of each shape that a plan has met, the first MOST_SHAPES of them.

    input: the place of the input among the tensors that are read. read: how each of these lies, as
    Port.lies, and its dtype, None for an absent one. made: how each result lies, and its dtype;
    None for a result that is absent. likes: where heads are rotated, for each result that is made,
    the place of the tensor that has its shape, or whose rows have a number. grouped: the places of
    the tensors whose shapes and strides a key has beside the shape of the input: what lies by
    group, or all where heads are rotated. key_of: a function of the tensors that returns the key;
    None where the key is the shape of the input alone.
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
        self.grouped = [i for i, lies in there if lies == "group" or plan.spec.rotation]
        self.key_of = partial(key_of, input, self.grouped) if self.grouped else None

    as_read = staticmethod(as_read)

    def repeated(self, key: Any, eps: float) -> Callable | None:
        """What repeats calls with tensors of a key; None before there were two."""
        layout = self.get(key)
        return layout and layout.repeated.get(eps)

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
        shape, of_groups = key, ()
        if self.grouped:
            shape, (of_groups, _), *_ = key
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
        shapes["affine"] = (hidden * (spec.heads or 1),)
        shapes |= {"scales": (scales.count,)} if scales else {}
        matrices = {"rows": (rows, hidden), "group": (*groups, hidden)}
        made, written = [], []
        for place, result in enumerate(self._made):
            lies, dtype = result or ("", "")
            made.append(result and Fresh.of(shapes[lies], dtype or scales.dtype))
            if lies in matrices and shapes[lies] != matrices[lies]:
                written.append((place, matrices[lies], (hidden, 1)))
        made += [Fresh.of(shape, dtype) if shape else None for shape, dtype in scratch]
        read = reading(spec, [lies for lies, _ in self._read])
        groups = groups if backward else ()
        return Layout(rows, groups, tuple(made), tuple(written), read, scales, cleared, {})


def key_of(input: int, grouped: Sequence[int], tensors: Sequence[Tensor]) -> tuple:
    """The shape of the input, and the shape and the strides of each tensor at `grouped`."""
    key: list = [tensors[input].shape]
    for place in grouped:
        tensor = tensors[place]
        key.append((tensor.shape, tensor.stride()))
    return tuple(key)
