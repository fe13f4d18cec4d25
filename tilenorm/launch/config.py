"""Everything about a launch that can be tuned: one class for each schedule.

The tables and the heuristics create configurations. The method `refusal` of a configuration says
which rows the configuration cannot serve, and why. A row, or a chunk of a row, is cut into
segments; `widths` holds the number of columns of each. `widths=None` is one segment that holds the
whole row.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from .target import Target

VECTOR = 8  # elements of 16 bytes, of the narrowest dtype, as in kernels/tiles.py
MOST_CHUNKS = 1024  # a block loads the partial results of all chunks of a row at once


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. ONNX's integer division, which may compute it, rounds towards zero."""
    return (a + b - 1) // b


def tile_width(hidden: int) -> int:
    """The smallest power of two that holds a row."""
    return 1 << (hidden - 1).bit_length()


@dataclass(frozen=True)
class Hints:
    """Hints for the compiler. With None the compiler chooses."""

    occupancy: int | None = None
    num_worker_warps: int | None = None

    @property
    def threads(self) -> int:
        """Worker threads of a block. A block has 4 worker warps if num_worker_warps is None."""
        return 32 * (self.num_worker_warps or 4)

    def vectors(self, item_bytes: int) -> int:
        """Elements that a block reads at once if each thread reads one 16-byte vector."""
        return 16 // item_bytes * self.threads

    def given(self) -> dict[str, int]:
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Served:
    """The rows that a configuration has to serve.

    item_bytes: bytes of an element of the widest tensor that has rows.
    """

    hidden: int
    item_bytes: int
    aligned: bool
    target: Target


class Config:
    """Base class of the four configurations."""

    direction: ClassVar[str]
    rows: int = 1
    tma: bool = False
    hints: Hints
    widths: tuple[int, ...] | None

    def segments(self, hidden: int) -> tuple[int, ...]:
        return self.widths or (tile_width(hidden),)

    def refusal(self, served: Served) -> str | None:
        """The reason why this configuration cannot serve these rows, or None."""
        return _first(
            _wrong_rows(self.rows),
            _wrong_hints(self.hints),
            _wrong_widths(self.segments(served.hidden)),
            self._refusal(served),
        )

    def _refusal(self, served: Served) -> str | None:
        """The reason that only this kind of configuration has."""
        raise NotImplementedError

    def _spans(self, hidden: int) -> str | None:
        """The reason why the segments do not hold exactly one row, or None."""
        widths = self.segments(hidden)
        if sum(widths) < hidden or sum(widths) - widths[-1] >= hidden:
            return f"widths {widths} do not fit a row of {hidden}"
        return None


@dataclass(frozen=True)
class RowForward(Config):
    """row_forward: each block handles one tile of `rows` rows.

    packed: 16-bit inputs stay in 16 bits while the row is summed, and are converted to float32
    twice. fetch: weights are read with the row, not after its sums. With fetch, small batches use a
    variant without packing, fetch and the occupancy hint; the results have the same bits.
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
            # At this width folding a segment leaves at most two terms for each thread.
            most = 32 * self.hints.threads
            if len(set(widths)) > 1 or not item_bytes <= widths[0] * item_bytes <= most:
                wrong_fetch = f"fetch needs segments of one width, here at most {most} bytes"
        return _first(_wrong_packing(self.packed, served), wrong_fetch, self._spans(served.hidden))


@dataclass(frozen=True)
class StreamForward(Config):
    """stream_forward: a persistent grid with `hints.occupancy` blocks on each multiprocessor.

    tma: rows are read one at a time, by tile loads instead of gathers. store: rows are written by
    tile stores; needs tma.
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
    """shared_forward: several blocks share a row. `widths` are the segments of one block's chunk.

    packed: as in RowForward. together: the number of segments whose weights are read at once,
    after the sums.
    """

    hints: Hints
    widths: tuple[int, ...]
    packed: bool = False
    together: int = 1

    direction: ClassVar[str] = "forward"

    def _refusal(self, served: Served) -> str | None:
        wrong = None
        one_width = len(set(self.widths)) == 1
        if self.together != 1 and not (one_width and 1 < self.together <= len(self.widths)):
            wrong = "together is 1, or at most the number of segments, which then have one width"
        chunks = _wrong_chunks(self.widths, served.hidden)
        return _first(_wrong_packing(self.packed, served), wrong, chunks)


@dataclass(frozen=True)
class Backward(Config):
    """norm_backward: a persistent grid with `hints.occupancy` blocks on each multiprocessor.

    rows: the rows of a tile. widths: segments that are narrower than a row in total make up one
    chunk, and several blocks share the row. tma, store: as in StreamForward. packed: as in
    RowForward. reread: each row reads the weights again, and dx is written last; this saves
    registers.
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
            wrong = "reread needs rows=1"
        if sum(self.widths) >= served.hidden:
            cut = self._spans(served.hidden)
        elif self.rows != 1 or self.tma:
            cut = "blocks that share rows need rows=1 and no tile loads"
        else:
            cut = _wrong_chunks(self.widths, served.hidden)
        wrong_tma = _wrong_tma(self.tma, self.store, self.rows, served)
        return _first(_wrong_packing(self.packed, served), wrong_tma, wrong, cut)


FORMS = (RowForward, StreamForward, SharedForward, Backward)


@dataclass(frozen=True)
class ColumnSum:
    """column_sum: each block adds up `tile` columns, `rows` rows of partial sums at a time."""

    rows: int = 32
    tile: int = 16


def _first(*reasons: str | None) -> str | None:
    return next(filter(None, reasons), None)


def _wrong_rows(rows: int) -> str | None:
    return None if _power_of_two(rows) else f"rows {rows} is not a power of two"


def _wrong_hints(hints: Hints) -> str | None:
    if not 1 <= (hints.occupancy or 1) <= 32 or not _power_of_two(hints.num_worker_warps or 1):
        return f"hints out of range: {hints}"
    return None


def _wrong_widths(widths: tuple[int, ...]) -> str | None:
    # Tile loads need segments that start at a multiple of their width. Descending powers of two do.
    descend = all(a >= b for a, b in pairwise(widths))
    if not descend or not all(map(_power_of_two, widths)):
        return f"widths {widths} are not descending powers of two"
    return None


def _wrong_packing(packed: bool, served: Served) -> str | None:
    return "packed needs rows with 16-bit elements" if packed and served.item_bytes != 2 else None


def _wrong_tma(tma: bool, store: bool, rows: int, served: Served) -> str | None:
    if tma and not (rows == 1 and served.aligned and served.target.has_tma):
        return "tile loads need rows=1, rows of whole vectors, and a GPU with TMA"
    return "tile stores need tile loads" if store and not tma else None


def _wrong_chunks(widths: tuple[int, ...], hidden: int) -> str | None:
    width = sum(widths)
    if width >= hidden:
        return f"widths {widths} hold a whole row of {hidden}, so that no blocks share it"
    if widths[-1] % VECTOR:
        return f"widths {widths} of a chunk do not end at a whole vector"
    if hidden > MOST_CHUNKS * width:
        return f"a row of {hidden} needs more than {MOST_CHUNKS} chunks of {width}"
    return None


def _power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0
