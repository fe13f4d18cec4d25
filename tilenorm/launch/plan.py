"""A plan turns a spec and a target into kernel calls; it is made once and kept.

`calls` returns what is to be launched, as (kernel, grid, arguments). It is the one place that knows
the order of a kernel's arguments: launching, compiling ahead and the tests' interpreter all use it.
An array that a flag excludes is passed as ABSENT, and its kernel does not touch it.
"""

from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import gcd
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
    """Which gradients are asked for, and whether one of the sum with the residual comes in."""

    dx: bool
    dw: bool = False
    db: bool = False
    dresidual: bool = False
    dgate: bool = False
    dsum: bool = False

    @property
    def sums(self) -> int:
        """How many sums over rows."""
        return self.dw + self.db


def every_gradient(spec: NormSpec) -> Needs:
    """What a training step asks for; one gradient serves input and residual of one dtype."""
    return Needs(
        dx=True,
        dw=spec.weight is not None,
        db=spec.bias is not None,
        dresidual=spec.residual not in (None, spec.dtype),
        dgate=spec.gate is not None,
        dsum=spec.residual is not None,
    )


class ForwardArrays(NamedTuple):
    """What a forward pass reads and writes, of tensors or their descriptions."""

    x: Any
    residual: Any
    gate: Any
    weight: Any
    bias: Any
    y: Any
    sum: Any
    mean: Any
    rstd: Any
    workspace: Any = ABSENT


class BackwardArrays(NamedTuple):
    """What a backward pass reads and writes. x is the sum where a residual was added."""

    x: Any
    dy: Any
    gate: Any
    dsum: Any
    weight: Any
    bias: Any
    mean: Any
    rstd: Any
    dx: Any
    dresidual: Any
    dgate: Any
    partials: Any
    workspace: Any
    dw: Any
    db: Any


def launch(stream: int, calls: list[Call]) -> None:
    """Queue the calls on a CUDA stream of the current device."""
    for kernel, grid, arguments in calls:
        ct.launch(stream, grid, kernel, arguments)


@cache
def plan_forward(spec: NormSpec, target: Target, save: bool) -> "RowForward | WideForward":
    """The plan for y and the sum, and for mean and rstd if `save`."""
    config = heuristics.forward(spec, target)
    kind = WideForward if isinstance(config, Wide) else RowForward
    return kind(spec, target, config, save)


@cache
def plan_backward(spec: NormSpec, target: Target, needs: Needs) -> "RowBackward | WideBackward":
    """The plan for those gradients that are needed."""
    spec = replace(spec, rounding="late")  # of the forward pass only
    config = heuristics.backward(spec, target, needs)
    kind = WideBackward if isinstance(config, Wide) else RowBackward
    return kind(spec, target, config, heuristics.column_sum(spec, target), needs)


@cache
def _hinted(kernel: ct.kernel, hints: Hints) -> ct.kernel:
    """The kernel with hints: kept, because a hinted kernel has a compile cache of its own."""
    given = hints.given()
    return kernel.replace_hints(**given) if given else kernel


