"""The forward pass of a piece of each row: some of its columns, the rest of which others hold.

row_sums reads load -> sum -> store, and row_apply load -> statistics -> output -> store. Between
the two, whoever launches them adds up what row_sums stored over the pieces of a row. A kernel
divides its sums by the length of the whole row, so that what is added up is a mean.

LayerNorm adds up twice: the means, and then what row_center makes of them. It reads no row.
"""

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from .constants import Constants, Norm
from .forward import write_statistics
from .inputs import inputs_of, row_of, write_sum
from .outputs import Normalized, Parameters, epilogue
from .statistics import Moments, moments, order_of, recentered
from .tiles import Cut, gather_numbers, gather_tiles


@dataclass(frozen=True)
class Arrays:
    """X, RESIDUAL, GATE (rows, N) or (tokens, HEADS, N); W and B (N,) or (HEADS, N); SUM, Y
    (rows, N). All others are (rows,) float32, with any stride.

    PART: what row_sums stores. OWN_*: the moments of the piece. WHOLE: the sum of all PARTs of a
    row: the mean of squares, or, for LAYER, the mean. CORRECTION, SQUARE: what row_center stores,
    and what row_apply reads of it once it is added up. MEAN, RSTD: what the backward pass reads.
    An array that a kernel does not touch is an empty tuple.
    """

    X: Any
    RESIDUAL: Any
    GATE: Any
    W: Any
    B: Any
    SUM: Any
    Y: Any
    PART: Any
    OWN_MEAN: Any
    OWN_CORRECTION: Any
    OWN_SQUARES: Any
    WHOLE: Any
    CORRECTION: Any
    SQUARE: Any
    MEAN: Any
    RSTD: Any


@ct.kernel
def row_sums(
    first: int,
    step: int,
    ARRAYS: tuple,
    share: float,
    rows: int,
    NORM: Constants[Norm],
    CUT: Constants[Cut],
):
    """part = Σ x² · share; for LAYER Σ x · share, and the piece's own mean and Σ (x − mean)².

    share: 1 / the length of a whole row. Block (0, y, z) adds up tile `first` + z · `step` + y,
    chunk by chunk.
    """
    a, norm, cut = Arrays(*ARRAYS), Norm(*NORM), Cut(*CUT)
    i = first + ct.bid(2) * step + ct.bid(1)
    numbers = add_up(a, norm, cut, rows, i, 0, first)
    if cut.CHUNKS > 1:
        for chunk in range(1, cut.CHUNKS):
            more = add_up(a, norm, cut, rows, i, chunk, first)
            numbers = joined(numbers, more, chunk * cut.chunk_width(), cut.count(chunk))
    tile = cut.tile(a.X, i, 0, rows)
    if norm.LAYER:
        mean, correction, squares = numbers
        put(a.PART, tile, (mean + correction) * (cut.N * share))
        put(a.OWN_MEAN, tile, mean)
        put(a.OWN_CORRECTION, tile, correction)
        put(a.OWN_SQUARES, tile, squares)
    else:
        put(a.PART, tile, numbers[0] * share)


def add_up(a, norm, cut, rows, i, chunk, first):
    """(Σ x²,) of a chunk of each row of tile i, for LAYER (mean, correction, Σ (x − mean)²).

    The mean is the sum of its first two numbers. Writes x + residual.
    """
    tile = cut.tile(a.X, i, chunk, rows)
    row = row_of(a, norm, tile, gather_tiles(inputs_of(a, norm), cut, tile), False)
    write_sum(a, norm, tile, row, False)
    count = cut.N if cut.CHUNKS == 1 else cut.count(chunk)
    order = order_of(a.X, cut, first, False)
    # Exact in every dtype: where the means of two parts are apart, an error of one of them would
    # change Σ (x − mean)² by as much times that distance.
    found = moments(row, tile.masks(), count, 0.0, order, norm.LAYER, True)
    if not norm.LAYER:
        return (found.variance * count,)
    return found.mean, found.correction, found.variance * count


def joined(numbers, more, before, count):
    """The numbers of two parts of a row, of `before` and of `count` columns.

    The mean stays that of the first part, and the correction grows (see exchange.Slots.combine).
    """
    if len(numbers) == 1:
        return (numbers[0] + more[0],)
    mean, correction, squares = numbers
    apart = (more[0] - mean) + (more[1] - correction)
    weight = ct.truediv(ct.astype(count, ct.float32), ct.astype(before + count, ct.float32))
    step = apart * weight
    squares = squares + more[2] + apart * step * ct.astype(before, ct.float32)
    return mean, correction + step, squares


def put(NUMBERS, tile, values):
    """Store a number for each row of a tile."""
    ct.scatter(NUMBERS, (tile.place[0],), values, mask=tile.in_rows, check_bounds=False)


@ct.kernel
def row_center(ARRAYS: tuple, count: float, share: float, rows: int, TILE: ct.Constant[int]):
    """correction = Σ (x − mean) · share, and square = Σ (x − mean)² · share, over the piece.

    mean: of the whole row, as WHOLE has it. count: the columns of the piece. Both follow from the
    piece's own moments; after Chan, Golub and LeVeque (see exchange.Slots.combine).
    """
    a = Arrays(*ARRAYS)
    row = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)
    mask = row < rows
    apart = read(a.OWN_MEAN, row, mask) - read(a.WHOLE, row, mask)
    apart = apart + read(a.OWN_CORRECTION, row, mask)
    total = apart * count
    square = read(a.OWN_SQUARES, row, mask) + total * apart
    ct.scatter(a.CORRECTION, (row,), total * share, mask=mask, check_bounds=False)
    ct.scatter(a.SQUARE, (row,), square * share, mask=mask, check_bounds=False)


def read(NUMBERS, row, mask):
    return ct.gather(NUMBERS, (row,), mask=mask, check_bounds=False)


@ct.kernel
def row_apply(
    first: int,
    step: int,
    ARRAYS: tuple,
    eps: float,
    rows: int,
    NORM: Constants[Norm],
    CUT: Constants[Cut],
    TOGETHER: ct.Constant[int],
):
    """y = (x − mean) · rstd · (w + offset) + b, with the mean and the variance of the whole row.

    Block (0, y, z) has number `first` + z · `step` + y, and normalises a chunk of a tile of rows.
    TOGETHER: as in SharedHow.
    """
    a, norm, cut = Arrays(*ARRAYS), Norm(*NORM), Cut(*CUT)
    b = first + ct.bid(2) * step + ct.bid(1)
    chunk = b % cut.CHUNKS if cut.CHUNKS > 1 else 0
    tile = cut.tile(a.X, b // cut.CHUNKS, chunk, rows)
    row = row_of(a, norm, tile, gather_tiles(inputs_of(a, norm), cut, tile), False)
    found = whole_moments(a, norm, tile)
    rstd = ct.rsqrt(found.variance + eps)
    normalized = Normalized(recentered(row, found, rstd, norm.LAYER), rstd, row)
    epilogue(a, norm, tile, normalized, Parameters((), TOGETHER, eps), None, False)
    if norm.SAVE:
        mask = tile.in_rows if cut.CHUNKS == 1 else chunk == 0
        write_statistics(a, norm, tile.place, found, rstd, mask)


def whole_moments(a, norm, tile):
    """The moments of whole rows, as they were added up over the pieces."""
    if not norm.LAYER:
        return Moments((), 0.0, 0.0, gather_numbers((a.WHOLE,), tile)[0])
    arrays = (a.WHOLE, a.CORRECTION, a.SQUARE)
    mean, correction, square = gather_numbers(arrays, tile)
    return Moments((), mean, correction, square - correction * correction)
