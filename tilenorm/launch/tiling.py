"""How a plan cuts its work: rows into tiles, a row into chunks and segments."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from math import gcd
from typing import Any, TypeVar

from ..kernels.column_sum import column_sum
from ..kernels.constants import Norm
from ..kernels.exchange import clear_slots
from ..kernels.tiles import Cut
from ..spec import NormSpec
from . import heuristics
from .arrays import taking
from .calls import MAX_SIDE, Launch, constants
from .config import Config, Hints, cdiv, tile_width
from .kernel import hinted
from .quantized import quant_of
from .target import Target
from .tuned.rules import BESIDE_ELEMENTS, EARLY_ELEMENTS, POLLS

CLEAR_SLOTS = hinted(clear_slots, Hints())
COLUMN_SUM = hinted(column_sum, Hints())
CLEARED = 1024  # slots that one block empties
SIZES = 64  # row counts, or Sizes, whose launches a plan remembers

Result = TypeVar("Result")


def remembered(method: Callable[..., Result]) -> cached_property[Callable[..., Result]]:
    """A method of a plan, which keeps the results of its last SIZES arguments."""
    return cached_property(lambda plan: lru_cache(SIZES)(partial(method, plan)))


@dataclass(frozen=True)
class Tiling:
    """Base class of the plans of both directions."""

    spec: NormSpec
    target: Target
    config: Config

    @cached_property
    def _widths(self) -> tuple[int, ...]:
        return self.config.segments(self.spec.hidden)

    @cached_property
    def chunks(self) -> int:
        """How many blocks share a row."""
        return cdiv(self.spec.hidden, sum(self._widths))

    @cached_property
    def tile_heads(self) -> int:
        """Heads of a token in a tile: the largest divisor of both; 0 without heads."""
        return gcd(self.spec.heads, self.config.rows) if self.spec.heads else 0

    @cached_property
    def _groups(self) -> int:
        """Number of tiles after which the heads repeat."""
        return self.spec.heads // self.tile_heads if self.spec.heads else 1

    def tiles(self, rows: int) -> int:
        """Number of tiles of a number of rows."""
        heads, tile_rows = self.spec.heads, self.config.rows
        if not heads:
            return cdiv(rows, tile_rows)
        return cdiv(rows // heads, tile_rows // self.tile_heads) * self._groups

    @cached_property
    def resident(self) -> int:
        """Number of blocks of a persistent grid that run side by side."""
        return self.target.multiprocessors * (self.config.hints.occupancy or 1)

    @cached_property
    def _exchanges(self) -> bool:
        """Whether blocks share rows and exchange their partial sums of each row."""
        return self.chunks > 1

    @cached_property
    def cut(self) -> Cut:
        spec, rows = self.spec, self.config.rows
        heads = (spec.heads, rows, self.tile_heads)
        return Cut(spec.hidden, *heads, self._widths, self.chunks, spec.aligned)

    @cached_property
    def norm(self) -> Norm:
        spec = self.spec
        return Norm(
            LAYER=spec.norm == "layer",
            GATE_FIRST=spec.gate is not None and spec.gate_first,
            OFFSET=spec.offset,
            EARLY=spec.rounding == "early",
            SIGMOID=spec.activation == "sigmoid",
            DROPOUT_SCALE=spec.dropout_scale,
            QUANT=constants(quant_of(spec, self.config)) if spec.quantized else (),
            INNER=constants(replace(self, spec=spec.inner).norm) if spec.inner else (),
        )

    @cached_property
    def _sharing(self) -> dict[str, Any]:
        """The constants of How that concern blocks that share a row."""
        return {
            "PADDED_CHUNKS": tile_width(self.chunks),
            "POLLS": POLLS if self._exchanges else 0,
        }

    @property
    def _overlap(self) -> bool:
        """Whether a kernel may start before the one before has ended, and wait for that end."""
        return self.target.has_dependent_launch

    def _early(self, elements: int) -> dict[str, int]:
        """EARLY and BESIDE of How, for a kernel with a block for each tile of so many elements.

        The kernel compares them with one side of its grid. In a grid of several rows of blocks that
        side is longer than MAX_SIDE // 2.
        """
        if not self._overlap:
            return {}
        most = {"EARLY": EARLY_ELEMENTS, "BESIDE": BESIDE_ELEMENTS}
        return {name: min(most[name] // elements, MAX_SIDE // 2) for name in most}

    def slots(self, rows: int) -> tuple[int, int] | None:
        """Shape of the int32 slots through which blocks exchange partial sums, or None.

        A chunk has one slot for RMSNorm and two for LayerNorm, and one more for the maximum of a
        row that has a scale.
        """
        if not self._exchanges:
            return None
        how = self.spec.quantized
        peaks = how is not None and how.scaling == "row"
        return rows, self.chunks * ((2 if self.spec.norm == "layer" else 1) + peaks)

    def _column_sum(self, kind: Any, sums: Sequence[str], rows: int, width: int) -> list[Launch]:
        """The launch that adds up the partial sums of each of these names: `rows` rows."""
        if not sums:
            return []
        config = heuristics.column_sum(width)
        take = taking(kind, "partials", *sums)
        after = (rows, config.rows, config.tile, self._overlap)
        grid = cdiv(width, config.tile), len(sums)
        return [Launch(COLUMN_SUM, grid, (), take, after, self._overlap)]

    def _clear(self, take: Callable, rows: int) -> list[Launch]:
        """The launch that empties the slots, if there are slots."""
        if not self._exchanges:
            return []
        width = self.slots(rows)[1]
        padded = tile_width(width)
        tile_rows = max(1, CLEARED // padded)
        grid = (cdiv(rows, tile_rows),)
        after = (tile_rows, padded, self._overlap)
        return [Launch(CLEAR_SLOTS, grid, (), take, after, self._overlap)]
