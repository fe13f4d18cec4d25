"""The backward pass: a persistent grid walks over the rows and adds up its share of dW and dB."""

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from .constants import BackwardHow, Constants, Needs, Norm
from .exchange import Slots
from .inputs import branch_gradient, input_gradient, saved_inputs_of, saved_of, x_hat_of
from .outputs import dy_of, read_biases, weights_of, write_gate_gradient, write_output_again
from .statistics import Dots, Order, no_dots, order_of_dots
from .tiles import Cut, Tile, gather_numbers, gather_tiles, load_tiles, write


@dataclass(frozen=True)
class Arrays:
    """X, GATE, DSUM (rows, N) or (tokens, HEADS, N), and so DROPOUT_MASK, of bytes; DY a tuple of
    TERMS such arrays; LAYER_SCALE (N,); W and B (N,) or (HEADS, N); MEAN and RSTD (rows,) float32;
    DX, DRESIDUAL, DGATE, Y (rows, N); SLOTS (rows, n) int32.

    X is the sum where a residual was added. PARTIALS (outputs · blocks, N) float32: block b writes
    its part of dW to row b, and its part of dB to a row behind all rows of dW. With HEADS, PARTIALS
    is (outputs · n, HEADS · N), and a group of blocks, one for each part of the heads, writes one
    row. An array that a constant excludes is an empty tuple.
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
    Y: Any
    PARTIALS: Any
    SLOTS: Any
    DROPOUT_MASK: Any = ()
    LAYER_SCALE: Any = ()


@dataclass(frozen=True)
class Pass:
    """A backward pass: its arrays, its constants, and the order of its sums.

    DOTS: arrays (rows,) of the means of g · x̂ and, for LAYER, of g, where somebody else has added
    up the rows (split_backward.py); else ().
    """

    a: Arrays
    norm: Norm
    cut: Cut
    how: BackwardHow
    needs: Needs
    rows: Any
    order: Order
    DOTS: tuple

    @property
    def GATES(self):
        """Whether the gradient of a gate after the norm is written."""
        return self.needs.DGATE and self.norm.GATE_AFTER

    @property
    def THROUGH(self):
        """Whether a gradient goes through the norm, so that the dot products are needed."""
        needs = self.needs
        return needs.DX or needs.DRESIDUAL or (needs.DGATE and self.norm.GATE_FIRST)

    def tile(self, i, chunk):
        return self.cut.tile(self.a.X, i, chunk, self.rows)

    def inputs(self):
        """The arrays that are read by rows, and those with one number a row."""
        inputs, numbers = saved_inputs_of(self.a, self.norm, self.needs)
        dots = self.DOTS if self.THROUGH else ()
        return inputs, numbers[:1] + dots + numbers[1:]

    def weights(self, home):
        """The weights that a block needs; home: see Weights."""
        again = self.how.REREAD or not (self.THROUGH or self.GATES or self.needs.OUTPUT)
        return weights_of(self.a, self.norm, home, again)

    def gather(self, i, chunk):
        """The tiles and the numbers of tile i, by gathers."""
        inputs, numbers = self.inputs()
        tile = self.tile(i, chunk)
        return gather_tiles(inputs, self.cut, tile), gather_numbers(numbers, tile)

    def load(self, i):
        """The same by tile loads."""
        inputs, numbers = self.inputs()
        tiles = load_tiles(inputs, self.cut, i)
        return tiles, gather_numbers(numbers, self.tile(i, 0))

    def whole(self, i, b, chunk, dots):
        """The dot products of a row from those of its chunks, which blocks share."""
        LAYER, cut, how = self.norm.LAYER, self.cut, self.how

        def missing(other):
            row = saved_of(self.norm, self.needs, *self.gather(i, other))
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
    HOW: Constants[BackwardHow],
    NEEDS: Constants[Needs],
):
    """dx = rstd · (g − x̂ · mean(g · x̂) − mean(g)), g = dy · (w + offset), x̂ = (x − mean) · rstd.

    mean and mean(g) are 0 unless NORM.LAYER. The sums over rows are dW = Σ dy · x̂ and dB = Σ dy.
    dy is the sum of the arrays DY. OUTPUT: y = x̂ · (w + offset) + b is written once more.
    DSUM: dx grows by dsum; it is both the gradient of the input and that of the residual, each in
    its own dtype. GATED: dy is dy · act(gate) throughout, and dgate = dy · ŷ · act'(gate) with
    ŷ = x̂ · (w + offset) + b; if GATE_FIRST, x is x · act(gate) throughout, dgate = dx · x ·
    act'(gate), and then dx is dx · act(gate). BRANCHES: dx is the gradient of x, dresidual that of
    the sum.

    Block b takes tile b, and then every tile that is a multiple of the grid's size further on. With
    CHUNKS, each group of CHUNKS blocks shares its rows and counts as one block.
    """
    a, norm, cut, how = Arrays(*ARRAYS), Norm(*NORM), Cut(*CUT), BackwardHow(*HOW)
    order = order_of_dots(a.X, cut, rows, copied(norm, cut, how))
    walk(Pass(a, norm, cut, how, Needs(*NEEDS), rows, order, ()))


def walk(this):
    """The schedule of a pass: a block's way over its tiles, and its part of the sums over rows."""
    a, norm, cut, how, needs = this.a, this.norm, this.cut, this.how, this.needs
    rows, shared = this.rows, cut.CHUNKS > 1
    b = ct.bid(0) // cut.CHUNKS
    chunk = ct.bid(0) % cut.CHUNKS if shared else 0
    step = ct.num_blocks(0) // cut.CHUNKS
    home = cut.home(a.X, b, chunk)
    weights = this.weights(home)
    biases = read_biases(a, home) if norm.BIAS and this.GATES else ()
    dws = zeros(cut) if needs.DW else ()
    dbs = zeros(cut) if needs.DB else ()
    count = cut.tiles(rows)
    # Gathered rows are read one tile ahead; the compiler itself runs tile loads ahead.
    if not how.TMA:
        ahead = this.gather(b, chunk)
    if how.OVERLAP and shared:
        ct.grid_dependency_control_wait()
    for i in range(b, count, step):
        if how.TMA:
            read = this.load(i)
        else:
            read = ahead
            # Past the end it is the last tile of the same heads once more.
            ahead = this.gather(i + step if i + step < count else i, chunk)
        row = saved_of(norm, needs, *read)
        number = ct.astype(i, ct.float32)
        if this.GATES:
            tile = this.tile(i, chunk)
            write_gate_gradient(a, norm, tile, row, weights, biases, number, how.STORE)
        if needs.OUTPUT:
            tile = this.tile(i, chunk)
            write_output_again(a, norm, tile, row, weights, number, how.STORE)
        pairs, dots, dws, dbs = add_up(this, row, weights, number, dws, dbs)
        if this.THROUGH:
            if len(this.DOTS) > 0:
                dots = Dots(read[1][1], read[1][len(this.DOTS)], 0.0, 0.0)
            elif shared:
                dots = this.whole(i, b, chunk, dots)
            write_gradients(this, this.tile(i, chunk), row, weights, pairs, dots)
    # Made anew: over the loop the masks would take registers.
    home = Tile(home.place, None, chunk, cut.parts(a.X, chunk))
    # The rows of partial sums of one output: a block has one, or a group of blocks shares some.
    partial_rows = step * cut.ROWS // cut.HEADS if cut.HEADS > 0 else step
    if needs.DW:
        write_sums(a, cut, home, dws, 0)
    if needs.DB:
        write_sums(a, cut, home, dbs, partial_rows if needs.DW else 0)


