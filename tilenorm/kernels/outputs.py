"""Stage: what is done to a normalised row, and its gradients.

That is the weight, the bias, a modulation, a gate, what is added to the row, roundings and the
quantisation.
"""

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from .activation import activated, slope
from .arrays import given
from .constants import Quant
from .inputs import x_hat_of
from .modulation import modulated
from .opaque import depend_on, dependent_zero
from .quantize import row_peak, write_quantized
from .statistics import recentered
from .tiles import VECTOR, gather_parameter, joined, write


def scale(w, OFFSET):
    """w + offset, in float32."""
    w = w.astype(ct.float32)
    return w + OFFSET if OFFSET != 0.0 else w


def affine(this, x_hat, w, b, dtype, OUT):
    """x̂ · w + b, with w in float32.

    EARLY rounds x̂ to `dtype` before the weight multiplies it. It also rounds the product where the
    weight and the output, whose dtype is OUT, have that dtype.
    """
    y = x_hat
    if this.norm.EARLY:
        y = y.astype(dtype).astype(ct.float32)
    if given(this.a.W):
        y = y * w
        if this.norm.EARLY and this.a.W.dtype == dtype and dtype == OUT:
            y = y.astype(dtype).astype(ct.float32)
    if given(this.a.B):
        y = y + b
    return y


def read_parameters(this, tile, j):
    """w and b of a segment, None where there is none."""
    a, cols, mask = this.a, columns_of(tile, j, this.how.BY_ROWS), tile.segments[j].mask
    w = gather_parameter(a.W, tile, cols, mask) if given(a.W) else None
    b = gather_parameter(a.B, tile, cols, mask) if given(a.B) else None
    return w, b


def columns_of(tile, j, BY_ROWS):
    """The columns of a segment, with BY_ROWS as often as the tile has rows.

    Each thread then reads the parameters of its own elements. Those of (1, columns) pass through
    shared memory, with a barrier for each segment, which takes a small batch longer. It takes a
    large one less time than reading them for each row.
    """
    cols = tile.segments[j].cols()
    # The number of a row is never negative: the columns do not change.
    return cols + (tile.place[0] >> 31) * VECTOR if BY_ROWS else cols


def fetch_parameters(this, tile, tiles):
    """The tiles of the inputs, and w and b of each segment.

    The compiler can use these tiles only after it has read w and b.
    """
    kept = ()
    xs = ()
    for j, x in ct.static_iter(enumerate(tiles[0])):
        w, b = read_parameters(this, tile, j)
        if given(this.a.W):
            x = depend_on(x, w, this.eps)
        if given(this.a.B):
            x = depend_on(x, b, this.eps)
        kept += ((w, b),)
        xs += (x,)
    return (xs,) + tiles[1:], kept


def read_together(this, tile, first):
    """w and b of TOGETHER segments. The first can be used only after all of them are read.

    The compiler moves no read before a store. Without this a block would wait for memory once for
    each segment.
    """
    a, number = this.a, this.eps
    parameters = ()
    for j in ct.static_iter(range(first, min(first + this.how.TOGETHER, len(tile.segments)))):
        parameters += (read_parameters(this, tile, j),)
    w, b = parameters[0]
    for other_w, other_b in ct.static_iter(parameters[1:]):
        if given(a.W):
            w = depend_on(w, other_w, number)
        if given(a.B) and given(a.W):
            w = depend_on(w, other_b, number)
        elif given(a.B):
            b = depend_on(b, other_b, number)
    return ((w, b),) + parameters[1:]


@dataclass(frozen=True)
class Normalized:
    """Normalised rows: x̂ = centered · rstd."""

    row: Any  # what was read
    moments: Any
    rstd: Any
    centered: Any  # the segments of x − mean


def normalized(this, row, moments, rstd):
    """The rows, normalised by these moments."""
    kept = len(moments.centered) > 0
    centered = moments.centered if kept else recentered(row, moments, rstd, this.norm.LAYER)
    return Normalized(row, moments, rstd, centered)


