"""Everything about a launch that can be tuned, one class a schedule.

The tables and the heuristics make these; each says itself which rows it cannot serve, and why.
`widths` are the segments of a row, or of each chunk of it, in columns; None is one segment that
holds the row.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from ..kernels.tiles import VECTOR
from .target import Target

MOST_CHUNKS = 1024  # whose numbers a block collects at once


def cdiv(a: int, b: int) -> int:
    """How many parts of at most b make a."""
    return -(-a // b)


def tile_width(hidden: int) -> int:
    """The smallest power of two that holds a row."""
    return 1 << (hidden - 1).bit_length()


@dataclass(frozen=True)
class Hints:
    """What the compiler is asked for. None leaves the choice to it."""

    occupancy: int | None = None
    num_worker_warps: int | None = None

    @property
    def threads(self) -> int:
        """Of a block's worker warps, which are 4 if none are asked for."""
        return 32 * (self.num_worker_warps or 4)

    def vectors(self, item_bytes: int) -> int:
        """How many elements of so many bytes these threads read at once, a vector each."""
        return 16 // item_bytes * self.threads

    def given(self) -> dict[str, int]:
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Served:
    """The rows that a configuration is to serve: item_bytes is of the widest tensor with rows."""

    hidden: int
    item_bytes: int
    aligned: bool
    target: Target


class Config:
    """What the four configurations share."""

    direction: ClassVar[str]
    tma: ClassVar[bool] = False
    hints: Hints
    widths: tuple[int, ...] | None

    def segments(self, hidden: int) -> tuple[int, ...]:
        return self.widths or (tile_width(hidden),)

    def refusal(self, served: Served) -> str | None:
        """Why this configuration cannot serve these rows, or None."""
        return _first(
            _wrong_rows(self.rows),
            _wrong_hints(self.hints),
            _wrong_widths(self.segments(served.hidden)),
            self._refusal(served),
        )

    def _spans(self, hidden: int) -> str | None:
        """Why the segments do not hold exactly one row, or None."""
        widths = self.segments(hidden)
        if sum(widths) < hidden or sum(widths) - widths[-1] >= hidden:
            return f"widths {widths} do not end with a row of {hidden}"
        return None


@dataclass(frozen=True)
class RowForward(Config):
    """row_forward: a block a tile of `rows` rows.

    packed: 16-bit inputs stay in 16 bits over the sums, and are converted again. fetch: weights are
    read with the row, not after its sums. Small batches use a variant without packing, fetching and
    the occupancy hint; the results have the same bits.
    """

    rows: int = 1
    hints: Hints = Hints()
    widths: tuple[int, ...] | None = None
    packed: bool = False
    fetch: bool = False

    direction: ClassVar[str] = "forward"

    def _refusal(self, served: Served) -> str | None:
        wrong_fetch = None
        if self.fetch:
            widths, item_bytes = self.segments(served.hidden), served.item_bytes
            # So that a thread adds up at most two terms of what is left of a folded segment.
            most = 32 * self.hints.threads
            if len(set(widths)) > 1 or not item_bytes <= widths[0] * item_bytes <= most:
                wrong_fetch = f"with fetch, segments have one width, here at most {most} bytes"
        return _first(_wrong_packing(self.packed, served), wrong_fetch, self._spans(served.hidden))


@dataclass(frozen=True)
class StreamForward(Config):
    """stream_forward: a persistent grid of `hints.occupancy` blocks a multiprocessor.

    tma: rows are read by tile loads instead of gathers, one row at a time. store: with tma, rows
    are written by tile stores.
    """

    rows: int = 1
    hints: Hints = Hints()
    widths: tuple[int, ...] | None = None
    tma: bool = False
    store: bool = False

    direction: ClassVar[str] = "forward"

    def _refusal(self, served: Served) -> str | None:
        wrong_tma = _wrong_tma(self.tma, self.store, self.rows, served)
        return _first(wrong_tma, self._spans(served.hidden))


