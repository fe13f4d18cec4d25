"""The forward pass of a piece of each row: some of its columns, the rest of which others hold.

row_sums reads load -> sum -> store, and row_apply load -> statistics -> output -> store. Between
the two, whoever launches them adds up what row_sums stored over the pieces of a row. A kernel
divides its sums by the length of the whole row, so that what is added up is a mean.

LayerNorm adds up twice: the means, and then what row_center makes of them. It reads no row.
"""

import cuda.tile as ct

from .arrays import SplitForwardArrays
from .constants import Constants, How, Norm
from .forward import pass_of
from .statistics import Moments, moments
from .tiles import Cut, gather_numbers, write_number


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
    a = SplitForwardArrays(*ARRAYS)
    this = pass_of(a.of_norm(), first, 0.0, rows, NORM, CUT, ())
    i, cut = first + ct.bid(2) * step + ct.bid(1), this.cut
    numbers = add_up(this, i, 0)
    if cut.CHUNKS > 1:
        for chunk in range(1, cut.CHUNKS):
            more = add_up(this, i, chunk)
            numbers = joined(numbers, more, chunk * cut.chunk_width(), cut.count(chunk))
    tile = this.tile(i, 0)
    if this.norm.LAYER:
        mean, correction, squares = numbers
        write_number(a.PART, tile, (mean + correction) * (cut.N * share), tile.in_rows)
        write_number(a.OWN_MEAN, tile, mean, tile.in_rows)
        write_number(a.OWN_CORRECTION, tile, correction, tile.in_rows)
        write_number(a.OWN_SQUARES, tile, squares, tile.in_rows)
    else:
        write_number(a.PART, tile, numbers[0] * share, tile.in_rows)


def add_up(this, i, chunk):
    """(Σ x²,) of a chunk of each row of tile i, for LAYER (mean, correction, Σ (x − mean)²).

    The mean is the sum of its first two numbers. Writes x + residual.
    """
    tile = this.tile(i, chunk)
    row = this.prologue(tile, this.gather(tile))
    # Exact in every dtype: where the means of two parts are apart, an error of one of them would
    # change Σ (x − mean)² by as much times that distance.
    count = this.cut.N if this.cut.CHUNKS == 1 else this.cut.count(chunk)
    found = moments(this, tile, row, count, True)
    if not this.norm.LAYER:
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


@ct.kernel
def row_center(ARRAYS: tuple, count: float, share: float, rows: int, TILE: ct.Constant[int]):
    """correction = Σ (x − mean) · share, and square = Σ (x − mean)² · share, over the piece.

    mean: of the whole row, as WHOLE has it. count: the columns of the piece. Both follow from the
    piece's own moments; after Chan, Golub and LeVeque (see exchange.Slots.combine).
    """
    a = SplitForwardArrays(*ARRAYS)
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
    HOW: Constants[How],
):
    """y = (x − mean) · rstd · (w + offset) + b, with the mean and the variance of the whole row.

    Block (0, y, z) has number `first` + z · `step` + y, and normalises a chunk of a tile of rows.
    """
    a = SplitForwardArrays(*ARRAYS)
    this = pass_of(a.of_norm(), first, eps, rows, NORM, CUT, HOW)
    b, CHUNKS = first + ct.bid(2) * step + ct.bid(1), this.cut.CHUNKS
    tile = this.tile(b // CHUNKS, b % CHUNKS if CHUNKS > 1 else 0)
    row = this.prologue(tile, this.gather(tile))
    this.epilogue(tile, row, whole_moments(a, this.norm, tile), (), None)


def whole_moments(a, norm, tile):
    """The moments of whole rows, as they were added up over the pieces."""
    if not norm.LAYER:
        return Moments((), 0.0, 0.0, gather_numbers((a.WHOLE,), tile)[0])
    arrays = (a.WHOLE, a.CORRECTION, a.SQUARE)
    mean, correction, square = gather_numbers(arrays, tile)
    return Moments((), mean, correction, square - correction * correction)
