"""Stage: the epilogue of a normalised row (weight, bias, rounding, gate, quantisation), and its
gradients."""

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from .activation import activated, slope
from .inputs import x_hat_of
from .opaque import depend_on, dependent_zero
from .quantize import row_peak, write_quantized
from .tiles import VECTOR, gather_parameter, write


def scale(w, OFFSET):
    """w + offset, in float32."""
    w = w.astype(ct.float32)
    return w + OFFSET if OFFSET != 0.0 else w


def affine(x_hat, w, b, norm, dtype, SAME):
    """x̂ · w + b, with w in float32. EARLY rounds to dtype before the weight, and, if the weight has
    the SAME dtype, after."""
    y = x_hat
    if norm.EARLY:
        y = y.astype(dtype).astype(ct.float32)
    if norm.WEIGHT:
        y = y * w
        if norm.EARLY and SAME:
            y = y.astype(dtype).astype(ct.float32)
    if norm.BIAS:
        y = y + b
    return y


def read_parameters(a, norm, tile, j):
    """w and b of a segment, None where there is none."""
    cols, mask = tile.segments[j].cols(), tile.segments[j].mask
    w = gather_parameter(a.W, tile, cols, mask) if norm.WEIGHT else None
    b = gather_parameter(a.B, tile, cols, mask) if norm.BIAS else None
    return w, b


@dataclass(frozen=True)
class Parameters:
    """w and b of segments: kept, because they were read with the row, or else read by TOGETHER
    segments when the first of these is needed. number: see read_together."""

    kept: Any = ()
    TOGETHER: int = 1
    number: Any = 0.0


def fetch_parameters(a, norm, tile, tiles, number):
    """The tiles of the inputs, which can be used when w and b are read; and these parameters."""
    parameters = ()
    xs = ()
    for j, x in ct.static_iter(enumerate(tiles[0])):
        w, b = read_parameters(a, norm, tile, j)
        if norm.WEIGHT:
            x = depend_on(x, w, number)
        if norm.BIAS:
            x = depend_on(x, b, number)
        parameters += ((w, b),)
        xs += (x,)
    return (xs,) + tiles[1:], Parameters(parameters, len(parameters))


def read_together(a, norm, tile, first, COUNT, number):
    """w and b of COUNT segments, of which the first can be used when all are read.

    No read passes a store: without this a block would wait for memory once a segment.
    """
    found = ()
    for j in ct.static_iter(range(first, min(first + COUNT, len(tile.segments)))):
        found += (read_parameters(a, norm, tile, j),)
    w, b = found[0]
    for other_w, other_b in ct.static_iter(found[1:]):
        if norm.WEIGHT:
            w = depend_on(w, other_w, number)
        if norm.BIAS and norm.WEIGHT:
            w = depend_on(w, other_b, number)
        elif norm.BIAS:
            b = depend_on(b, other_b, number)
    return ((w, b),) + found[1:]


@dataclass(frozen=True)
class Normalized:
    """Normalised rows: x̂ = centered · rstd, centered by segments; and the row that was read."""

    centered: Any
    rstd: Any
    row: Any


def output_of(a, norm, j, rows, parameters):
    """y of segment j of normalised rows, in its dtype; parameters: its w and b."""
    DTYPE = a.X.dtype if norm.SKIP or not norm.OUTPUT else a.Y.dtype
    w, b = parameters
    w = scale(w, norm.OFFSET) if norm.WEIGHT else None
    b = b.astype(ct.float32) if norm.BIAS else None
    SAME = norm.WEIGHT and a.W.dtype == DTYPE
    y = affine(rows.centered[j] * rows.rstd, w, b, norm, DTYPE, SAME)
    if norm.GATE_AFTER:
        y = y * activated(rows.row.gate[j].astype(ct.float32), norm)
    if norm.SKIP:
        return rows.row.skip[j].astype(ct.float32) + y.astype(DTYPE).astype(ct.float32)
    return y.astype(DTYPE)


def write_output(a, norm, tile, j, rows, parameters, STORE):
    """Write y of segment j of normalised rows, if it is asked for, and return it."""
    at = tile.at(j)
    y = output_of(a, norm, j, rows, parameters)
    if norm.OUTPUT:
        write(a.Y, at, y, STORE)
    return y


