"""The backward pass: a persistent grid walks over the rows and adds up its share of dW and dB."""

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from .arrays import BackwardArrays, given
from .constants import Constants, How, Norm
from .exchange import Slots
from .inputs import branch_gradient, input_gradient, saved_inputs_of, saved_of, x_hat_of
from .outputs import (
    dy_of,
    part_of_weights,
    read_biases,
    weights_of,
    write_gate_gradient,
    write_output_again,
)
from .statistics import Dots, Order, no_dots, order_of_dots
from .tiles import Cut, Tile, gather_numbers, gather_tiles, load_tiles, write
from .turns import take_turn


@dataclass(frozen=True)
class Pass:
    """A backward pass: its arrays, its constants, and the order of its sums.

    DW, DB: whether PARTIALS gets dW and dB. THROUGH: whether a gradient goes through the norm, so
    that the dot products are needed.
    """

    a: BackwardArrays
    norm: Norm
    cut: Cut
    how: How
    rows: Any
    order: Order
    DW: bool
    DB: bool
    THROUGH: bool

    @property
    def GATES(self):
        """Whether the gradient of a gate after the norm is written."""
        return given(self.a.DGATE) and not self.norm.GATE_FIRST

    def tile(self, i, chunk):
        return self.cut.tile(self.a.X, i, chunk, self.rows)

    def weights(self, home):
        """The weights that a block needs; home: see Weights."""
        again = self.how.REREAD or not (self.THROUGH or self.GATES or given(self.a.Y))
        part = part_of_weights(self.a, self.cut, self.how)
        return weights_of(self.a, self.norm, home, again, part)

    def gather(self, i, chunk):
        """The tiles and the numbers of tile i, by gathers."""
        tile = self.tile(i, chunk)
        return gather_tiles(saved_inputs_of(self.a), self.cut, tile), self.numbers(tile)

    def load(self, i):
        """The same by tile loads."""
        tiles = load_tiles(saved_inputs_of(self.a), self.cut, i)
        return tiles, self.numbers(self.tile(i, 0))

    def numbers(self, tile):
        """rstd and the mean."""
        return gather_numbers((self.a.RSTD, self.a.MEAN), tile)

    def whole(self, i, b, chunk, dots):
        """The dot products of a row from those of its chunks, which blocks share."""
        LAYER, cut, how = self.norm.LAYER, self.cut, self.how

        def missing(other):
            row = saved_of(*self.gather(i, other))
            weights = self.weights(cut.home(self.a.X, b, other))
            number = ct.astype(i, ct.float32)
            return add_up(self, row, weights, number, (), ())[1].numbers(LAYER)

        mine = dots.numbers(LAYER)
        slots = Slots(self.a.SLOTS, i, len(mine), cut.CHUNKS, how.PADDED_CHUNKS, how.POLLS)
        slots.publish(chunk, mine)
        sums = slots.collect_sums(missing)
        return Dots(sums[0], sums[1] if LAYER else dots.total, 0.0, 0.0)


@ct.kernel
def norm_backward(
    ARRAYS: tuple,
    rows: int,
    NORM: Constants[Norm],
    CUT: Constants[Cut],
    HOW: Constants[How],
    DW: ct.Constant[bool],
    DB: ct.Constant[bool],
):
    """dx = rstd · (g − x̂ · mean(g · x̂) − mean(g)), g = dy · (w + offset), x̂ = (x − mean) · rstd.

    mean and mean(g) are 0 unless NORM.LAYER. The sums over rows are dW = Σ dy · x̂ and dB = Σ dy.
    dy is the sum of the arrays DY. Y: y = x̂ · (w + offset) + b is written once more. DSUM: dx
    grows by dsum; it is both the gradient of the input and that of the residual, each in its own
    dtype. GATE: dy is dy · act(gate) throughout, and dgate = dy · ŷ · act'(gate) with
    ŷ = x̂ · (w + offset) + b; if GATE_FIRST, x is x · act(gate) throughout, dgate = dx · x ·
    act'(gate), and then dx is dx · act(gate). Where the input was masked or scaled, dx is the
    gradient of x, dresidual that of the sum.

    Block b takes tile b, and then every tile that is a multiple of the grid's size further on. With
    CHUNKS, each group of CHUNKS blocks shares its rows and counts as one block.
    """
    this = pass_of(ARRAYS, rows, NORM, CUT, HOW, DW, DB)
    a, cut, how = this.a, this.cut, this.how
    shared = cut.CHUNKS > 1
    b = ct.bid(0) // cut.CHUNKS
    chunk = ct.bid(0) % cut.CHUNKS if shared else 0
    step = ct.num_blocks(0) // cut.CHUNKS
    home = cut.home(a.X, b, chunk)
    # Blocks that exchange sums follow clear_slots, which has waited for what they read here.
    exchanges = shared and this.THROUGH
    take_turn(how.OVERLAP and not exchanges)
    weights = this.weights(home)
    biases = read_biases(a, home) if given(a.B) and this.GATES else ()
    dws = zeros(cut) if DW else ()
    dbs = zeros(cut) if DB else ()
    count = cut.tiles(rows)
    # Gathered rows are read one tile ahead; the compiler itself runs tile loads ahead.
    if not how.TMA:
        ahead = this.gather(b, chunk)
    take_turn(how.OVERLAP and exchanges)
    for i in range(b, count, step):
        if how.TMA:
            read = this.load(i)
        else:
            read = ahead
            # Past the end it is the last tile of the same heads once more.
            ahead = this.gather(i + step if i + step < count else i, chunk)
        row = saved_of(*read)
        number = ct.astype(i, ct.float32)
        if this.GATES:
            tile = this.tile(i, chunk)
            write_gate_gradient(this, tile, row, weights, biases, number)
        if given(a.Y):
            tile = this.tile(i, chunk)
            write_output_again(this, tile, row, weights, number)
        pairs, dots, dws, dbs = add_up(this, row, weights, number, dws, dbs)
        if this.THROUGH:
            if shared:
                dots = this.whole(i, b, chunk, dots)
            write_gradients(this, this.tile(i, chunk), row, weights, pairs, dots)
    # Made anew: over the loop the masks would take registers.
    home = Tile(home.place, None, chunk, cut.parts(a.X, chunk))
    # The rows of partial sums of one output: a block has one, or a group of blocks shares some.
    partial_rows = step * cut.ROWS // cut.HEADS if cut.HEADS > 0 else step
    if DW:
        write_sums(a, cut, home, dws, 0)
    if DB:
        write_sums(a, cut, home, dbs, partial_rows if DW else 0)


