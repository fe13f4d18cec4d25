"""A plan turns a spec and a target into kernel calls; it is made once and kept.

`calls` returns what is to be launched, as (kernel, grid, arguments). It is the one place that knows
the order of a kernel's arguments: launching, compiling ahead and the tests' interpreter all use it.
An array that a flag excludes is passed as ABSENT, and its kernel does not touch it.
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

ABSENT = 0
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
    config = heuristics.backward(spec, target, needs.sums)
    kind = WideBackward if isinstance(config, Wide) else RowBackward
    return kind(spec, target, config, heuristics.column_sum(spec, target), needs)


def _leading(config: Forward | Backward | Wide) -> int:
    """Leading dimensions of an input that is read in place: two where a tile is one row.

    The rows of a tile are evenly spaced, else the compiler lays the tile out otherwise and sums it
    in another order (seen at N = 37 and 64).
    """
    return 2 if getattr(config, "rows", 1) == 1 else 1


@cache
def _hinted(kernel: ct.kernel, hints: Hints) -> ct.kernel:
    """The kernel with hints: kept, because a hinted kernel has a compile cache of its own."""
    given = hints.given()
    return kernel.replace_hints(**given) if given else kernel


def _launches(rows: int, most: int) -> list[tuple[int, int]]:
    """(first row, rows) of each launch, where one reaches at most `most` rows."""
    if rows <= most:
        return [(0, rows)]
    return [(first, min(most, rows - first)) for first in range(0, rows, most)]


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class RowForward:
    """Whole rows in registers, one launch."""

    spec: NormSpec
    target: Target
    config: Forward
    save: bool

    @cached_property
    def leading(self) -> int:
        """Most leading dimensions of x that are read in place."""
        return _leading(self.config)

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
        step = self.config.rows
        tail = (rows, eps, *self._constants)
        return [
            Call(self._kernel, (-(-count // step),), (x, weight, bias, y, rstd, first, *tail))
            for first, count in _launches(rows, MAX_GRID * step)
        ]


@dataclass(frozen=True)
class WideForward:
    """Chunks of rows, two launches: partial sums of squares, then y."""

    spec: NormSpec
    target: Target
    config: Wide
    save: bool

    leading = 2

    @cached_property
    def chunks(self) -> int:
        return _cdiv(self.spec.hidden, self.config.tile)

    def workspace(self, rows: int) -> tuple[int, int]:
        """Shape of the float32 workspace."""
        return rows, self.chunks

    def calls(self, x, weight, bias, y, rstd, workspace, rows: int, eps: float) -> list[Call]:
        spec, tile = self.spec, self.config.tile
        size = (spec.hidden, self.chunks)
        padded = heuristics.tile_width(self.chunks)
        tail = (eps, *size, padded, tile, *_affine(spec), self.save)
        launches = _launches(rows, MAX_GRID // self.chunks)
        stats = [
            Call(
                wide.wide_squares,
                (count * self.chunks,),
                (x, workspace, first, *size, tile, spec.aligned),
            )
            for first, count in launches
        ]
        return stats + [
            Call(
                wide.wide_forward,
                (count * self.chunks,),
                (x, weight, bias, workspace, y, rstd, first, *tail),
            )
            for first, count in launches
        ]


@dataclass(frozen=True)
class _BackwardPlan:
    spec: NormSpec
    target: Target
    config: Backward | Wide
    sum_config: ColumnSum
    needs: Needs

    @cached_property
    def leading(self) -> int:
        """Most leading dimensions of x and dy that are read in place."""
        return _leading(self.config)

    def partials(self, rows: int) -> tuple[int, int] | None:
        """Shape of the float32 scratch of partial sums over rows; None when none is needed."""
        if self._sums == 0:
            return None
        return self._sums * self.blocks(rows), self.spec.hidden

    @cached_property
    def _sums(self) -> int:
        return self.needs.sums

    @cached_property
    def _sum_grid(self) -> tuple[int, int]:
        return _cdiv(self.spec.hidden, self.sum_config.tile), self._sums

    @cached_property
    def _sum_constants(self) -> tuple:
        return self._sums, self.sum_config.rows, self.sum_config.tile

    def _column_sum(self, partials, dw, db, blocks: int) -> Call:
        first, second = (dw, db) if self.needs.dw else (db, ABSENT)
        return Call(
            column_sum, self._sum_grid, (partials, first, second, blocks, *self._sum_constants)
        )


@dataclass(frozen=True)
class RowBackward(_BackwardPlan):
    """Whole rows in registers: a persistent grid, then the column sum."""

    def workspace(self, rows: int) -> None:
        """No float32 workspace beyond the partial sums."""

    def blocks(self, rows: int) -> int:
        """How many blocks share the rows; each leaves one row of partial sums per output."""
        tiles = -(-rows // self.config.rows)
        return tiles if tiles < self._resident else self._resident

    @cached_property
    def _resident(self) -> int:
        return self.target.multiprocessors * (self.config.hints.occupancy or 1)

    @cached_property
    def _kernel(self) -> ct.kernel:
        return _hinted(norm_backward, self.config.hints)

    @cached_property
    def _constants(self) -> tuple:
        spec, config = self.spec, self.config
        affine = (spec.aligned, spec.offset, spec.weight is not None)
        return (spec.hidden, config.rows, config.widths, config.tma, *affine, *self.needs)

    def calls(self, x, dy, weight, rstd, dx, partials, workspace, dw, db, rows) -> list[Call]:
        blocks = self.blocks(rows)
        arguments = (x, dy, weight, rstd, dx, partials, rows, *self._constants)
        main = Call(self._kernel, (blocks,), arguments)
        return [main, self._column_sum(partials, dw, db, blocks)] if self._sums else [main]


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
            tail = (*size, heuristics.tile_width(self.chunks), tile, *affine)
            calls += [
                Call(
                    wide.wide_backward,
                    (count * self.chunks,),
                    (x, dy, weight, rstd, workspace, dx, first, *tail),
                )
                for first, count in _launches(rows, MAX_GRID // self.chunks)
            ]
        if self._sums:
            calls.append(self._column_sum(partials, dw, db, self.blocks(rows)))
        return calls


def _affine(spec: NormSpec) -> tuple:
    return spec.aligned, spec.offset, spec.weight is not None, spec.bias is not None
