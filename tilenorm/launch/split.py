"""Plans of rows in pieces: of which a process holds some columns. Their sums are added up between
the kernels, by whoever runs the plans (see kernels/split_forward.py).

A spec's `hidden` is the length of a piece. The length of the whole row is a number of each call.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import ClassVar

import cuda.tile as ct

from ..kernels import split_backward, split_forward
from ..kernels.constants import How
from ..spec import NormSpec
from . import heuristics
from .arrays import MAIN_ARRAYS
from .calls import Launch, Needs, constants, rectangles
from .config import Hints, cdiv
from .kernel import hinted
from .plan import BackwardPlan, backward_spec
from .target import Target
from .tiling import Tiling, remembered

ROW_CENTER = hinted(split_forward.row_center, Hints())
CENTER_TILE = 512  # rows that a block of row_center serves


@dataclass(frozen=True)
class RowPlan(Tiling):
    """The launches of a kernel that reads each tile of rows once.

    take: selects the kernel's arrays. apart: whether each chunk of a wide row has a block of its
    own; else a block takes the chunks of its rows one after the other.
    """

    function: ct.kernel
    take: Callable
    apart: bool

    @remembered
    def launches(self, rows: int, number: float) -> list[Launch]:
        """number: 1 / the length of a whole row for sums, else eps."""
        groups = [self.norm, self.cut, *[How(TOGETHER=self.config.together)] * self.apart]
        after = (number, rows, *map(constants, groups))
        kernel = hinted(self.function, self.config.hints)
        return [
            Launch(kernel, (1, y, z), (first, y), self.take, after)
            for first, y, z in rectangles(self.tiles(rows) * (self.chunks if self.apart else 1))
        ]


@cache
def plan_row_sums(spec: NormSpec, target: Target) -> RowPlan:
    """Of x, residual and a gate before the norm. The weight of the spec does not matter."""
    config = heuristics.piece(spec, 1 + (spec.residual is not None) + bool(spec.gate))
    return RowPlan(spec, target, config, split_forward.row_sums, tuple, apart=False)


@cache
def plan_row_apply(spec: NormSpec, target: Target) -> RowPlan:
    """spec.residual: the dtype of the rows that are read, where it is not y's."""
    config = heuristics.piece(spec, 1 + bool(spec.gate))
    return RowPlan(spec, target, config, split_forward.row_apply, tuple, apart=True)


@cache
def plan_grad_sums(spec: NormSpec, target: Target) -> RowPlan:
    config = heuristics.piece(spec, 2 + bool(spec.gate))
    return RowPlan(spec, target, config, split_backward.grad_sums, MAIN_ARRAYS, apart=False)


def center_launches(rows: int, count: int, share: float) -> list[Launch]:
    """The launch of row_center for pieces of `count` columns."""
    after = (float(count), share, rows, CENTER_TILE)
    return [Launch(ROW_CENTER, (cdiv(rows, CENTER_TILE),), (), tuple, after)]


@cache
def plan_grad_apply(spec: NormSpec, target: Target, needs: Needs) -> "GradientPlan":
    """The plan for the needed gradients."""
    spec = backward_spec(spec, needs)
    return GradientPlan(spec, target, heuristics.piece_backward(spec, target, needs), needs)


@dataclass(frozen=True)
class GradientPlan(BackwardPlan):
    """A backward pass to which the sums over rows are given, so that no blocks exchange any."""

    function: ClassVar[ct.kernel] = split_backward.grad_apply

    @cached_property
    def _exchanges(self) -> bool:
        return False
