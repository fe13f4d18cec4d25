"""A plan turns a spec and a target into kernel calls; it is made once and kept.

`calls` returns what is to be launched, as (kernel, grid, arguments). It is the one place that knows
the order of a kernel's arguments: launching, compiling ahead and the tests' interpreter all use it.
An array that a flag excludes is passed as x, which no kernel writes.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import cuda.tile as ct

from ..kernels import wide
from ..kernels.backward import norm_backward
from ..kernels.column_sum import column_sum
from ..kernels.forward import norm_forward
from ..spec import NormSpec
from . import heuristics
from .config import Backward, ColumnSum, Forward, Hints, Wide
from .target import Target

MAX_GRID = (1 << 24) - 1  # blocks in one dimension of a cuTile grid


class Call(NamedTuple):
    kernel: ct.kernel
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]


class Needs(NamedTuple):
    """Which gradients are asked for."""

    dx: bool
    dw: bool
    db: bool

    @property
    def sums(self) -> int:
        """How many sums over rows."""
        return self.dw + self.db


def launch(stream: int, calls: list[Call]) -> None:
    """Queue the calls on a CUDA stream of the current device."""
    for kernel, grid, arguments in calls:
        ct.launch(stream, grid, kernel, arguments)


@cache
def plan_forward(spec: NormSpec, target: Target, save: bool) -> "RowForward | WideForward":
    """The plan for y, and for rstd if `save`."""
    config = heuristics.forward(spec, target)
    kind = WideForward if isinstance(config, Wide) else RowForward
    return kind(spec, target, config, save)


@cache
def plan_backward(spec: NormSpec, target: Target, needs: Needs) -> "RowBackward | WideBackward":
    """The plan for those of dx, dW and dB that are needed."""
    config = heuristics.backward(spec, target)
    kind = WideBackward if isinstance(config, Wide) else RowBackward
    return kind(spec, target, config, heuristics.column_sum(spec, target), needs)


@cache
def _hinted(kernel: ct.kernel, hints: Hints) -> ct.kernel:
    """The kernel with hints: kept, because a hinted kernel has a compile cache of its own."""
    given = hints.given()
    return kernel.replace_hints(**given) if given else kernel


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class RowForward:
    """Whole rows in registers, one launch."""

    spec: NormSpec
    target: Target
    config: Forward
    save: bool

    def workspace(self, rows: int) -> None:
        """No float32 workspace."""

    @cached_property
    def _kernel(self) -> ct.kernel:
        return _hinted(norm_forward, self.config.hints)

    @cached_property
    def _constants(self) -> tuple:
        tile = heuristics.tile_width(self.spec.hidden)
        return (self.spec.hidden, self.config.rows, tile, *_affine(self.spec), self.save)

    def calls(self, x, weight, bias, y, rstd, workspace, rows: int, eps: float) -> list[Call]:
        blocks = _cdiv(rows, self.config.rows)
        grid = (blocks,) if blocks <= MAX_GRID else (1 << 20, _cdiv(blocks, 1 << 20))
        return [Call(self._kernel, grid, (x, weight, bias, y, rstd, rows, eps, *self._constants))]


@dataclass(frozen=True)
class WideForward:
    """Chunks of rows, two launches: partial sums of squares, then y."""

    spec: NormSpec
    target: Target
    config: Wide
    save: bool

    @cached_property
    def chunks(self) -> int:
        return _cdiv(self.spec.hidden, self.config.tile)

    def workspace(self, rows: int) -> tuple[int, int]:
        """Shape of the float32 workspace."""
        return rows, self.chunks

    def calls(self, x, weight, bias, y, rstd, workspace, rows: int, eps: float) -> list[Call]:
        spec, tile, grid = self.spec, self.config.tile, (rows * self.chunks,)
        padded = heuristics.tile_width(self.chunks)
        size = (spec.hidden, self.chunks)
        stats = (x, workspace, *size, tile, spec.aligned)
        apply = (x, weight, bias, workspace, y, rstd, eps, *size, padded, tile, *_affine(spec))
        return [
            Call(wide.wide_squares, grid, stats),
            Call(wide.wide_forward, grid, (*apply, self.save)),
        ]


@dataclass(frozen=True)
class _BackwardPlan:
    spec: NormSpec
    target: Target
    config: Backward | Wide
    sum_config: ColumnSum
    needs: Needs

    def partials(self, rows: int) -> tuple[int, int] | None:
        """Shape of the float32 scratch of partial sums over rows; None when none is needed."""
        sums = self.needs.sums
        return (sums * self.blocks(rows), self.spec.hidden) if sums else None

    def _column_sum(self, partials, dw, db, rows: int) -> list[Call]:
        sums, config = self.needs.sums, self.sum_config
        if not sums:
            return []
        first, second = (dw, db) if self.needs.dw else (db, dw)
        grid = (_cdiv(self.spec.hidden, config.tile), sums)
        arguments = (partials, first, second, self.blocks(rows), sums, config.rows, config.tile)
        return [Call(column_sum, grid, arguments)]


@dataclass(frozen=True)
class RowBackward(_BackwardPlan):
    """Whole rows in registers: a persistent grid, then the column sum."""

    def workspace(self, rows: int) -> None:
        """No float32 workspace beyond the partial sums."""

    def blocks(self, rows: int) -> int:
        """How many blocks share the rows; each leaves one row of partial sums per output."""
        resident = self.target.multiprocessors * (self.config.hints.occupancy or 1)
        return min(_cdiv(rows, self.config.rows), resident)

    @cached_property
    def _kernel(self) -> ct.kernel:
        return _hinted(norm_backward, self.config.hints)

    @cached_property
    def _constants(self) -> tuple:
        spec, config = self.spec, self.config
        affine = (spec.aligned, spec.offset, spec.weight is not None)
        return (spec.hidden, config.rows, config.widths, config.tma, *affine, *self.needs)

    def calls(self, x, dy, weight, rstd, dx, partials, workspace, dw, db, rows) -> list[Call]:
        arguments = (x, dy, weight, rstd, dx, partials, rows, *self._constants)
        main = Call(self._kernel, (self.blocks(rows),), arguments)
        return [main, *self._column_sum(partials, dw, db, rows)]


@dataclass(frozen=True)
class WideBackward(_BackwardPlan):
    """Chunks of rows: partial dots and partial sums, then dx, then the column sum."""

    @cached_property
    def chunks(self) -> int:
        return _cdiv(self.spec.hidden, self.config.tile)

    def workspace(self, rows: int) -> tuple[int, int] | None:
        """Shape of the float32 workspace."""
        return (rows, self.chunks) if self.needs.dx else None

    def blocks(self, rows: int) -> int:
        """How many groups share the rows; each leaves one row of partial sums per output."""
        resident = self.target.multiprocessors * self.config.occupancy
        return min(rows, _cdiv(resident, self.chunks))

    def calls(self, x, dy, weight, rstd, dx, partials, workspace, dw, db, rows) -> list[Call]:
        spec, tile = self.spec, self.config.tile
        size = (spec.hidden, self.chunks)
        affine = (spec.aligned, spec.offset, spec.weight is not None)
        kernel = _hinted(wide.wide_dots, Hints(occupancy=self.config.occupancy))
        dots = (x, dy, weight, rstd, workspace, partials, rows, *size, tile, *affine, *self.needs)
        calls = [Call(kernel, (self.blocks(rows) * self.chunks,), dots)]
        if self.needs.dx:
            padded = heuristics.tile_width(self.chunks)
            apply = (x, dy, weight, rstd, workspace, dx, *size, padded, tile, *affine)
            calls.append(Call(wide.wide_backward, (rows * self.chunks,), apply))
        return calls + self._column_sum(partials, dw, db, rows)


def _affine(spec: NormSpec) -> tuple:
    return spec.aligned, spec.offset, spec.weight is not None, spec.bias is not None
