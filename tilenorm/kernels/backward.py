"""The backward pass: a persistent grid walks over the rows and adds up its share of dW and dB."""

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from .constants import BackwardHow, Constants, Needs, Norm
from .exchange import Slots
from .inputs import input_gradient, saved_inputs_of, saved_of, x_hat_of
from .opaque import opaque_zero
from .outputs import dy_of, read_biases, weights_of, write_gate_gradient
from .statistics import Dots, Order, no_dots, unit
from .tiles import Cut, gather_numbers, gather_tiles, load_tiles, write_segment


@dataclass(frozen=True)
class Arrays:
    """X, DY, GATE, DSUM (..., N), with one or two leading dimensions; W and B (N,) or (HEADS, N);
    MEAN and RSTD (rows,) float32; DX, DRESIDUAL, DGATE (rows, N); SLOTS (rows, n) int32.

    X is the sum where a residual was added. PARTIALS (outputs · blocks, N) float32: block b writes
    its sum over rows of dW to row b, that of dB behind all of dW's. With HEADS, PARTIALS is
    (outputs · n, HEADS · N), and a group of blocks, one for each part of the heads, writes rows. An
    array that a constant excludes is an empty tuple.
    """

    X: Any
    DY: Any
    GATE: Any
    DSUM: Any
    W: Any
    B: Any
    MEAN: Any
    RSTD: Any
    DX: Any
    DRESIDUAL: Any
    DGATE: Any
    PARTIALS: Any
    SLOTS: Any


@ct.kernel
def norm_backward(
    ARRAYS: tuple,
    rows: int,
    NORM: Constants[Norm],
    CUT: Constants[Cut],
    HOW: Constants[BackwardHow],
    NEEDS: Constants[Needs],
):
    """dx = rstd · (g − x̂ · mean(g · x̂) − mean(g)), g = dy · (w + offset), x̂ = (x − mean) · rstd.

    mean and mean(g) are 0 unless NORM.LAYER. The sums over rows are dW = Σ dy · x̂ and dB = Σ dy.
    DSUM: dx grows by dsum; it is both the gradient of the input and that of the residual, each in
    its own dtype. GATED: dy is dy · act(gate) throughout, and dgate = dy · ŷ · act'(gate) with
    ŷ = x̂ · (w + offset) + b; if GATE_FIRST, x is x · act(gate) throughout, dgate = dx · x ·
    act'(gate), and then dx is dx · act(gate).

    Block b takes tile b, and every one that follows at steps of the grid. With CHUNKS, so many
    blocks in turn share rows and stand for one block.
    """
    a, norm, cut, how = Arrays(*ARRAYS), Norm(*NORM), Cut(*CUT), BackwardHow(*HOW)
    needs = Needs(*NEEDS)
    through = needs.DX or needs.DRESIDUAL or (needs.DGATE and norm.GATE_FIRST)
    gates = needs.DGATE and norm.GATE_AFTER
    inputs, numbers = saved_inputs_of(a, norm, needs)
    order = Order(0, None)
    if cut.CHUNKS > 1:
        order = Order(unit(a.X, cut.ALIGNED), opaque_zero(rows))
    b = ct.bid(0) // cut.CHUNKS
    chunk = ct.bid(0) % cut.CHUNKS if cut.CHUNKS > 1 else 0
    step = ct.num_blocks(0) // cut.CHUNKS
    home = cut.home(a.X, b, chunk)
    weights = weights_of(a, norm, home, how.REREAD or not (through or gates))
    biases = read_biases(a, home) if norm.BIAS and gates else ()
    dws = zeros(cut) if needs.DW else ()
    dbs = zeros(cut) if needs.DB else ()

    def gather(i, chunk):
        tile = cut.tile(a.X, i, chunk, rows)
        return gather_tiles(inputs, cut, tile), gather_numbers(numbers, tile)

    def whole(i, dots):
        """The dot products of rows that blocks share."""

        def missing(other):
            row = saved_of(norm, needs, *gather(i, other))
            theirs = weights_of(a, norm, cut.home(a.X, b, other), how.REREAD)
            number = ct.astype(i, ct.float32)
            return add_up(row, norm, cut, theirs, order, True, number, (), ())[1].numbers(
                norm.LAYER
            )

        mine = dots.numbers(norm.LAYER)
        slots = Slots(a.SLOTS, i, len(mine), cut.CHUNKS, how.PADDED_CHUNKS, how.POLLS)
        slots.publish(chunk, mine)
        sums = slots.collect_sums(missing)
        return Dots(sums[0], sums[1] if norm.LAYER else dots.total, 0.0, 0.0)

    # Gathered rows are read one tile ahead; the compiler itself runs tile loads ahead.
    count = cut.tiles(rows)
    if not how.TMA:
        ahead = gather(b, chunk)
    if how.OVERLAP and cut.CHUNKS > 1:
        ct.grid_dependency_control_wait()
    for i in range(b, count, step):
        if how.TMA:
            tiles = load_tiles(inputs, cut, i)
            read = tiles, gather_numbers(numbers, cut.tile(a.X, i, 0, rows))
        else:
            read = ahead
            # Past the end it is the last tile of the same heads once more.
            ahead = gather(i + step if i + step < count else i, chunk)
        row = saved_of(norm, needs, *read)
        number = ct.astype(i, ct.float32)
        if gates:
            tile = cut.tile(a.X, i, chunk, rows)
            write_gate_gradient(a, norm, tile, row, weights, biases, number, how.STORE)
        pairs, dots, dws, dbs = add_up(row, norm, cut, weights, order, through, number, dws, dbs)
        if through:
            if cut.CHUNKS > 1:
                dots = whole(i, dots)
            tile = cut.tile(a.X, i, chunk, rows)
            write_gradients(a, norm, needs, how, tile, row, weights, pairs, dots, cut.N)
    # Made anew: over the loop its masks would take registers.
    home = cut.home(a.X, b, chunk)
    # The rows of partial sums of one output: a block has one, or a group of blocks shares some.
    partial_rows = step * cut.ROWS // cut.HEADS if cut.HEADS > 0 else step
    if needs.DW:
        write_sums(a, cut, home, dws, 0)
    if needs.DB:
        write_sums(a, cut, home, dbs, partial_rows if needs.DW else 0)


