"""Where the rows and columns of a tile lie in memory, and how they are read and written.

A kernel works on tiles of rows. A place says where the rows of a tile are: it is (row,), or, where
every head has its own weight, (row, token, head). Each of these is a number or a (ROWS, 1) tile of
numbers. Inputs are (rows, N) or (tokens, heads, N), with any strides. Outputs are matrices of
consecutive rows.

A row is cut into segments: tiles whose widths are powers of two in descending order. N = 12288 is
cut into 8192 + 4096, so that no lane is idle. A row that is too wide for one block is first cut
into chunks, one block a chunk. All chunks have the same segments.

The compiler adds up a tile in an order that follows the width of its loads. A row has the same bits
in every layout only if that width depends on N alone. ALIGNED says that N fills 16-byte vectors.
Columns are then masked by the constant N, and the host guarantees that every row starts on 16
bytes. Without ALIGNED, columns are masked by the array's extent. The compiler knows nothing of the
extent, so that it reads every layout element by element.
"""

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from .arrays import given

VECTOR = 8  # elements of 16 bytes, of the narrowest dtype


@dataclass(frozen=True)
class Cut:
    """How rows of N elements are cut into tiles of ROWS rows, chunks and segments."""

    N: int
    HEADS: int  # how many heads take turns over the rows, each with a weight of its own; or 0
    ROWS: int
    TILE_HEADS: int  # the heads in a tile; it divides HEADS and ROWS
    WIDTHS: tuple  # the widths of the segments of a chunk
    CHUNKS: int  # the chunks of a row; 1 where one block has a whole row
    ALIGNED: bool  # a row is whole vectors of 16 bytes

    def chunk_width(self):
        return ct.static_eval(sum(self.WIDTHS))

    def segments(self):
        """(index, first column in the chunk, width, end) of each segment.

        No column of the segment reaches the end.
        """
        spans = ()
        start = 0
        for width in self.WIDTHS:
            end = start + width if self.CHUNKS == 1 else sum(self.WIDTHS) * self.CHUNKS
            spans += ((len(spans), start, width, end),)
            start += width
        return spans

    def tiles(self, rows):
        """How many tiles `rows` rows make."""
        if self.HEADS == 0:
            return ct.cdiv(rows, self.ROWS)
        groups = self.HEADS // self.TILE_HEADS
        return ct.cdiv(rows // self.HEADS, self.ROWS // self.TILE_HEADS) * groups

    def place(self, i):
        """The rows of tile i: consecutive ones, or TILE_HEADS heads of ROWS / TILE_HEADS tokens.

        The heads of a tile repeat every HEADS / TILE_HEADS tiles.
        """
        step = ct.arange(self.ROWS, dtype=ct.int32)[:, None]
        if self.HEADS == 0:
            return (i * self.ROWS + step,)
        groups = self.HEADS // self.TILE_HEADS
        token = i // groups * (self.ROWS // self.TILE_HEADS) + step // self.TILE_HEADS
        head = i % groups * self.TILE_HEADS + step % self.TILE_HEADS
        return token * self.HEADS + head, token, head

    def row_place(self, row):
        """One row, by its number."""
        if self.HEADS == 0:
            return (row,)
        return row, row // self.HEADS, row % self.HEADS

    def existing(self, place, rows):
        """Which rows of a tile exist; None where all do: a single row, or heads of one token."""
        if self.ROWS == 1 or self.TILE_HEADS == self.ROWS:
            return None
        return place[0] < rows

    def inside(self, X, cols, end):
        """Which columns of a segment exist; None where all do."""
        if end <= self.N:
            return None
        if self.ALIGNED:
            return cols < self.N
        return cols < X.shape[X.ndim - 1]

    def tile(self, X, i, chunk, rows):
        """Tile i of `rows` rows, or a chunk of it; X: an array whose rows are N long."""
        place = self.place(i)
        return Tile(place, self.existing(place, rows), chunk, self.parts(X, chunk))

    def home(self, X, b, chunk):
        """A tile with the heads that all tiles of block b have; without heads, row b."""
        place = self.place(b)
        if self.HEADS == 0:
            place = (b + ct.arange(1, dtype=ct.int32)[:, None],)
        return Tile(place, None, chunk, self.parts(X, chunk))

    def parts(self, X, chunk):
        """The segments of a chunk, and which of their columns exist."""
        segments = ()
        for _, start, width, end in ct.static_iter(self.segments()):
            cols = columns(chunk * self.chunk_width() + start, width)
            mask = self.inside(X, cols, end)
            segments += (Segment(chunk, self.chunk_width(), start, width, mask),)
        return segments

    def count(self, chunk):
        """How many columns of a chunk exist."""
        return ct.minimum(self.N - chunk * self.chunk_width(), self.chunk_width())

    def rest(self, chunk):
        """What float32 loses of 1 / count(chunk)."""
        if self.CHUNKS == 1:
            return ct.static_eval(rest_of(self.N))
        of_last_chunk = ct.static_eval(rest_of(self.N - (self.CHUNKS - 1) * sum(self.WIDTHS)))
        return ct.where(
            chunk == self.CHUNKS - 1, of_last_chunk, ct.static_eval(rest_of(sum(self.WIDTHS)))
        )


def rest_of(count: int) -> float:
    """What float32 loses of 1 / count; 0 if count is a power of two.

    scaled − (scaled − inverse) is 1 / count rounded to 24 digits, by Veltkamp's splitting.
    """
    inverse = 1.0 / count
    scaled = inverse * (2.0**29 + 1.0)
    return inverse - (scaled - (scaled - inverse))


@dataclass(frozen=True)
class Segment:
    """A segment of a chunk."""

    chunk: Any
    CHUNK_WIDTH: int
    START: int  # its first column in the chunk
    WIDTH: int
    mask: Any  # which of its columns exist; None where all do

    def cols(self):
        """The columns. They are computed where they are used, so that they take no registers."""
        return columns(self.chunk * self.CHUNK_WIDTH + self.START, self.WIDTH)


@dataclass(frozen=True)
class At:
    """Where a segment of a tile is written."""

    place: Any  # its rows
    cols: Any
    mask: Any  # which of its rows and columns exist; None where all do
    NUMBER: int  # how many tiles of its width stand before it in the row


@dataclass(frozen=True)
class Tile:
    """Where a tile lies."""

    place: Any  # its rows
    in_rows: Any  # which of its rows exist; None where all do
    chunk: Any  # its chunk of the row
    segments: tuple

    def at(self, j):
        """Where segment j is written."""
        segment = self.segments[j]
        cols, mask = segment.cols(), both(self.in_rows, segment.mask)
        return At(self.place, cols, mask, segment.START // segment.WIDTH)

    def masks(self):
        """Which columns of each segment exist."""
        in_segments = ()
        for segment in ct.static_iter(self.segments):
            in_segments += (segment.mask,)
        return in_segments


def columns(start, WIDTH):
    return start + ct.arange(WIDTH, dtype=ct.int32)[None, :]


def both(mask, other):
    if mask is None:
        return other
    if other is None:
        return mask
    return mask & other


def leading(X, place):
    """Indices over the leading dimensions of X, which has two where there are heads."""
    return (place[0],) if X.ndim == 2 else place[1:]


def gather_tiles(inputs, cut, tile):
    """The segments of each input's rows; () of an absent input.

    Elements past the last row and column are 0.
    """
    left = tile.chunk * cut.chunk_width()
    tiles = ()
    for X in ct.static_iter(inputs):
        tiles += (gather_segments(X, cut, tile, left) if given(X) else (),)
    return tiles


def gather_segments(X, cut, tile, left):
    tiles = ()
    for _, start, width, end in ct.static_iter(cut.segments()):
        cols = columns(left + start, width)
        mask = both(tile.in_rows, cut.inside(X, cols, end))
        index = leading(X, tile.place) + (cols,)
        tiles += (ct.gather(X, index, mask=mask, check_bounds=False),)
    return tiles


def load_tiles(inputs, cut, row):
    """The segments of one row of each input, by tile loads; () of an absent input."""
    place = cut.row_place(row)
    tiles = ()
    for X in ct.static_iter(inputs):
        tiles += (load_segments(X, cut, leading(X, place)) if given(X) else (),)
    return tiles


def load_segments(X, cut, place):
    tiles = ()
    for _, start, width, _ in ct.static_iter(cut.segments()):
        index = place + (start // width,)
        shape = (1, width) if X.ndim == 2 else (1, 1, width)
        tile = ct.load(X, index, shape, padding_mode=ct.PaddingMode.ZERO)
        tiles += (tile.reshape((1, width)),)
    return tiles


def gather_numbers(arrays, tile):
    """One number for each row, of each array; () of an absent array."""
    rows = ()
    for X in ct.static_iter(arrays):
        numbers = ()
        if given(X):
            numbers = ct.gather(X, (tile.place[0],), mask=tile.in_rows, check_bounds=False)
        rows += (numbers,)
    return rows


def once(tile):
    """A mask of the rows whose numbers this block writes. Of a row in chunks, one block does."""
    return tile.in_rows if ct.static_eval(isinstance(tile.chunk, int)) else tile.chunk == 0


def write_number(X, tile, values, mask):
    """Write a number for each row of a tile, where the mask is true."""
    ct.scatter(X, (tile.place[0],), values, mask=mask, check_bounds=False)


def gather_parameter(W, tile, cols, mask):
    """Columns of a weight or bias, (N,) or (HEADS, N), in its own dtype."""
    if W.ndim == 1:
        return ct.gather(W, (cols,), mask=mask, check_bounds=False)
    return ct.gather(W, (tile.place[2], cols), mask=mask, check_bounds=False)


def write(X, at, values, STORE):
    """Write a segment of a tile, by a tile store of one row or by elements."""
    if STORE:
        ct.store(X, (at.place[0].item(), at.NUMBER), values.astype(X.dtype), allow_tma=False)
    else:
        index = (at.place[0], at.cols)
        ct.scatter(X, index, values.astype(X.dtype), mask=at.mask, check_bounds=False)


def joined(tiles):
    """The tiles side by side in one tile. They have one shape; their number is a power of two."""
    for _ in ct.static_iter(range(len(tiles).bit_length() - 1)):
        pairs = ()
        for i in ct.static_iter(range(len(tiles) // 2)):
            pairs += (ct.cat((tiles[2 * i], tiles[2 * i + 1]), 1),)
        tiles = pairs
    return tiles[0]
