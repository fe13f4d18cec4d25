"""A plan turns a spec and a target into kernel calls; it is made once and kept.

`launches` returns what is to be launched, of arrays as ForwardArrays or BackwardArrays; `calls`
the same with the arrays. It is the one place that knows the order of a kernel's arguments:
launching, compiling ahead and the tests' interpreter all use it. What depends on the number of rows
is kept for the last few numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from operator import itemgetter

import cuda.tile as ct

from ..kernels.backward import norm_backward
from ..kernels.column_sum import column_sum
from ..kernels.constants import BackwardHow, RowHow, SharedHow, StreamHow
from ..kernels.forward import row_forward, shared_forward, stream_forward
from ..spec import NormSpec
from . import heuristics
from .calls import (
    MAX_GRID,
    BackwardArrays,
    Call,
    ForwardArrays,
    Launch,
    Needs,
    bound,
    constants,
    hinted,
    parts,
    rectangles,
    taking,
)
from .config import ColumnSum, Hints, RowForward, SharedForward, StreamForward, cdiv
from .target import Target
from .tiling import Tiling

COLUMN_SUM = hinted(column_sum, Hints())
FORWARD = {RowForward: row_forward, StreamForward: stream_forward, SharedForward: shared_forward}
# A batch is small while a multiprocessor gets at most so many tiles, or elements of tiles.
FEW_TILES, FEW_ELEMENTS = 2, 24576
SIZES = 64  # numbers of rows that a plan remembers
_FORWARD_SLOTS, _BACKWARD_SLOTS = (taking(a, "slots") for a in (ForwardArrays, BackwardArrays))
_BACKWARD = itemgetter(slice(BackwardArrays._fields.index("dw")))  # the arrays before dw and db


def _all(arrays: tuple) -> tuple:
    return arrays


@cache
def plan_forward(spec: NormSpec, target: Target, save: bool) -> "ForwardPlan":
    """The plan for y and the sum, and for mean and rstd if `save`.

    These are also written where an occupancy bounds the registers and the compiler orders what a
    thread adds up, by the registers that are left: without them it could have other last bits.
    """
    plan = ForwardPlan(spec, target, heuristics.forward(spec, target), save)
    bounded = plan.config.hints.occupancy is not None
    return replace(plan, save=True) if bounded and not plan.ordered else plan


@cache
def plan_backward(spec: NormSpec, target: Target, needs: Needs) -> "BackwardPlan":
    """The plan for those gradients that are needed."""
    spec = replace(spec, rounding="late")  # of the forward pass only
    config = heuristics.backward(spec, target, needs)
    return BackwardPlan(spec, target, config, heuristics.column_sum(spec, target), needs)


@dataclass(frozen=True)
class ForwardPlan(Tiling):
    """One launch, after one that empties slots where blocks share rows.

    small: the variant of a configuration with fetch for batches whose tiles all run at once.
    """

    save: bool
    small: bool = False

    @cached_property
    def _kernel(self) -> ct.kernel:
        hints = self.config.hints
        if self.small:
            hints = Hints(None, hints.num_worker_warps)
        return hinted(FORWARD[type(self.config)], hints)

    @cached_property
    def _how(self) -> RowHow | StreamHow | SharedHow:
        config = self.config
        match config:
            case RowForward():
                packed, fetch = (on and not self.small for on in (config.packed, config.fetch))
                return RowHow(packed, fetch, self.ordered)
            case StreamForward():
                return StreamHow(config.tma, config.store)
            case SharedForward():
                return SharedHow(config.packed, config.together, *self._sharing)

    @property
    def fetches(self) -> bool:
        """Whether weights are read with the row, and small batches have a variant."""
        return isinstance(self.config, RowForward) and self.config.fetch

    @property
    def ordered(self) -> bool:
        """Whether the kernel prescribes the order of what a thread adds up."""
        return self.fetches or self.chunks > 1

    @cached_property
    def _of_small(self) -> "ForwardPlan":
        return replace(self, small=True)

    def queues(self, rows: int) -> bool:
        """Whether there are more blocks than run side by side."""
        at_once = max(1, min(FEW_TILES, FEW_ELEMENTS // (self.config.rows * self.spec.hidden)))
        return self.tiles(rows) > at_once * self.target.multiprocessors

    def calls(self, arrays: ForwardArrays, rows: int, eps: float) -> list[Call]:
        return bound(self.launches(rows, eps), arrays)

    @cached_property
    def launches(self) -> Callable[[int, float], list[Launch]]:
        groups = tuple(map(constants, (self.norm(self.save), self.cut, self._how)))

        @lru_cache(SIZES)
        def launches(rows, eps):
            if self.fetches and not self.small and not self.queues(rows):
                return self._of_small.launches(rows, eps)
            after = (eps, rows, *groups)
            return [
                *self._clear(_FORWARD_SLOTS, rows),
                *(
                    Launch(self._kernel, grid, start, _all, after, self._starts_early)
                    for grid, start in self._grids(rows)
                ),
            ]

        return launches

    def _grids(self, rows: int) -> list[tuple[tuple[int, ...], tuple[int, int]]]:
        """The grid of each launch, with the tile that it starts at and a step."""
        tiles = self.tiles(rows)
        match self.config:
            case RowForward():
                return [((1, y, z), (first, y)) for first, y, z in rectangles(tiles)]
            case StreamForward():
                return [((min(tiles, self.resident),), (0, 1))]
            case SharedForward():
                chunks = self.chunks
                found = parts(tiles, MAX_GRID // chunks)
                return [((count * chunks,), (first, 1)) for first, count in found]


@dataclass(frozen=True)
class BackwardPlan(Tiling):
    """A persistent grid, then the column sum; ahead of them a launch that empties slots, if any."""

    sum_config: ColumnSum
    needs: Needs

    @cached_property
    def _shares(self) -> bool:
        needs = self.needs
        through_norm = needs.dx or needs.dresidual or (needs.dgate and self.spec.gate_first)
        return self.chunks > 1 and through_norm

    def blocks(self, rows: int) -> int:
        """How many blocks, or sets of blocks that share rows, split the tiles.

        As many as are resident, in whole rounds of the heads: blocks of a set that is resident in
        part would wait, in every row, for some that start when others have ended.
        """
        resident, groups = self.resident // self.chunks, self._groups
        return min(self.tiles(rows), max(groups, resident // groups * groups))

    @cached_property
    def partials(self) -> Callable[[int], tuple[int, int] | None]:
        """Shape of the float32 scratch of partial sums over rows; None when none is needed."""

        @lru_cache(SIZES)
        def partials(rows):
            sums = self.needs.sums
            return (sums * self._partial_rows(self.blocks(rows)), self._sum_width) if sums else None

        return partials

    def _partial_rows(self, blocks: int) -> int:
        heads = self.spec.heads
        return blocks * self.config.rows // heads if heads else blocks

    @cached_property
    def _sum_width(self) -> int:
        return self.spec.hidden * (self.spec.heads or 1)

    @cached_property
    def _kernel(self) -> ct.kernel:
        return hinted(norm_backward, self.config.hints)

    def calls(self, arrays: BackwardArrays, rows: int) -> list[Call]:
        return bound(self.launches(rows), arrays)

    @cached_property
    def launches(self) -> Callable[[int], list[Launch]]:
        config = self.config
        how = (config.tma, config.store, config.packed, config.reread)
        groups = (self.norm(False), self.cut, BackwardHow(*how, *self._sharing))
        groups = (*map(constants, groups), tuple(self.needs))

        @lru_cache(SIZES)
        def launches(rows):
            blocks = self.blocks(rows)
            grid, after = (blocks * self.chunks,), (rows, *groups)
            main = Launch(self._kernel, grid, (), _BACKWARD, after, self._starts_early)
            return [*self._clear(_BACKWARD_SLOTS, rows), main, *self._column_sum(blocks)]

        return launches

    def _column_sum(self, blocks: int) -> list[Launch]:
        """The launch that turns partial sums into dW and dB."""
        sums = [name for name in ("dw", "db") if getattr(self.needs, name)]
        if not sums:
            return []
        config, rows = self.sum_config, self._partial_rows(blocks)
        take = taking(BackwardArrays, "partials", *sums)
        after = (rows, config.rows, config.tile, self._overlap)
        grid = cdiv(self._sum_width, config.tile), len(sums)
        return [Launch(COLUMN_SUM, grid, (), take, after, self._overlap)]