def output_of(this, j, rows, parameters):
    """y of segment j of normalised rows, in the dtype of y, or in float32 where there is a skip.

    parameters: w and b of the segment.
    """
    a, norm = this.a, this.norm
    dtype = a.X.dtype if given(a.SKIP) or not given(a.Y) else a.Y.dtype
    w, b = parameters
    w = scale(w, norm.OFFSET) if given(a.W) else None
    b = b.astype(ct.float32) if given(a.B) else None
    y = affine(this, rows.centered[j] * rows.rstd, w, b, a.X.dtype, dtype)
    if given(a.MOD_SCALE):
        y = modulated(y, rows.row.modulation[j])
    if given(a.GATE) and not norm.GATE_FIRST:
        y = y * activated(rows.row.gate[j].astype(ct.float32), norm)
    if given(a.SKIP):
        if dtype == ct.float32 and (given(a.GATE) or not given(a.B)):
            # y is a product, which the compiler would fuse with the addition, and not round before.
            y = y + this.order.zero
        return rows.row.skip[j].astype(ct.float32) + y.astype(dtype).astype(ct.float32)
    return y.astype(dtype)


def outputs_of(this, tile, rows):
    """y of each segment of normalised rows, in its dtype."""
    ys = ()
    for j in ct.static_iter(range(len(tile.segments))):
        y = output_of(this, j, rows, read_parameters(this, tile, j))
        ys += (y.astype(this.a.Y.dtype) if given(this.a.SKIP) else y,)
    return ys


def write_outputs(this, tile, rows, kept, shared):
    """Write what is asked for of normalised rows: y, and q with its scales.

    kept: w and b of each segment if they were read with the row, else (). shared: None, or the
    SharedRow whose chunk the tile is.
    """
    ys = ()
    read = kept
    together = max(len(kept), this.how.TOGETHER)
    for j in ct.static_iter(range(len(tile.segments))):
        if len(kept) == 0 and j % together == 0:
            read = read_together(this, tile, j)
        at = tile.at(j)
        y = output_of(this, j, rows, read[j % together])
        if given(this.a.Y):
            write(this.a.Y, at, y, this.how.STORE)
        ys += (y,)
    if given(this.a.Q):
        write_quantized(this, tile, ys, whole_peak(this, tile, rows, ys, shared))


def whole_peak(this, tile, rows, ys, shared):
    """The largest magnitude of y in a row that blocks share and that has one scale; else None."""

    def missing(its_tile, row):
        """That of a chunk whose block has not published it."""
        others = normalized(this, row, rows.moments, rows.rstd)
        return row_peak(its_tile, outputs_of(this, its_tile, others))

    peak = None
    if shared is not None and Quant(*this.norm.QUANT).BY_ROW:
        peak = shared.largest(row_peak(tile, ys), missing)
    return peak  # a second return would compile to other machine code


@dataclass(frozen=True)
class Weights:
    """w + offset of a chunk, in float32, for the backward pass."""

    a: Any
    norm: Any
    home: Any  # a tile with the heads that every tile of the block has
    kept: Any  # the segments; () where a segment is read again whenever it is needed
    PART: float  # which part of a segment is read at once, see part_of_weights

    def times(self, tile, j, number):
        """The tile times w + offset of segment j. `number`: see segment."""
        if not given(self.a.W):
            return tile
        return tile * self.segment(j, number)

    def segment(self, j, number):
        """w + offset of segment j. Where it is read again, that happens after `number` is known."""
        return self.kept[j] if len(self.kept) > 0 else self.read(j, number)

    def read(self, j, number):
        """Segment j, which is read after `number` is known; at once where that is None."""
        return scale(read_late(self.a.W, self.home, j, number, self.PART), self.norm.OFFSET)


def read_late(W, home, j, number, PART=1.0):
    """Segment j of a weight or bias, which is read after `number` is known; at once if None.

    PART: it is read in tiles of this part of its width, which are then joined.
    """
    segment = home.segments[j]
    cols, mask = segment.cols(), segment.mask
    if number is not None:
        cols = cols + dependent_zero(number, ct.int32) * VECTOR
    if PART == 1.0:
        return gather_parameter(W, home, cols, mask)
    return gather_in_parts(W, home, cols, mask, ct.static_eval(int(segment.WIDTH * PART)))