@dataclass(frozen=True)
class SharedForward(Config):
    """shared_forward: blocks that share a row, each with a chunk of it that `widths` make up.

    packed: as in RowForward. together: after the sums, the weights of so many segments are read at
    once.
    """

    hints: Hints
    widths: tuple[int, ...]
    packed: bool = False
    together: int = 1

    direction: ClassVar[str] = "forward"
    rows: ClassVar[int] = 1

    def _refusal(self, served: Served) -> str | None:
        wrong = None
        one_width = len(set(self.widths)) == 1
        if self.together != 1 and not (one_width and 1 < self.together <= len(self.widths)):
            wrong = "weights are read together for at most all segments, which have one width"
        chunks = _wrong_chunks(self.widths, served.hidden)
        return _first(_wrong_packing(self.packed, served), wrong, chunks)


@dataclass(frozen=True)
class Backward(Config):
    """norm_backward: a persistent grid of `hints.occupancy` blocks a multiprocessor.

    rows: of a tile. widths: where these do not span a row, they are those of a chunk, and blocks
    share the row. tma, store: as in StreamForward. packed: as in RowForward. reread: for rows that
    fill the registers, weights are read again for each row instead of kept, and dx is written last.
    """

    widths: tuple[int, ...]
    rows: int = 1
    tma: bool = False
    hints: Hints = Hints()
    store: bool = False
    packed: bool = False
    reread: bool = False

    direction: ClassVar[str] = "backward"

    def _refusal(self, served: Served) -> str | None:
        wrong = None
        if self.reread and self.rows != 1:
            wrong = "weights are read again by tiles of one row"
        if sum(self.widths) >= served.hidden:
            cut = self._spans(served.hidden)
        elif self.rows != 1 or self.tma:
            cut = "blocks that share a row gather one at a time, without tile loads"
        else:
            cut = _wrong_chunks(self.widths, served.hidden)
        wrong_tma = _wrong_tma(self.tma, self.store, self.rows, served)
        return _first(_wrong_packing(self.packed, served), wrong_tma, wrong, cut)


FORMS = (RowForward, StreamForward, SharedForward, Backward)


@dataclass(frozen=True)
class ColumnSum:
    """Tiles of rows × tile partial sums, one block a tile of columns."""

    rows: int = 32
    tile: int = 16


def _first(*reasons: str | None) -> str | None:
    return next(filter(None, reasons), None)


def _wrong_rows(rows: int) -> str | None:
    return None if _power_of_two(rows) else f"rows {rows} is no power of two"


def _wrong_hints(hints: Hints) -> str | None:
    if not 1 <= (hints.occupancy or 1) <= 32 or not _power_of_two(hints.num_worker_warps or 1):
        return f"no such hints: {hints}"
    return None


def _wrong_widths(widths: tuple[int, ...]) -> str | None:
    # Of descending powers of two each starts at a multiple of its width, as tile loads need it.
    descend = all(a >= b for a, b in pairwise(widths))
    if not descend or not all(map(_power_of_two, widths)):
        return f"widths {widths} are no descending powers of two"
    return None


def _wrong_packing(packed: bool, served: Served) -> str | None:
    return "packed takes rows of 16 bits an element" if packed and served.item_bytes != 2 else None


def _wrong_tma(tma: bool, store: bool, rows: int, served: Served) -> str | None:
    if tma and not (rows == 1 and served.aligned and served.target.has_tma):
        return "tile loads take one row at a time, of whole vectors, and a GPU that has them"
    return "tile stores come with tile loads" if store and not tma else None


def _wrong_chunks(widths: tuple[int, ...], hidden: int) -> str | None:
    width = sum(widths)
    if width >= hidden:
        return f"widths {widths} hold a whole row of {hidden}, which no blocks share"
    if widths[-1] % VECTOR:
        return f"widths {widths} of a chunk are no whole vectors"
    if hidden > MOST_CHUNKS * width:
        return f"a row of {hidden} takes more than {MOST_CHUNKS} chunks of {width}"
    return None


def _power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0
