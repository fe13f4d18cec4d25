"""The forward pass in three schedules, each load -> sum -> statistics -> output -> store.

row_forward has one block for each tile of rows. stream_forward is a persistent grid whose blocks
read the next tile ahead. shared_forward has several blocks for each row.

All three take: `first`, the tile where the launch starts; `step`, which row_forward alone uses;
ARRAYS, see Arrays; eps; rows, the number of rows; and their constants, see constants.py and
tiles.Cut. The arguments that a block needs first are the first parameters: parameters are read in
lines of 64 bytes, and a block that waits for one more line ends 0.03 to 0.06 µs later.
"""

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from .constants import Constants, Norm, RowHow, SharedHow, StreamHow
from .exchange import Slots
from .inputs import Row, inputs_of, is_exact, row_of, write_sum
from .outputs import (
    Normalized,
    Parameters,
    epilogue,
    fetch_parameters,
    output_of,
    peak_of,
    read_parameters,
)
from .statistics import Moments, moments, order_of, recentered
from .tiles import Cut, gather_tiles, load_tiles


@dataclass(frozen=True)
class Arrays:
    """X, RESIDUAL, GATE, ADDEND, SKIP (rows, N) or (tokens, HEADS, N), and so DROPOUT_MASK, of
    bytes; LAYER_SCALE (N,); W and B (N,) or (HEADS, N); Y, SUM (rows, N); MEAN, RSTD (rows,)
    float32; SLOTS (rows, n) int32; Q (rows, N) of 8-bit floats; SCALE: every scale, in one
    dimension, float32 or bytes; AMAX (1,) int32, at first 0; INNER_W, INNER_RSTD: W and RSTD of the
    inner norm.

    An array that a constant excludes is an empty tuple.
    """

    X: Any
    Y: Any
    W: Any
    B: Any
    RESIDUAL: Any
    GATE: Any
    SUM: Any
    MEAN: Any
    RSTD: Any
    SLOTS: Any
    ADDEND: Any = ()
    SKIP: Any = ()
    DROPOUT_MASK: Any = ()
    LAYER_SCALE: Any = ()
    Q: Any = ()
    SCALE: Any = ()
    AMAX: Any = ()
    INNER_W: Any = ()
    INNER_RSTD: Any = ()


@ct.kernel
def row_forward(
    first: int,
    step: int,
    ARRAYS: tuple,
    eps: float,
    rows: int,
    NORM: Constants[Norm],
    CUT: Constants[Cut],
    HOW: Constants[RowHow],
):
    """y = (x − mean) · rstd · (w + offset) + b with rstd = 1 / sqrt(mean((x − mean)²) + eps).

    mean is 0 unless NORM.LAYER. Block (0, y, z) normalises tile `first` + z · `step` + y.
    """
    a, norm, cut, how = Arrays(*ARRAYS), Norm(*NORM), Cut(*CUT), RowHow(*HOW)
    order = order_of(a.X, cut, first, how.ORDERED)
    # bid(0) would compile to a division by the size of a cluster.
    i = first + ct.bid(2) * step + ct.bid(1)
    tile = cut.tile(a.X, i, 0, rows)
    tiles = gather_tiles(inputs_of(a, norm), cut, tile)
    parameters = Parameters()
    if how.FETCH:
        tiles, parameters = fetch_parameters(a, norm, tile, tiles, eps)
    normalize(a, norm, cut, tile, tiles, parameters, order, eps, how)


@ct.kernel
def stream_forward(
    first: int,
    step: int,
    ARRAYS: tuple,
    eps: float,
    rows: int,
    NORM: Constants[Norm],
    CUT: Constants[Cut],
    HOW: Constants[StreamHow],
):
    """The formula of row_forward, by a persistent grid.

    Block b normalises tile `first` + b, and then every tile that is a multiple of the grid's size
    further on. It reads one tile ahead.
    """
    a, norm, cut, how = Arrays(*ARRAYS), Norm(*NORM), Cut(*CUT), StreamHow(*HOW)
    inputs, count = inputs_of(a, norm), cut.tiles(rows)
    if not how.TMA:
        ahead = gather_tiles(inputs, cut, cut.tile(a.X, first + ct.bid(0), 0, rows))
    for i in range(first + ct.bid(0), count, ct.num_blocks(0)):
        if how.TMA:
            # The compiler itself runs tile loads ahead.
            tiles = load_tiles(inputs, cut, i)
        else:
            tiles = ahead
            following = ct.minimum(i + ct.num_blocks(0), count - 1)
            ahead = gather_tiles(inputs, cut, cut.tile(a.X, following, 0, rows))
        tile = cut.tile(a.X, i, 0, rows)
        order = order_of(a.X, cut, first, False)
        normalize(a, norm, cut, tile, tiles, Parameters(), order, eps, how)


