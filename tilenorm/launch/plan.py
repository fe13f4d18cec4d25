"""A plan turns a spec and a target into kernel launches. It is made once and kept.

`launches` returns launch templates, without arrays. Only this module knows the order of a kernel's
arguments: ops, precompile and the tests' interpreter all use plans. A plan remembers its launches
for the row counts that were used last.
"""

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, ClassVar

import cuda.tile as ct

from ..kernels.backward import norm_backward
from ..kernels.constants import Grouped, How
from ..kernels.forward import row_forward, shared_forward, stream_forward
from ..kernels.group_backward import group_backward, group_sum
from ..spec import NormSpec
from ..table import BRANCH_PORTS
from . import forcing, heuristics
from .arrays import MAIN_ARRAYS, BackwardArrays, ForwardArrays, of_group_sums, taking
from .calls import MAX_GRID, Launch, Needs, constants, parts, rectangles
from .config import Backward, ColumnSum, Hints, RowForward, SharedForward, StreamForward, cdiv
from .kernel import hinted
from .order import RowOrder, backward_rule, forward_order
from .quantized import cast_apart, compiled_as
from .rope import RopeBackwardPlan, RopeForwardPlan
from .target import Target
from .tiling import Tiling, remembered
from .tuned import rules

GROUP_SUM = hinted(group_sum, Hints())
FORWARD = {RowForward: row_forward, StreamForward: stream_forward, SharedForward: shared_forward}
_FORWARD_SLOTS, _BACKWARD_SLOTS = (taking(a, "slots") for a in (ForwardArrays, BackwardArrays))


@cache
def plan_forward(spec: NormSpec, target: Target, save: bool) -> "ForwardPlan | RopeForwardPlan":
    """The plan for y and the sum, and for mean and rstd if `save`; of a quantised norm for q and
    the scales, or the plan of the plain norm where a cast follows its kernels (casts_apart).

    Where the kernel prescribes no order, the compiler chooses the one in which a thread adds, by
    the registers that are left. An occupancy hint bounds them, so that a kernel that does not write
    mean and rstd could give y other last bits. In this case the plan always writes mean and rstd.
    """
    if spec.rotation:
        return RopeForwardPlan(spec, target, heuristics.chosen(spec, target), save)
    plan = ForwardPlan(spec, target, heuristics.chosen(spec, target), save)
    if plan.casts_apart:
        return plan_forward(spec.unquantized, target, save)
    return replace(plan, save=True) if plan.hints.occupancy and not plan.ordered else plan


def chain_refused(spec: NormSpec, target: Target) -> str | None:
    """Why one pass does not serve a chain, or None. The inner norm needs whole rows in a block."""
    if spec.dtype != spec.residual:
        return "the residual has another dtype than the input"
    if spec.heads or spec.inner.heads:
        return "a weight has heads"
    if plan_forward(spec, target, True).chunks > 1:
        return "blocks share a row"
    return None


@cache
def plan_backward(
    spec: NormSpec, target: Target, needs: Needs
) -> "BackwardPlan | RopeBackwardPlan":
    """The plan for the needed gradients."""
    spec = backward_spec(spec, needs)
    config = heuristics.chosen(spec, target, needs)
    return backward_kind(spec)(spec, target, config, needs)


def backward_kind(spec: NormSpec) -> "type[BackwardPlan | RopeBackwardPlan]":
    """The class of a norm's plans of its backward pass."""
    return GroupedPlan if spec.modulated else RopeBackwardPlan if spec.rotation else BackwardPlan


def backward_spec(spec: NormSpec, needs: Needs) -> NormSpec:
    """The spec of a backward pass: an addend concerns the sum alone, and rounding y alone. The
    dtype of dy matters where it is not the input's. It is then the skip's, whether a skip or an
    out_dtype gave it to y. A mask and a layer scale concern the gradient of the input alone. The
    gradient is that of y, whether or not y is quantised as well.
    """
    skip = None if spec.y_dtype == spec.dtype else spec.y_dtype
    rounding = spec.rounding if needs.output else "late"
    if not needs.dx:
        spec = replace(spec, **{port.role: None for port in BRANCH_PORTS}, dropout_scale=1.0)
    absent = dict.fromkeys(("addend", "quantized", "out_dtype"))
    return replace(spec, **absent, skip=skip, rounding=rounding)


