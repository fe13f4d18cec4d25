"""A plan turns a spec and a target into kernel calls; it is made once and kept.

`launches` returns what is to be launched, of arrays as ForwardArrays or BackwardArrays; `calls`
the same with the arrays. It is the one place that knows the order of a kernel's arguments:
launching, compiling ahead and the tests' interpreter all use it. What depends on the number of rows
is kept for the last few numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache

import cuda.tile as ct

from ..kernels.backward import norm_backward
from ..kernels.column_sum import column_sum
from ..kernels.forward import norm_forward
from ..spec import NormSpec
from . import heuristics
from .calls import (
    ABSENT,
    MAX_GRID,
    BackwardArrays,
    Call,
    ForwardArrays,
    Launch,
    Needs,
    bound,
    hinted,
    parts,
    rectangles,
    taking,
)
from .config import ColumnSum, Hints, cdiv
from .target import Target
from .tiling import Tiling

COLUMN_SUM = hinted(column_sum, Hints())
# Rows are few while a multiprocessor gets at most so many tiles, or elements of tiles.
FEW_TILES, FEW_ELEMENTS = 2, 24576
SIZES = 64  # numbers of rows that a plan remembers
_FORWARD_SLOTS, _BACKWARD_SLOTS = (taking(a, "slots") for a in (ForwardArrays, BackwardArrays))
_BACKWARD = taking(BackwardArrays, *BackwardArrays._fields[:13])  # without dw and db


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

    few: for rows that all run at once, if the configuration fetches weights.
    """

    save: bool
    few: bool = False

    @cached_property
    def _kernel(self) -> ct.kernel:
        hints = self.config.hints
        return hinted(norm_forward, Hints(None, hints.num_worker_warps) if self.few else hints)

    @cached_property
    def _constants(self) -> tuple:
        spec, config = self.spec, self.config
        packed, fetch = (on and not self.few for on in (config.packed, config.fetch))
        how = (config.loop, config.tma, config.store, packed, fetch, config.together)
        how += (self.ordered, spec.aligned)
        norm = (spec.norm == "layer", spec.residual is not None, *_gated(spec))
        affine = (spec.weight is not None, spec.bias is not None, spec.offset)
        return (*self._tile, *how, *norm, *affine, spec.rounding == "early", self.save)

    @property
    def ordered(self) -> bool:
        """Whether the kernel prescribes the order of what a thread adds up."""
        return self.config.fetch or self.chunks > 1

    @cached_property
    def _of_few(self) -> "ForwardPlan":
        return replace(self, few=True)

    def queues(self, rows: int) -> bool:
        """Whether there are more blocks than run side by side."""
        at_once = max(1, min(FEW_TILES, FEW_ELEMENTS // (self.config.rows * self.spec.hidden)))
        return self.tiles(rows) > at_once * self.target.multiprocessors

    def calls(self, arrays: ForwardArrays, rows: int, eps: float) -> list[Call]:
        return bound(self.launches(rows, eps), arrays)

    @cached_property
    def launches(self) -> Callable[[int, float], list[Launch]]:
        @lru_cache(SIZES)
        def launches(rows, eps):
            if self.config.fetch and not self.few and not self.queues(rows):
                return self._of_few.launches(rows, eps)
            tiles, rest = self.tiles(rows), (eps, rows, *self._constants)
            if self.config.loop:
                grid = (min(tiles, self.resident),)
                return [Launch(self._kernel, grid, _from(0, 1), rest)]
            made, early = self._clear(_FORWARD_SLOTS, rows), self._starts_early
            if self.chunks > 1:
                for first, count in parts(tiles, MAX_GRID // self.chunks):
                    grid = (count * self.chunks,)
                    made.append(Launch(self._kernel, grid, _from(first, 1), rest, early))
            else:
                for first, y, z in rectangles(tiles):
                    made.append(Launch(self._kernel, (1, y, z), _from(first, y), rest))
            return made

        return launches


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

    @cached_property
    def _constants(self) -> tuple:
        spec, config = self.spec, self.config
        how = (config.tma, config.store, config.packed, config.reread, spec.aligned)
        affine = (spec.weight is not None, spec.bias is not None, spec.offset)
        norm = (spec.norm == "layer", *_gated(spec), *affine)
        return (*self._tile, *how, *norm, *self.needs)

    def calls(self, arrays: BackwardArrays, rows: int) -> list[Call]:
        return bound(self.launches(rows), arrays)

    @cached_property
    def launches(self) -> Callable[[int], list[Launch]]:
        @lru_cache(SIZES)
        def launches(rows):
            blocks = self.blocks(rows)
            grid, tail = (blocks * self.chunks,), (rows, *self._constants)
            main = Launch(self._kernel, grid, _BACKWARD, tail, self._starts_early)
            return [*self._clear(_BACKWARD_SLOTS, rows), main, *self._column_sum(blocks)]

        return launches

    def _column_sum(self, blocks: int) -> list[Launch]:
        """The launch that turns partial sums into dW and dB."""
        if not self.needs.sums:
            return []
        config, rows = self.sum_config, self._partial_rows(blocks)
        sums = [name for name in ("dw", "db") if getattr(self.needs, name)]
        take = taking(BackwardArrays, "partials", *sums)
        absent = [ABSENT] * (2 - len(sums))
        rest = (*absent, rows, len(sums), config.rows, config.tile, self._overlap)
        grid = cdiv(self._sum_width, config.tile), len(sums)
        return [Launch(COLUMN_SUM, grid, take, rest, self._overlap)]


def _from(first: int, step: int) -> Callable:
    """What gives a forward kernel its arrays, after the tile it starts at and a step."""
    return lambda arrays: (first, step, *arrays)


def _gated(spec: NormSpec) -> tuple[bool, bool]:
    """GATED, GATE_FIRST."""
    return spec.gate is not None, spec.gate is not None and spec.gate_first