@ct.kernel
def shared_forward(
    first: int,
    step: int,
    ARRAYS: tuple,
    eps: float,
    rows: int,
    NORM: Constants[Norm],
    CUT: Constants[Cut],
    HOW: Constants[SharedHow],
):
    """The formula of row_forward, by CHUNKS blocks for each row, which exchange their sums.

    Block b normalises chunk b % CHUNKS of row `first` + b // CHUNKS.
    """
    a, norm, cut, how = Arrays(*ARRAYS), Norm(*NORM), Cut(*CUT), SharedHow(*HOW)
    inputs, exact = inputs_of(a, norm), is_exact(a, norm)
    order = order_of(a.X, cut, first, False)
    i = first + ct.bid(0) // cut.CHUNKS
    chunk = ct.bid(0) % cut.CHUNKS
    tile = cut.tile(a.X, i, chunk, rows)
    row = row_of(a, norm, tile, gather_tiles(inputs, cut, tile), how.PACKED)
    write_sum(a, norm, tile, row, False)
    count = cut.count(chunk)
    mine = moments(row, tile.masks(), count, cut.rest(chunk), order, norm.LAYER, exact)
    numbers = numbers_of(mine, count, norm.LAYER)

    def missing(other):
        """The numbers of a chunk whose block has not published them."""
        there = cut.tile(a.X, tile.place[0].item(), other, rows)
        tiles, count = gather_tiles(inputs, cut, there), cut.count(other)
        theirs = row_of(a, norm, there, tiles, how.PACKED)
        rest = cut.rest(other)
        found = moments(theirs, there.masks(), count, rest, order, norm.LAYER, exact)
        return numbers_of(found, count, norm.LAYER)

    if how.OVERLAP:
        ct.grid_dependency_control_wait()
    slots = slots_of(a, tile, len(numbers), cut, how)
    slots.publish(chunk, numbers)
    if norm.LAYER:
        mean, correction, variance = slots.combine(slots.collect(missing), cut)
    else:
        mean, correction, variance = 0.0, 0.0, slots.collect_sums(missing)[0] * (1.0 / cut.N)
    found = Moments((), mean, correction, variance)
    rstd = ct.rsqrt(variance + eps)
    normalized = Normalized(recentered(row, found, rstd, norm.LAYER), rstd, row)

    def missing_peak(other):
        """The largest y of a chunk whose block has not published it."""
        there = cut.tile(a.X, tile.place[0].item(), other, rows)
        theirs = row_of(a, norm, there, gather_tiles(inputs, cut, there), how.PACKED)
        centered = recentered(theirs, found, rstd, norm.LAYER)
        return (peak_of(a, norm, there, Normalized(centered, rstd, theirs)),)

    def whole_peak(peak):
        """The largest y of the row, given that of this block's chunk."""
        slots = slots_of(a, tile, 1, cut, how, len(numbers) * cut.CHUNKS)
        return slots.collect_peak(chunk, peak, missing_peak)

    epilogue(a, norm, tile, normalized, Parameters((), how.TOGETHER, eps), whole_peak, False)
    if norm.SAVE:
        write_statistics(a, norm, tile.place, found, rstd, chunk == 0)


def normalize(a, norm, cut, tile, tiles, parameters, order, eps, how):
    """Normalise a tile of whole rows. tiles: of inputs_of; parameters: see outputs.Parameters."""
    row = prologue(a, norm, cut, tile, tiles, order, eps, how.PACKED)
    write_sum(a, norm, tile, row, how.STORE)
    exact = is_exact(a, norm)
    found = moments(row, tile.masks(), cut.N, cut.rest(0), order, norm.LAYER, exact)
    rstd = ct.rsqrt(found.variance + eps)
    centered = recentered(row, found, rstd, norm.LAYER) if how.PACKED else found.centered
    epilogue(a, norm, tile, Normalized(centered, rstd, row), parameters, None, how.STORE)
    if norm.SAVE:
        write_statistics(a, norm, tile.place, found, rstd, tile.in_rows)


def prologue(a, norm, cut, tile, tiles, order, eps, PACKED):
    """The rows to normalise, from the tiles of inputs_of."""
    if len(norm.INNER) > 0:
        row = row_after(a, norm, cut, tile, tiles, order, eps, PACKED)
    else:
        row = row_of(a, norm, tile, tiles, PACKED)
    return row  # a second return would compile to other machine code


def row_after(a, norm, cut, tile, tiles, order, eps, PACKED):
    """The residual + the inner norm of x, rounded to the sum's dtype: what the outer norm takes."""
    inner = Norm(*norm.INNER)
    b = Arrays(a.X, a.SUM, a.INNER_W, (), (), (), (), (), a.INNER_RSTD, (), (), a.RESIDUAL)
    row = row_of(b, inner, tile, tiles, PACKED)
    found = moments(row, tile.masks(), cut.N, cut.rest(0), order, inner.LAYER, is_exact(b, inner))
    rstd = ct.rsqrt(found.variance + eps)
    centered = recentered(row, found, rstd, inner.LAYER) if PACKED else found.centered
    normalized = Normalized(centered, rstd, row)
    xs = ()
    for j in ct.static_iter(range(len(cut.WIDTHS))):
        wb = read_parameters(b, inner, tile, j)
        xs += (output_of(b, inner, j, normalized, wb).astype(a.SUM.dtype),)
    if inner.SAVE:
        write_statistics(b, inner, tile.place, found, rstd, tile.in_rows)
    return Row(xs, (), (), norm, PACKED)


def slots_of(a, tile, PARTS, cut, how, FIRST=0):
    """The slots of a row that blocks share, for PARTS numbers of a chunk, from slot FIRST on."""
    row = tile.place[0].item()
    return Slots(a.SLOTS, row, PARTS, cut.CHUNKS, how.PADDED_CHUNKS, how.POLLS, FIRST)


def numbers_of(found, count, LAYER):
    """What a chunk publishes: Σ (x − mean)², after the mean if there is one."""
    if LAYER:
        return (found.mean + found.correction).item(), found.variance.item() * count
    return (found.variance.item() * count,)


def write_statistics(a, norm, place, found, rstd, mask):
    """Write rstd, and the mean if there is one, where the mask is true."""
    ct.scatter(a.RSTD, (place[0],), rstd, mask=mask, check_bounds=False)
    if norm.LAYER:
        mean = found.mean + found.correction
        ct.scatter(a.MEAN, (place[0],), mean, mask=mask, check_bounds=False)
