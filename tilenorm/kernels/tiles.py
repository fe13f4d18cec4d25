"""How kernels that hold whole rows fetch them: a row as segments, by gathers or by tile loads.

A row is cut into segments, tiles whose widths are powers of two in descending order, so that
N = 12288 is 8192 + 4096 and no lane is idle.
"""

import cuda.tile as ct

from .rows import both, columns, inside, leading, read, write


def segments(WIDTHS, CHUNKS):
    """(index, first column, width, end) of each segment of a row, or of each chunk of it.

    First columns count from that of the chunk. No column of the segment reaches the end.
    """
    found = ()
    start = 0
    for width in WIDTHS:
        end = start + width if CHUNKS == 1 else sum(WIDTHS) * CHUNKS
        found += ((len(found), start, width, end),)
        start += width
    return found


def tiles_of(rows, HEADS, TILE_ROWS, TILE_HEADS):
    """How many tiles `rows` rows make."""
    if HEADS == 0:
        return ct.cdiv(rows, TILE_ROWS)
    return ct.cdiv(rows // HEADS, TILE_ROWS // TILE_HEADS) * (HEADS // TILE_HEADS)


def existing(place, rows, TILE_ROWS, TILE_HEADS):
    """Which rows of a tile exist; None where all do: a single row, or heads of a single token."""
    if TILE_ROWS == 1 or TILE_HEADS == TILE_ROWS:
        return None
    return place[0] < rows


def gather_tiles(inputs, place, in_rows, left, N, WIDTHS, CHUNKS, ALIGNED):
    """Of each input, the segments of the rows at a place, zero past the last row and column.

    left: the first column of the chunk.
    """
    found = ()
    for X in ct.static_iter(inputs):
        tiles = ()
        for _, start, width, end in ct.static_iter(segments(WIDTHS, CHUNKS)):
            cols = columns(left + start, width)
            tiles += (read(X, place, cols, both(in_rows, inside(X, cols, end, N, ALIGNED))),)
        found += (tiles,)
    return found


def load_tiles(inputs, place, WIDTHS):
    """The same of one row, by tile loads."""
    found = ()
    for X in ct.static_iter(inputs):
        tiles = ()
        for _, start, width, _ in ct.static_iter(segments(WIDTHS, 1)):
            index = leading(X, place) + (start // width,)
            shape = (1, width) if X.ndim == 2 else (1, 1, width)
            tile = ct.load(X, index, shape, padding_mode=ct.PaddingMode.ZERO)
            tiles += (tile.reshape((1, width)),)
        found += (tiles,)
    return found


def gather_numbers(numbers, place, in_rows):
    """One number a row of each array."""
    found = ()
    for NUMBERS in ct.static_iter(numbers):
        found += (ct.gather(NUMBERS, (place[0],), mask=in_rows, check_bounds=False),)
    return found


def store(X, place, start, cols, tile, mask, WIDTH, STORE):
    """A segment of the rows at a place: by a tile store of one row, or by elements."""
    if STORE:
        ct.store(X, (place[0].item(), start // WIDTH), tile.astype(X.dtype), allow_tma=False)
    else:
        write(X, place, cols, tile, mask)