def pass_of(ARRAYS, rows, NORM, CUT, HOW, DW, DB):
    """The pass of a kernel with these parameters."""
    a, norm, cut, how = BackwardArrays(*ARRAYS), Norm(*NORM), Cut(*CUT), How(*HOW)
    order = order_of_dots(a.X, cut, rows, copied(norm, cut, how), how.THREADS)
    through = given(a.DX) or given(a.DRESIDUAL) or (given(a.DGATE) and norm.GATE_FIRST)
    return Pass(a, norm, cut, how, rows, order, DW, DB, through)


def copied(norm, cut, how):
    """Whether the compiler adds up a row in several copies of the loop's body, in several orders.

    Seen in rms_norm of 5120 and 12288 bfloat16 on an H200: the last row of each block had other
    bits. The two sums of LAYER are one reduction, whose additions the compiler does not reorder.
    """
    return how.TMA and how.STORE and len(cut.WIDTHS) > 1 and not norm.LAYER


def zeros(cut):
    """A float32 tile of zeros for each segment."""
    tiles = ()
    for width in ct.static_iter(cut.WIDTHS):
        tiles += (ct.zeros((cut.ROWS, width), dtype=ct.float32),)
    return tiles


def add_up(this, row, weights, number, dws, dbs):
    """(pairs, dots, dws, dbs): x̂ and g = dy · (w + offset) of each segment and their dot products,
    if a gradient goes THROUGH the norm; and the sums over rows so far.
    """
    norm, order = this.norm, this.order
    pairs = ()
    dots = no_dots(this.cut.ROWS)
    new_dws = ()
    new_dbs = ()
    for j, saved in ct.static_iter(enumerate(row)):
        unpacked = saved.unpacked()
        x_hat, dy = x_hat_of(unpacked, norm, order.zero), dy_of(this, unpacked)
        if this.THROUGH:
            g = weights.times(dy, j, number)
            settled = this.how.THREADS > 0 or norm.LAYER or copied(norm, this.cut, this.how)
            if given(this.a.MOD_SCALE) or (given(this.a.W) and settled):
                g = order.unfused(g)
            pairs += ((x_hat, g),)
            dots = dots.plus(x_hat, g, j, this.cut.WIDTHS, order, norm.LAYER)
        if len(dws) > 0:
            new_dws += (dws[j] + dy * x_hat,)
        if len(dbs) > 0:
            new_dbs += (dbs[j] + dy,)
    return pairs, dots, new_dws, new_dbs


def write_gradients(this, tile, row, weights, pairs, dots):
    """Write dx and dresidual, and the gradient of a gate before the norm."""
    a, norm, how = this.a, this.norm, this.how
    kept = ()
    for j, saved in ct.static_iter(enumerate(row)):
        at = tile.at(j)
        x_hat, g = pairs[j]
        if how.PACKED:
            again = saved.rematerialized(dots.dot).unpacked()
            x_hat = x_hat_of(again, norm, this.order.zero)
            g = weights.times(dy_of(this, again), j, dots.dot)
            if given(a.W) and how.THREADS > 0:
                g = this.order.unfused(g)
        dx = dots.through_norm(x_hat, g, saved.rstd, this.cut.N, norm.LAYER, this.order)
        dx = input_gradient(this, at, saved, dx)
        mine = branch_gradient(this, tile, j, saved, dx)
        if not how.REREAD:
            write_dx(this, at, mine, dx)
        elif given(a.DX) and not given(a.DRESIDUAL):
            kept += ((at, mine.astype(a.DX.dtype), ()),)
        else:
            kept += ((at, mine, dx),)
    # Each write has a barrier of the block, so every weight is read again before the first write.
    for at, mine, dx in ct.static_iter(kept):
        write_dx(this, at, mine, dx)


def write_dx(this, at, dx, dresidual):
    if given(this.a.DX):
        write(this.a.DX, at, dx, this.how.STORE)
    if given(this.a.DRESIDUAL):
        write(this.a.DRESIDUAL, at, dresidual, this.how.STORE)


def write_sums(a, cut, home, tiles, first):
    """Write a block's sums over rows, into one row from `first` on, or into the columns of their
    heads."""
    for j, segment in ct.static_iter(enumerate(home.segments)):
        tile, cols = tiles[j], segment.cols()
        if cut.HEADS == 0 and cut.ROWS > 1:
            tile = ct.sum(tile, axis=0, keepdims=True)
        index = (first + home.place[0], cols)
        if cut.HEADS > 0:
            index = (first + home.place[1], home.place[2] * cut.N + cols)
        ct.scatter(a.PARTIALS, index, tile, mask=segment.mask, check_bounds=False)