def copied(norm, cut, how):
    """Whether the compiler adds up a row in several copies of the loop's body, in several orders.

    Seen in rms_norm of 5120 and 12288 bfloat16 on an H200: the last row of each block had other
    bits. The two sums of LAYER are one reduction, whose additions the compiler does not reorder.
    """
    return how.TMA and how.STORE and len(cut.WIDTHS) > 1 and not norm.LAYER


def zeros(cut):
    """A float32 tile of zeros for each segment."""
    found = ()
    for width in ct.static_iter(cut.WIDTHS):
        found += (ct.zeros((cut.ROWS, width), dtype=ct.float32),)
    return found


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
        x_hat, dy = x_hat_of(unpacked, norm, order.zero), dy_of(unpacked, norm)
        if this.THROUGH:
            g = weights.times(dy, j, number)
            if norm.WEIGHT and (norm.LAYER or copied(norm, this.cut, this.how)):
                g = order.unfused(g)
            pairs += ((x_hat, g),)
            if len(this.DOTS) == 0:
                dots = dots.plus(x_hat, g, j, this.cut.WIDTHS, order, norm.LAYER)
        if len(dws) > 0:
            new_dws += (dws[j] + dy * x_hat,)
        if len(dbs) > 0:
            new_dbs += (dbs[j] + dy,)
    return pairs, dots, new_dws, new_dbs


def write_gradients(this, tile, row, weights, pairs, dots):
    """Write dx and dresidual, and the gradient of a gate before the norm."""
    a, norm, how, needs = this.a, this.norm, this.how, this.needs
    kept = ()
    COUNT = this.cut.N if len(this.DOTS) == 0 else 1
    for j, saved in ct.static_iter(enumerate(row)):
        at = tile.at(j)
        x_hat, g = pairs[j]
        if how.PACKED:
            again = saved.rematerialized(dots.dot).unpacked()
            x_hat = x_hat_of(again, norm, this.order.zero)
            g = weights.times(dy_of(again, norm), j, dots.dot)
        dx = dots.through_norm(x_hat, g, saved.rstd, COUNT, norm.LAYER)
        dx = input_gradient(a, norm, needs, at, saved, dx, how.STORE)
        mine = branch_gradient(a, norm, tile, j, saved, dx) if norm.BRANCHES else dx
        if not how.REREAD:
            write_dx(a, needs, at, mine, dx, how.STORE)
        elif needs.DX and not needs.DRESIDUAL:
            kept += ((at, mine.astype(a.DX.dtype), ()),)
        else:
            kept += ((at, mine, dx),)
    # Each write has a barrier of the block, so every weight is read again before the first write.
    for at, mine, dx in ct.static_iter(kept):
        write_dx(a, needs, at, mine, dx, how.STORE)


def write_dx(a, needs, at, dx, dresidual, STORE):
    if needs.DX:
        write(a.DX, at, dx, STORE)
    if needs.DRESIDUAL:
        write(a.DRESIDUAL, at, dresidual, STORE)


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