def epilogue(a, norm, tile, rows, parameters, whole_peak, STORE):
    """Write y of normalised rows, and q with its scales, whichever are asked for.

    whole_peak: None, or, where blocks share a row, a function of the largest y of this block's
    chunk, which returns that of the row.
    """
    ys = ()
    read = parameters.kept
    for j in ct.static_iter(range(len(tile.segments))):
        if len(parameters.kept) == 0 and j % parameters.TOGETHER == 0:
            read = read_together(a, norm, tile, j, parameters.TOGETHER, parameters.number)
        ys += (write_output(a, norm, tile, j, rows, read[j % parameters.TOGETHER], STORE),)
    if len(norm.QUANT) > 0:
        peak = None
        if norm.PEAKS and whole_peak is not None:
            peak = whole_peak(row_peak(tile, ys))
        write_quantized(a, norm, tile, ys, peak, STORE)


def peak_of(a, norm, tile, rows):
    """The largest magnitude of y of a chunk of one row."""
    ys = ()
    for j in ct.static_iter(range(len(tile.segments))):
        ys += (output_of(a, norm, j, rows, read_parameters(a, norm, tile, j)),)
    return row_peak(tile, ys).item()


@dataclass(frozen=True)
class Weights:
    """w + offset of a chunk, in float32, for the backward pass.

    home: a tile that has the same heads as every tile of the block. kept: the segments, or () where
    a segment is read again whenever it is needed.
    """

    a: Any
    norm: Any
    home: Any
    kept: Any

    def times(self, tile, j, number):
        """The tile times w + offset of segment j. A weight read again waits for `number`."""
        if not self.norm.WEIGHT:
            return tile
        return tile * self.segment(j, number)

    def segment(self, j, number):
        """w + offset of segment j, kept or read again, which then waits for `number`."""
        return self.kept[j] if len(self.kept) > 0 else self.read(j, number)

    def read(self, j, number):
        """Segment j. number: None, or what has to be known before the segment is read."""
        return scale(read_late(self.a.W, self.home, j, number), self.norm.OFFSET)


def read_late(W, home, j, number):
    """Segment j of a weight or bias. number: None, or what has to be known before it is read."""
    segment = home.segments[j]
    cols = segment.cols()
    if number is not None:
        cols = cols + dependent_zero(number, ct.int32) * VECTOR
    return gather_parameter(W, home, cols, segment.mask)


def weights_of(a, norm, home, REREAD):
    """The weights of a block's chunk: read now, or REREAD whenever they are needed."""
    weights = Weights(a, norm, home, ())
    kept = ()
    if norm.WEIGHT and not REREAD:
        for j in ct.static_iter(range(len(home.segments))):
            kept += (weights.read(j, None),)
    return Weights(a, norm, home, kept)


def read_biases(a, home):
    """b of each segment, in float32."""
    found = ()
    for segment in ct.static_iter(home.segments):
        b = gather_parameter(a.B, home, segment.cols(), segment.mask)
        found += (b.astype(ct.float32),)
    return found


def dy_of(saved, norm):
    """dy of an unpacked segment, times act(gate) where the gate comes after the norm."""
    dy = saved.dy
    if norm.GATE_AFTER:
        dy = dy * activated(saved.gate.astype(ct.float32), norm)
    return dy


def write_output_again(a, norm, tile, row, weights, number, STORE):
    """Write y of rows that the backward pass has read, with the bits that write_output gives it.

    The bias is read again for every tile, all of it before the first write (see weights_of).
    """
    SAME = norm.WEIGHT and a.W.dtype == a.Y.dtype
    ys = ()
    for j, saved in ct.static_iter(enumerate(row)):
        w = weights.segment(j, number) if norm.WEIGHT else None
        b = None
        if norm.BIAS:
            b = read_late(a.B, weights.home, j, number).astype(ct.float32)
        y = affine(x_hat_of(saved.unpacked(), norm), w, b, norm, a.Y.dtype, SAME)
        ys += (y.astype(a.Y.dtype),)
    for j, y in ct.static_iter(enumerate(ys)):
        write(a.Y, tile.at(j), y, STORE)


def write_gate_gradient(a, norm, tile, row, weights, biases, number, STORE):
    """The gradient dy · ŷ · act'(gate) of a gate that comes after the norm, ŷ being ungated y."""
    for j, saved in ct.static_iter(enumerate(row)):
        at = tile.at(j)
        y = weights.times(x_hat_of(saved.unpacked(), norm), j, number)
        if norm.BIAS:
            y = y + biases[j]
        dgate = saved.dy.astype(ct.float32) * y
        dgate = dgate * slope(saved.gate.astype(ct.float32), norm)
        write(a.DGATE, at, dgate, STORE)