def _launches(count: int, most: int) -> list[tuple[int, int]]:
    """(first, count) of each launch, where one reaches at most `most`."""
    if count <= most:
        return [(0, count)]
    return [(first, min(most, count - first)) for first in range(0, count, most)]


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class _Plan:
    """What plans of rows share: their tiles, and which inputs they read in place."""

    spec: NormSpec
    target: Target
    config: Forward | Backward | Wide

    @cached_property
    def leading(self) -> int:
        """Most leading dimensions of an input that is read in place: two where a tile is one row.

        The rows of a tile are evenly spaced, else the compiler lays the tile out otherwise and sums
        it in another order (seen at N = 37 and 64). Inputs with heads all have two.
        """
        return 2 if self.config.rows == 1 else 1

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
            return -(-rows // tile_rows)
        return _cdiv(rows // heads, tile_rows // self.tile_heads) * self._groups

    @cached_property
    def _resident(self) -> int:
        """Blocks of a persistent grid that run side by side."""
        return self.target.multiprocessors * (self.config.hints.occupancy or 1)

    @cached_property
    def _tile(self) -> tuple[int, int, int]:
        """HEADS, TILE_ROWS, TILE_HEADS."""
        return self.spec.heads, self.config.rows, self.tile_heads

    @cached_property
    def _chunks(self) -> tuple[int, int, int]:
        """N, HEADS, CHUNKS."""
        spec = self.spec
        return spec.hidden, spec.heads, _cdiv(spec.hidden, self.config.tile)

    def _moments(self, rows: int) -> tuple[int, int]:
        """Shape of what chunks leave: one number for each, and one more for LayerNorm."""
        return rows, self._chunks[2] * (2 if self.spec.norm == "layer" else 1)


@dataclass(frozen=True)
class _ForwardPlan(_Plan):
    save: bool

    @cached_property
    def _flags(self) -> tuple:
        """WEIGHT, BIAS, OFFSET, EARLY, SAVE."""
        spec = self.spec
        affine = (spec.weight is not None, spec.bias is not None, spec.offset)
        return *affine, spec.rounding == "early", self.save


@dataclass(frozen=True)
class RowForward(_ForwardPlan):
    """Whole rows in registers, one launch."""

    def workspace(self, rows: int) -> None:
        """No float32 workspace."""

    @cached_property
    def _kernel(self) -> ct.kernel:
        return _hinted(norm_forward, self.config.hints)

    @cached_property
    def _constants(self) -> tuple:
        spec = self.spec
        widths = self.config.widths or (heuristics.tile_width(spec.hidden),)
        tile = (
            spec.hidden,
            *self._tile,
            widths,
            self.config.loop,
            self.config.tma,
            self.config.store,
        )
        norm = (spec.norm == "layer", spec.residual is not None, *_gated(spec))
        return (*tile, spec.aligned, *norm, *self._flags)

    def calls(self, arrays: ForwardArrays, rows: int, eps: float) -> list[Call]:
        arguments, tail = arrays[:-1], (rows, eps, *self._constants)
        if self.config.loop:
            blocks = min(self.tiles(rows), self._resident)
            return [Call(self._kernel, (blocks,), (*arguments, 0, *tail))]
        return [
            Call(self._kernel, (count,), (*arguments, first, *tail))
            for first, count in _launches(self.tiles(rows), MAX_GRID)
        ]


@dataclass(frozen=True)
class WideForward(_ForwardPlan):
    """Chunks of rows, two launches: partial moments, and the sum with the residual, then y."""

    def workspace(self, rows: int) -> tuple[int, int]:
        """Shape of the float32 workspace."""
        return self._moments(rows)

    def calls(self, arrays: ForwardArrays, rows: int, eps: float) -> list[Call]:
        spec, tile, chunks = self.spec, self.config.tile, self._chunks
        x, residual, gate, weight, bias, y, total, mean, rstd, workspace = arrays
        layer, add, (gated, gate_first) = spec.norm == "layer", spec.residual, _gated(spec)
        head = (*chunks, tile, spec.aligned, layer, add is not None, gate_first)
        padded = heuristics.tile_width(chunks[2])
        tail = (*chunks, padded, tile, spec.aligned, layer, gated, gate_first, *self._flags)
        stats = (x, residual, gate, total, workspace)
        apply = (total if add else x, gate, weight, bias, workspace, y, mean, rstd)
        launches = _launches(rows, MAX_GRID // chunks[2])
        return [
            Call(wide.wide_moments, (count * chunks[2],), (*stats, first, *head))
            for first, count in launches
        ] + [
            Call(wide.wide_forward, (count * chunks[2],), (*apply, first, eps, *tail))
            for first, count in launches
        ]


@dataclass(frozen=True)
class _BackwardPlan(_Plan):
    sum_config: ColumnSum
    needs: Needs

    def blocks(self, rows: int) -> int:
        """How many blocks, or groups of blocks, share the rows, each with its partial sums."""
        raise NotImplementedError

    def _sharing(self, tiles: int, resident: int) -> int:
        """How many share the tiles: what is resident, in whole rounds of the heads."""
        groups = self._groups
        return min(tiles, max(groups, resident // groups * groups))

    def partials(self, rows: int) -> tuple[int, int] | None:
        """Shape of the float32 scratch of partial sums over rows; None when none is needed."""
        if self._sums == 0:
            return None
        return self._sums * self._partial_rows(self.blocks(rows)), self._sum_width

    def _partial_rows(self, blocks: int) -> int:
        heads = self.spec.heads
        return blocks * self.config.rows // heads if heads else blocks

    @cached_property
    def _sum_width(self) -> int:
        return self.spec.hidden * (self.spec.heads or 1)

    @cached_property
    def _sums(self) -> int:
        return self.needs.sums

    @cached_property
    def _sum_grid(self) -> tuple[int, int]:
        return _cdiv(self._sum_width, self.sum_config.tile), self._sums

    @cached_property
    def _sum_constants(self) -> tuple:
        return self._sums, self.sum_config.rows, self.sum_config.tile

    def _column_sum(self, arrays: BackwardArrays, blocks: int) -> list[Call]:
        """The launch that turns partial sums into dW and dB."""
        if not self._sums:
            return []
        dw, db = arrays.dw, arrays.db
        outputs = (dw, db) if self.needs.dw else (db, ABSENT)
        arguments = (arrays.partials, *outputs, self._partial_rows(blocks), *self._sum_constants)
        return [Call(column_sum, self._sum_grid, arguments)]

    @cached_property
    def _norm(self) -> tuple:
        """LAYER, GATED, GATE_FIRST, WEIGHT, BIAS, OFFSET."""
        spec = self.spec
        affine = (spec.weight is not None, spec.bias is not None, spec.offset)
        return (spec.norm == "layer", *_gated(spec), *affine)


@dataclass(frozen=True)
class RowBackward(_BackwardPlan):
    """Whole rows in registers: a persistent grid, then the column sum."""

    def workspace(self, rows: int) -> None:
        """No float32 workspace beyond the partial sums."""

    def blocks(self, rows: int) -> int:
        return self._sharing(self.tiles(rows), self._resident)

    @cached_property
    def _kernel(self) -> ct.kernel:
        return _hinted(norm_backward, self.config.hints)

    @cached_property
    def _constants(self) -> tuple:
        spec, config = self.spec, self.config
        tile = (spec.hidden, *self._tile, config.widths, config.tma, config.store, spec.aligned)
        return *tile, *self._norm, *self.needs

    def calls(self, arrays: BackwardArrays, rows: int) -> list[Call]:
        blocks = self.blocks(rows)
        main = Call(self._kernel, (blocks,), (*arrays[:12], rows, *self._constants))
        return [main, *self._column_sum(arrays, blocks)]


@dataclass(frozen=True)
class WideBackward(_BackwardPlan):
    """Chunks of rows: partial dots and partial sums, then dx, then the column sum."""

    @cached_property
    def _through_norm(self) -> bool:
        needs = self.needs
        return needs.dx or needs.dresidual or (needs.dgate and self.spec.gate_first)

    def workspace(self, rows: int) -> tuple[int, int] | None:
        """Shape of the float32 workspace."""
        return self._moments(rows) if self._through_norm else None

    def blocks(self, rows: int) -> int:
        resident = self.target.multiprocessors * self.config.occupancy
        return self._sharing(rows, _cdiv(resident, self._chunks[2]))

    def calls(self, arrays: BackwardArrays, rows: int) -> list[Call]:
        spec, needs, chunks, tile = self.spec, self.needs, self._chunks, self.config.tile
        x, dy, gate, dsum, weight, bias, mean, rstd, dx, dresidual, dgate, *rest = arrays
        partials, workspace, *_ = rest
        blocks = self.blocks(rows)
        layer, gated, gate_first, has_weight, _, offset = self._norm
        calls = []
        if self._through_norm or self._sums:
            flags = (layer, gated, gate_first, has_weight, offset)
            dots = (x, dy, gate, weight, mean, rstd, workspace, partials, rows, *chunks, tile)
            asked = (self._through_norm, needs.dw, needs.db)
            kernel = _hinted(wide.wide_dots, Hints(occupancy=self.config.occupancy))
            arguments = (*dots, spec.aligned, *flags, *asked)
            calls.append(Call(kernel, (blocks * chunks[2],), arguments))
        if self._through_norm or needs.dgate:
            padded = heuristics.tile_width(chunks[2])
            asked = (needs.dx, needs.dresidual, needs.dgate, needs.dsum)
            tail = (*chunks, padded, tile, spec.aligned, *self._norm, *asked)
            inputs = (x, dy, gate, dsum, weight, bias, mean, rstd, workspace)
            calls += [
                Call(
                    wide.wide_backward,
                    (count * chunks[2],),
                    (*inputs, dx, dresidual, dgate, first, *tail),
                )
                for first, count in _launches(rows, MAX_GRID // chunks[2])
            ]
        return calls + self._column_sum(arrays, blocks)


def _gated(spec: NormSpec) -> tuple[bool, bool]:
    """GATED, GATE_FIRST."""
    return spec.gate is not None, spec.gate is not None and spec.gate_first
