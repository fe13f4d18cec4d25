"""A plan turns a spec and a target into kernel calls; it is made once and kept.

`launches` returns what is to be launched, of arrays as ForwardArrays or BackwardArrays; `calls`
the same with the arrays. It is the one place that knows the order of a kernel's arguments:
launching, compiling ahead and the tests' interpreter all use it. What depends on the number of rows
is kept for the last few numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from math import gcd

import cuda.tile as ct

from ..kernels.backward import norm_backward
from ..kernels.column_sum import column_sum
from ..kernels.exchange import clear_slots
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
    taking,
)
from .config import Backward, ColumnSum, Forward, Hints, cdiv, tile_width
from .target import Target

POLLS = 1 << 12  # about 4 ms: what another kernel on the same GPU may keep blocks of a row apart
CLEAR_SLOTS, COLUMN_SUM = (hinted(kernel, Hints()) for kernel in (clear_slots, column_sum))
CLEARED = 1024  # slots that a block empties
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
class _Plan:
    """What plans share: tiles, chunks, and which inputs they read in place."""

    spec: NormSpec
    target: Target
    config: Forward | Backward

    @cached_property
    def leading(self) -> int:
        """Most leading dimensions of an input that is read in place: two where a tile is one row.

        Rows that are not evenly spaced the compiler may lay out otherwise, and sum in another order
        (seen at N = 37, 64, on more warps at 4096, in chunks at 65536). Inputs with heads all have
        two.
        """
        config = self.config
        gathered_by_more_warps = config.hints.num_worker_warps is not None and not config.tma
        one_row = config.rows == 1 and self.chunks == 1
        return 2 if one_row and not gathered_by_more_warps else 1

    @cached_property
    def _widths(self) -> tuple[int, ...]:
        return self.config.widths or (tile_width(self.spec.hidden),)

    @cached_property
    def chunks(self) -> int:
        """How many blocks share a row."""
        return cdiv(self.spec.hidden, sum(self._widths))

    @cached_property
    def tile_heads(self) -> int:
        """Heads of a token in a tile: as many as divide both; 0 without heads."""
        return gcd(self.spec.heads, self.config.rows) if self.spec.heads else 0

    @cached_property
    def _groups(self) -> int:
        """Tiles after which the heads repeat."""
        return self.spec.heads // self.tile_heads if self.spec.heads else 1

    def tiles(self, rows: int) -> int:
        heads, tile_rows = self.spec.heads, self.config.rows
        if not heads:
            return cdiv(rows, tile_rows)
        return cdiv(rows // heads, tile_rows // self.tile_heads) * self._groups

    @cached_property
    def resident(self) -> int:
        """Blocks of a persistent grid that run side by side."""
        return self.target.multiprocessors * (self.config.hints.occupancy or 1)

    @cached_property
    def _shares(self) -> bool:
        """Whether blocks tell each other what they have of a row's sums."""
        return self.chunks > 1

    @cached_property
    def _tile(self) -> tuple:
        """N, HEADS, TILE_ROWS, TILE_HEADS, WIDTHS, CHUNKS, PADDED_CHUNKS, POLLS, OVERLAP."""
        heads = (self.spec.heads, self.config.rows, self.tile_heads)
        padded = tile_width(self.chunks)
        chunks = (self._widths, self.chunks, padded, POLLS if self._shares else 0, self._overlap)
        return (self.spec.hidden, *heads, *chunks)

    @property
    def _overlap(self) -> bool:
        """Whether a kernel starts while the one ahead of it, which it waits for, still runs."""
        return self.target.has_dependent_launch

    @cached_property
    def _starts_early(self) -> bool:
        """Whether the norm's own kernel does: what is ahead of it empties its slots."""
        return self._shares and self._overlap

    def slots(self, rows: int) -> tuple[int, int] | None:
        """Shape of the int32 slots by which blocks share rows: two a chunk for LayerNorm."""
        if not self._shares:
            return None
        return rows, self.chunks * (2 if self.spec.norm == "layer" else 1)

    def _clear(self, take: Callable, rows: int) -> list[Launch]:
        """The launch that empties the slots."""
        if not self._shares:
            return []
        width = self.slots(rows)[1]
        padded = tile_width(width)
        tile_rows = max(1, CLEARED // padded)
        rest = (tile_rows, padded, self._overlap)
        return [Launch(CLEAR_SLOTS, (cdiv(rows, tile_rows),), take, rest)]


@dataclass(frozen=True)
class ForwardPlan(_Plan):
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
        how = (config.loop, config.tma, config.store, packed, fetch, self.ordered, spec.aligned)
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
            tiles, tail = self.tiles(rows), (rows, eps, *self._constants)
            if self.config.loop:
                return [Launch(self._kernel, (min(tiles, self.resident),), tuple, (0, *tail))]
            made = self._clear(_FORWARD_SLOTS, rows)
            for first, count in parts(tiles, MAX_GRID // self.chunks):
                rest, grid = (first, *tail), (count * self.chunks,)
                made.append(Launch(self._kernel, grid, tuple, rest, self._starts_early))
            return made

        return launches


@dataclass(frozen=True)
class BackwardPlan(_Plan):
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


def _gated(spec: NormSpec) -> tuple[bool, bool]:
    """GATED, GATE_FIRST."""
    return spec.gate is not None, spec.gate is not None and spec.gate_first
