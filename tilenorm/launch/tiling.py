"""How a plan cuts rows: into tiles, segments, and chunks that blocks share."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import gcd

from ..kernels.exchange import clear_slots
from ..spec import NormSpec
from .calls import Launch, hinted
from .config import Backward, Forward, Hints, cdiv, tile_width
from .target import Target

POLLS = 1 << 12  # about 4 ms: what another kernel on the same GPU may keep blocks of a row apart
CLEAR_SLOTS = hinted(clear_slots, Hints())
CLEARED = 1024  # slots that a block empties


@dataclass(frozen=True)
class Tiling:
    """What plans of both directions share, and which inputs they read in place."""

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