def gather_in_parts(W, home, cols, mask, WIDTH):
    """The same columns of a weight, read in tiles of WIDTH of them, which are then joined."""
    count = ct.static_eval(cols.shape[1] // WIDTH)
    tiles = ()
    for i in ct.static_iter(range(count)):
        inside = None if mask is None else ct.extract(mask, (0, i), (1, WIDTH))
        tiles += (gather_parameter(W, home, ct.extract(cols, (0, i), (1, WIDTH)), inside),)
    return joined(tiles)


def part_of_weights(a, cut, how):
    """Which part of a segment of the weights is read at once where the order of sums is prescribed.

    Which threads have which elements of a row decides in which order they add it up. The compiler
    lays out all tiles as it reads the largest of them, in bytes; of two equal ones, the first. With
    float32 weights that was the weights' way, where a tile of bfloat16 has one row or two: rows
    passed through shared memory, and those of two were added up in another order than with bfloat16
    weights (81 of 16.8 million elements of dx had other bits, rows of 896 on an H200). So a part
    has fewer bytes than a segment of x. Rows that are read by tile loads pass through shared memory
    anyway, and so do their products before they are added up.
    """
    if not given(a.W) or how.THREADS == 0 or how.TMA:
        return 1.0
    return ct.static_eval(part_of(a.W.dtype.bitwidth, a.X.dtype.bitwidth, cut, how.THREADS))


def part_of(weight_bits, bits, cut, threads):
    """The same, by the bits of an element of the weights and of x. threads: those of a block."""
    weight_rows = cut.ROWS if cut.HEADS > 0 else 1
    read, weights_read = (
        [max(1, min(128 // size, rows * width // threads)) for width in cut.WIDTHS]
        for size, rows in ((bits, cut.ROWS), (weight_bits, weight_rows))
    )
    if read == weights_read:  # a thread has the same elements of both
        return 1.0
    return min(1.0, cut.ROWS * bits / (weight_rows * weight_bits) / 2)


def weights_of(a, norm, home, REREAD, PART):
    """The weights of a block's chunk: read now, or, with REREAD, whenever they are needed. PART:
    see part_of_weights.
    """
    weights = Weights(a, norm, home, (), PART)
    kept = ()
    if given(a.W) and not REREAD:
        for j in ct.static_iter(range(len(home.segments))):
            kept += (weights.read(j, None),)
    return Weights(a, norm, home, kept, PART)


def read_biases(a, home):
    """b of each segment, in float32."""
    biases = ()
    for j in ct.static_iter(range(len(home.segments))):
        biases += (read_late(a.B, home, j, None).astype(ct.float32),)
    return biases


def dy_of(this, saved):
    """dy of an unpacked segment, times act(gate) where the gate comes after the norm."""
    dy = saved.dy
    if given(this.a.GATE) and not this.norm.GATE_FIRST:
        dy = dy * activated(saved.gate.astype(ct.float32), this.norm)
    return dy


def write_output_again(this, tile, row, weights, number):
    """Write y of rows that the backward pass has read. It has the bits that write_outputs gives it.

    The bias is read again for every tile. All of it is read before the first write.
    """
    a, dtype = this.a, this.a.Y.dtype
    ys = ()
    for j, saved in ct.static_iter(enumerate(row)):
        w = weights.segment(j, number) if given(a.W) else None
        b = None
        if given(a.B):
            b = read_late(a.B, weights.home, j, number).astype(ct.float32)
        y = affine(this, x_hat_of(saved.unpacked(), this.norm), w, b, dtype, dtype)
        ys += (y.astype(dtype),)
    for j, y in ct.static_iter(enumerate(ys)):
        write(a.Y, tile.at(j), y, this.how.STORE)


def write_gate_gradient(this, tile, row, weights, biases, number):
    """Write dy · ŷ · act'(gate), the gradient of a gate after the norm. ŷ: y without the gate."""
    for j, saved in ct.static_iter(enumerate(row)):
        at = tile.at(j)
        y = weights.times(x_hat_of(saved.unpacked(), this.norm), j, number)
        if given(this.a.B):
            y = y + biases[j]
        dgate = saved.dy.astype(ct.float32) * y
        dgate = dgate * slope(saved.gate.astype(ct.float32), this.norm)
        write(this.a.DGATE, at, dgate, this.how.STORE)
