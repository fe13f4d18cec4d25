"""A plan turns a spec and a target into kernel calls; it is made once and kept.

`calls` returns what is to be launched, as (kernel, grid, arguments). It is the one place that knows
the order of a kernel's arguments: launching, compiling ahead and the tests' interpreter all use it.
"""

from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import gcd

import cuda.tile as ct

from ..kernels import wide
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
    Needs,
    hinted,
    launches,
)
from .config import Backward, ColumnSum, Forward, Hints, Wide
from .target import Target


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

        Rows that are not evenly spaced the compiler may lay out otherwise, and sum in another order
        (seen at N = 37, 64 and, in chunks, 65536). Inputs with heads all have two.
        """
        return 2 if self.config.rows == 1 and not isinstance(self.config, Wide) else 1

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
    def resident(self) -> int:
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
        return hinted(norm_forward, self.config.hints)

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
            blocks = min(self.tiles(rows), self.resident)
            return [Call(self._kernel, (blocks,), (*arguments, 0, *tail))]
        return [
            Call(self._kernel, (count,), (*arguments, first, *tail))
            for first, count in launches(self.tiles(rows), MAX_GRID)
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
        parts = launches(rows, MAX_GRID // chunks[2])
        return [
            Call(wide.wide_moments, (count * chunks[2],), (*stats, first, *head))
            for first, count in parts
        ] + [
            Call(wide.wide_forward, (count * chunks[2],), (*apply, first, eps, *tail))
            for first, count in parts
        ]


@dataclass(frozen=True)
class _BackwardPlan(_Plan):
    sum_config: ColumnSum
    needs: Needs

    def _sharing(self, tiles: int, resident: int) -> int:
        """How many blocks share the tiles: what is resident, in whole rounds of the heads."""
        groups = self._groups
        return min(tiles, max(groups, resident // groups * groups))

    def partials(self, rows: int) -> tuple[int, int] | None:
        """Shape of the float32 scratch of partial sums over rows; None when none is needed."""
        if self.needs.sums == 0:
            return None
        return self.needs.sums * self._partial_rows(self.blocks(rows)), self._sum_width

    def _partial_rows(self, blocks: int) -> int:
        heads = self.spec.heads
        return blocks * self.config.rows // heads if heads else blocks

    @cached_property
    def _sum_width(self) -> int:
        return self.spec.hidden * (self.spec.heads or 1)

    def _column_sum(self, arrays: BackwardArrays, blocks: int) -> list[Call]:
        """The launch that turns partial sums into dW and dB."""
        if not self.needs.sums:
            return []
        dw, db = arrays.dw, arrays.db
        outputs = (dw, db) if self.needs.dw else (db, ABSENT)
        config, rows = self.sum_config, self._partial_rows(blocks)
        arguments = (arrays.partials, *outputs, rows, self.needs.sums, config.rows, config.tile)
        return [Call(column_sum, (_cdiv(self._sum_width, config.tile), self.needs.sums), arguments)]

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
        return self._sharing(self.tiles(rows), self.resident)

    @cached_property
    def _kernel(self) -> ct.kernel:
        return hinted(norm_backward, self.config.hints)

    @cached_property
    def _constants(self) -> tuple:
        config, aligned = self.config, self.spec.aligned
        tile = (self.spec.hidden, *self._tile, config.widths, config.tma, config.store, aligned)
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
        layer, gated, gate_first, has_weight, _, offset = self._norm
        calls = []
        if self._through_norm or self.needs.sums:
            flags = (layer, gated, gate_first, has_weight, offset)
            dots = (x, dy, gate, weight, mean, rstd, workspace, partials, rows, *chunks, tile)
            asked = (self._through_norm, needs.dw, needs.db)
            kernel = hinted(wide.wide_dots, Hints(occupancy=self.config.occupancy))
            arguments = (*dots, spec.aligned, *flags, *asked)
            calls.append(Call(kernel, (self.blocks(rows) * chunks[2],), arguments))
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
                for first, count in launches(rows, MAX_GRID // chunks[2])
            ]
        return calls + self._column_sum(arrays, self.blocks(rows))


def _gated(spec: NormSpec) -> tuple[bool, bool]:
    """GATED, GATE_FIRST."""
    return spec.gate is not None, spec.gate is not None and spec.gate_first