@dataclass(frozen=True)
class ForwardPlan(Tiling):
    """The launches of a forward pass. If blocks share rows, the first launch empties the slots.

    small: this is the variant for small batches of another plan.
    """

    config: RowForward | StreamForward | SharedForward
    save: bool
    small: bool = False

    arrays: ClassVar[Any] = ForwardArrays

    @cached_property
    def compiled(self) -> RowForward | StreamForward | SharedForward:
        """The configuration that the kernel is compiled with."""
        config = self.config
        chosen_anew = self.spec.quantized and not self.small
        return compiled_as(self.spec, config, self.ordered) if chosen_anew else config

    @cached_property
    def _widths(self) -> tuple[int, ...]:
        return self.compiled.segments(self.spec.hidden)

    @property
    def hints(self) -> Hints:
        """The hints that the kernel is compiled with."""
        return self.compiled.hints

    @property
    def casts_apart(self) -> str | None:
        """Why one kernel does not normalise and quantise, or None: see quantized.cast_apart."""
        if not self.spec.quantized:
            return None
        return cast_apart(self.spec, self.target, self.config)

    @cached_property
    def _how(self) -> How:
        config = self.compiled
        how = {name: getattr(config, name.lower()) for name in ("PACKED", "FETCH", "TMA", "STORE")}
        sharing = self._sharing if self.chunks > 1 else {}
        how |= {"TOGETHER": config.together, "BY_ROWS": self.small and config.rows > 1}
        how["THREADS"] = config.hints.threads if self.ordered else 0
        if isinstance(config, RowForward):
            how |= self._early(self.config.rows * self.spec.hidden)
        else:
            how["OVERLAP"] = self._overlap
        return How(**how, **sharing)

    @cached_property
    def order(self) -> RowOrder:
        """The order in which a row is added up, which decides its bits."""
        return forward_order(self.spec, self.config)

    @property
    def ordered(self) -> bool:
        """Whether the kernel prescribes the order in which a row is added up."""
        return self.order.prescribes

    @cached_property
    def for_small_batches(self) -> "ForwardPlan | None":
        """The variant for batches whose tiles all run at once, or None where it would be this plan.

        A quantised norm has one with fetch alone: its other hints were chosen for it. A forced
        configuration serves batches of every size.
        """
        config = self.config
        forced = config == forcing.of_direction(config.direction)
        if self.small or forced or not isinstance(config, RowForward):
            return None
        if self.spec.quantized and not config.fetch:
            return None
        small = heuristics.of_small_batches(self.spec, config)
        variant = replace(self, config=small, small=True)
        same = small == self.compiled and variant._how == self._how
        return variant if variant.order == self.order and self.ordered and not same else None

    def queues(self, rows: int) -> bool:
        """Whether there are more tiles than run side by side: the batch is not small."""
        elements, hints = self.config.rows * self.spec.hidden, self.config.hints
        most = rules.SMALL_BATCH_TILES
        if hints.occupancy:
            most = rules.SMALL_BATCH_WARPS * 32 // hints.threads
        at_once = max(1, min(most, rules.SMALL_BATCH_ELEMENTS // elements))
        return self.tiles(rows) > at_once * self.target.multiprocessors

    def is_small(self, rows: int) -> bool:
        """Whether the variant for small batches serves so many rows."""
        return self.for_small_batches is not None and not self.queues(rows)

    @remembered
    def launches(self, rows: int, eps: float) -> list[Launch]:
        if self.is_small(rows):
            return self.for_small_batches.launches(rows, eps)
        kernel = hinted(FORWARD[type(self.config)], self.hints)
        after = (eps, rows, *map(constants, (self.norm, self.cut, self._how)))
        return [
            *self._clear(_FORWARD_SLOTS, rows),
            *(
                # cuTile takes plain tuples alone. Of one of those this is the tuple itself.
                Launch(kernel, grid, start, tuple, after, self._starts_early(grid))
                for grid, start in self._grids(rows)
            ),
        ]

    def _starts_early(self, grid: tuple[int, ...]) -> bool:
        """Whether a launch may start before the launch before it has ended."""
        if isinstance(self.config, RowForward):
            return grid[1] <= self._how.EARLY
        return self._overlap

    def _grids(self, rows: int) -> list[tuple[tuple[int, ...], tuple[int, int]]]:
        """(grid, (first, step)) of each launch.

        first: the tile that the launch starts at. step: the kernel's factor for the third grid
        dimension.
        """
        tiles = self.tiles(rows)
        match self.config:
            case RowForward():
                return [((1, y, z), (first, y)) for first, y, z in rectangles(tiles)]
            case StreamForward():
                return [((min(tiles, self.resident),), (0, 1))]
            case SharedForward():
                chunks = self.chunks
                split = parts(tiles, MAX_GRID // chunks)
                return [((count * chunks,), (first, 1)) for first, count in split]


@dataclass(frozen=True)
class BackwardPlan(Tiling):
    """The launches of a backward pass: the norm and, if there are sums over rows, the column sum.

    If blocks share rows, the first launch empties the slots.
    """

    config: Backward
    needs: Needs

    function: ClassVar[ct.kernel] = norm_backward
    arrays: ClassVar[Any] = BackwardArrays

    @cached_property
    def _exchanges(self) -> bool:
        needs = self.needs
        through_norm = needs.dx or needs.dresidual or (needs.dgate and self.spec.gate_first)
        return self.chunks > 1 and through_norm

    def blocks(self, rows: int) -> int:
        """How many blocks, or sets of blocks that share rows, split the tiles.

        As many as are resident at once. A set with blocks that are not resident would wait at every
        row until another set has ended. With heads the number is rounded down to a multiple of the
        groups of heads, so that a block always has the same heads.
        """
        resident, groups = self.resident // self.chunks, self._groups
        return min(self.tiles(rows), max(groups, resident // groups * groups))

    @cached_property
    def _how(self) -> How:
        config = self.config
        threads = config.hints.threads if backward_rule(self.spec, self.target) else 0
        how = {"THREADS": threads, "REREAD": config.reread, "OVERLAP": self._starts_early}
        return How(config.packed, config.tma, config.store, **how, **self._sharing)

    @property
    def _starts_early(self) -> bool:
        """Whether the norm's kernel may start before the kernel before it has ended."""
        config = self.config
        return self._overlap and not (config.tma and config.hints == rules.NEVER_EARLY)

    @remembered
    def partials(self, rows: int) -> tuple[int, int] | None:
        """Shape of the float32 scratch for partial sums over rows; None without dw and db."""
        sums = self.needs.sums
        return (sums * self._partial_rows(self.blocks(rows)), self._sum_width) if sums else None

    def _partial_rows(self, blocks: int) -> int:
        heads = self.spec.heads
        return blocks * self.config.rows // heads if heads else blocks

    @cached_property
    def _sum_width(self) -> int:
        return self.spec.hidden * (self.spec.heads or 1)

    @remembered
    def launches(self, rows: int, _eps: float = 0.0) -> list[Launch]:
        """_eps: is not read, because the saved rstd holds it."""
        config, blocks = self.config, self.blocks(rows)
        kernel = hinted(self.function, config.hints)
        groups = map(constants, (self.norm, self.cut, self._how))
        grid, after = (blocks * self.chunks,), (rows, *groups, self.needs.dw, self.needs.db)
        main = Launch(kernel, grid, (), MAIN_ARRAYS, after, self._starts_early)
        return [*self._clear(_BACKWARD_SLOTS, rows), main, *self._sums(blocks)]

    def _sums(self, blocks: int) -> list[Launch]:
        """The launch that turns partial sums into dW and dB."""
        sums = [name for name in ("dw", "db") if getattr(self.needs, name)]
        return self._column_sum(BackwardArrays, sums, self._partial_rows(blocks), self._sum_width)


@dataclass(frozen=True)
class GroupedPlan(BackwardPlan):
    """The launches of a backward pass of rows that are modulated by group: the norm, and the sums
    over the blocks that a group has.

    Its functions of the rows take the number of groups, too.
    """

    function: ClassVar[ct.kernel] = group_backward

    def sums(self, groups: int) -> Grouped:
        """The sums that are needed."""
        needs, spec = self.needs, self.spec
        dscale, dshift, dgate = needs.modulation
        a, b = dscale or needs.dw, dshift or needs.db or (dscale and spec.bias is not None)
        whole = groups >= rules.WHOLE_GROUPS * self.resident
        return Grouped(a, b, dgate, needs.dw, needs.db, whole)

    def blocks(self, rows: int, groups: int = 1) -> int:
        """As many as are resident at once, unless there is too little to do."""
        if self.sums(groups).WHOLE:
            return self.resident
        tiles = cdiv(rows // groups, self.config.rows) * groups
        return min(cdiv(tiles, cdiv(rules.LEAST_ROWS, self.config.rows)), self.resident)

    @remembered
    def partials(self, rows: int, groups: int) -> tuple[int, int] | None:
        """Shape of the float32 scratch for the sums over all rows; None without dw and db."""
        sums = self.needs.sums
        return (sums * self.blocks(rows, groups), self.spec.hidden) if sums else None

    def sum_config(self, blocks: int, groups: int) -> ColumnSum:
        return heuristics.group_sum(self.spec.hidden, cdiv(blocks, groups))

    def group_sums(self, rows: int, groups: int) -> tuple[int, int] | None:
        """Shape of the float32 scratch for the sums by group, a row that nobody reads where blocks
        have whole groups; None without sums.
        """
        sums = self.sums(groups)
        count = sums.A + sums.B + sums.C
        slots = 1 if sums.WHOLE else self.blocks(rows, groups) + groups - 1
        return (count * slots, self.spec.hidden) if count else None

    @remembered
    def launches(self, rows: int, _eps: float, groups: int) -> list[Launch]:
        blocks, sums = self.blocks(rows, groups), constants(self.sums(groups))
        norm, cut, how = map(constants, (self.norm, self.cut, How(OVERLAP=self._overlap)))
        kernel, after = hinted(self.function, self.config.hints), (rows, norm, cut, how, sums)
        main = Launch(kernel, (blocks,), (), MAIN_ARRAYS, after, self._overlap)
        calls = [main, *self._sums(blocks)]
        if any(self.needs.modulation) and not self.sums(groups).WHOLE:
            config = self.sum_config(blocks, groups)
            tiles = self.config.rows, config.rows, config.tile
            after = (rows, blocks, norm, sums, *tiles, self._overlap)
            grid = cdiv(self.spec.hidden, config.tile), groups
            calls.append(Launch(GROUP_SUM, grid, (), of_group_sums, after, self._overlap))
        return calls


forcing.when_changed().extend((plan_forward.cache_clear, plan_backward.cache_clear))