def zeros(cut):
    """A float32 tile of zeros for each segment."""
    found = ()
    for width in ct.static_iter(cut.WIDTHS):
        found += (ct.zeros((cut.ROWS, width), dtype=ct.float32),)
    return found


def add_up(row, norm, cut, weights, order, THROUGH, number, dws, dbs):
    """(pairs, dots, dws, dbs): x̂ and g = dy · (w + offset) of each segment and their dot products,
    if THROUGH; and the sums over rows so far."""
    pairs = ()
    dots = no_dots(cut.ROWS)
    new_dws = ()
    new_dbs = ()
    for j, saved in ct.static_iter(enumerate(row)):
        unpacked = saved.unpacked()
        x_hat, dy = x_hat_of(unpacked, norm), dy_of(unpacked, norm)
        if THROUGH:
            g = weights.times(dy, j, number)
            if norm.LAYER and norm.WEIGHT:
                g = order.unfused(g)
            pairs += ((x_hat, g),)
            dots = dots.plus(x_hat, g, j, cut.WIDTHS, order, norm.LAYER)
        if len(dws) > 0:
            new_dws += (dws[j] + dy * x_hat,)
        if len(dbs) > 0:
            new_dbs += (dbs[j] + dy,)
    return pairs, dots, new_dws, new_dbs


def write_gradients(a, norm, needs, how, tile, row, weights, pairs, dots, N):
    """Write dx and dresidual, and the gradient of a gate before the norm."""
    kept = ()
    for j, saved in ct.static_iter(enumerate(row)):
        x_hat, g = pairs[j]
        if how.PACKED:
            again = saved.rematerialized(dots.dot).unpacked()
            x_hat, g = x_hat_of(again, norm), weights.times(dy_of(again, norm), j, dots.dot)
        dx = dots.through_norm(x_hat, g, saved.rstd, N, norm.LAYER)
        dx = input_gradient(a, norm, needs, tile, j, saved, dx, how.STORE)
        if not how.REREAD:
            write_dx(a, needs, tile, j, dx, how.STORE)
        elif needs.DX and not needs.DRESIDUAL:
            kept += (dx.astype(a.DX.dtype),)
        else:
            kept += (dx,)
    # A block waits for itself at each write: what is read again is read ahead of all of them.
    for j, dx in ct.static_iter(enumerate(kept)):
        write_dx(a, needs, tile, j, dx, how.STORE)


def write_dx(a, needs, tile, j, dx, STORE):
    if needs.DX:
        write_segment(a.DX, tile, j, dx, STORE)
    if needs.DRESIDUAL:
        write_segment(a.DRESIDUAL, tile, j, dx, STORE)


def write_sums(a, cut, home, tiles, first):
    """Write a block's sums over rows, into one row from `first` on, or into the columns of their
    heads."""
    for j, segment in ct.static_iter(enumerate(home.segments)):
        tile = tiles[j]
        if cut.HEADS == 0 and cut.ROWS > 1:
            tile = ct.sum(tile, axis=0, keepdims=True)
        cols = segment.cols()
        index = (first + home.place[0], cols)
        if cut.HEADS > 0:
            index = (first + home.place[1], home.place[2] * cut.N + cols)
        ct.scatter(a.PARTIALS, index, tile, mask=segment.mask, check_bounds=False)
