"""Stage: the mean, variance and rstd of rows, and the sums of the backward pass, in float32.

The compiler chooses the order in which a thread adds up its elements of a row, by the registers
that are left, unless an Order prescribes it. It chooses anew for each row of a tile, so that rows
of one tile could have different last bits.

An Order prescribes the bits of a row for every op, so that add_rms_norm(x, r) has those of
rms_norm(x + r). launch/order.py says which rows have one, and what decides it.
"""

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from .arrays import given
from .opaque import opaque_zero

FOLDED = 256  # the least number of threads of a block, times the two terms that each may have left


@dataclass(frozen=True)
class Order:
    """The order in which a block adds up a row.

    zero: an opaque zero. UNIT: the most elements that a thread reads at once, or 0 where tiles are
    not folded. THREADS: those of a block, where the slices that they read at once are added up
    first, or 0. SETTLED: the compiler has no choice which product it fuses with an addition. FUSED:
    see `total`.
    """

    zero: Any
    UNIT: int = 0
    THREADS: int = 0
    SETTLED: bool = False
    FUSED: bool = False

    def unfused(self, product):
        """The first of several products that are added up.

        The compiler fuses one of two products with their addition, not the same one in all kernels.
        It has no choice between a product and a sum, and product + opaque zero is a sum.
        """
        return product + self.zero if self.SETTLED else product

    def slices(self, xs):
        """The segments of a row, cut into slices of what the THREADS read at once.

        Slices are added up from left to right, so that a row has the same bits whether it is one
        wide segment or several. By halves a thread would hold all slices (layer_norm of 24576 took
        1.37 times as long on an H200).
        """
        parts = ()
        for x in ct.static_iter(xs):
            R, W = x.shape
            SLICE = self.UNIT * self.THREADS
            if SLICE > 0 and W > SLICE:
                for i in ct.static_iter(range(W // SLICE)):
                    parts += (ct.extract(x, (0, i), (R, SLICE)),)
            else:
                parts += (x,)
        return parts

    def folded(self, x):
        """A tile with the same sums by rows, of at most FOLDED columns.

        The UNIT elements that a thread reads at once are added by halves, and vectors by halves,
        until a thread has at most two. The compiler's own order would depend on the registers that
        are left.
        """
        if self.UNIT > 0:
            R, W = x.shape
            UNIT = min(self.UNIT, W)
            if self.THREADS > 0:
                UNIT = max(1, min(UNIT, R * W // self.THREADS))
            vectors = W // UNIT
            x = x.reshape((R, vectors, UNIT))
            for _ in ct.static_iter(range(UNIT.bit_length() - 1)):
                x = halves(x)
            x = x.reshape((R, 1, vectors))
            for _ in ct.static_iter(range((vectors // FOLDED).bit_length() - 1)):
                x = halves(x)
            x = x.reshape((R, min(vectors, FOLDED)))
        return x

    def total(self, x):
        """Σ x by rows.

        FUSED: the additions are fused multiply-adds, 1 · x + y. Those the compiler does not
        reorder, and it emits plain additions for them. So every row of a tile is added up alike.
        """
        if self.FUSED:
            return ct.reduce(x, 1, fused_add, 0.0, keepdims=True)
        return ct.sum(self.folded(x), axis=1, keepdims=True)

    def totals(self, x, y):
        """Σ x and Σ y by rows, in one reduction, which is one barrier of the block."""
        return two_sums(self.folded(x), self.folded(y), fused_add_both if self.FUSED else add_both)

    def row_sum(self, xs):
        """The sum of slices by rows.

        Slices of one width are added up first, so that the block has one reduction, which is one
        barrier, for each width.
        """
        total = 0.0
        added = xs[0]
        for x in ct.static_iter(xs[1:]):
            if x.shape[1] == added.shape[1]:
                added = added + x
            else:
                total = total + self.total(added)
                added = x
        return total + self.total(added)

    def mean(self, xs, count, REST):
        """The mean of segments, by rows. REST: see Cut.rest, or 0.

        Without REST the mean of equal numbers would be another number.
        """
        total = self.row_sum(self.slices(xs))
        mean = total * (1.0 / count)
        if ct.static_eval(isinstance(REST, float) and REST == 0.0):
            return mean
        # Two products would be added: the compiler could fuse either of them, were there no zero.
        return (mean + self.zero) + total * REST

    def mean_square(self, xs, count):
        """The mean of the squares of segments, by rows."""
        squares = ()
        width = 0
        slices = self.slices(xs)  # static_iter takes no call of a tile function
        for x in ct.static_iter(slices):
            squares += (x * x if x.shape[1] == width else self.unfused(x * x),)
            width = x.shape[1]
        return self.row_sum(squares) * (1.0 / count)


def order_of(a, cut, count, THREADS):
    """The order of the sums over a row in a forward pass. count: a number that is never negative.
    THREADS: those of a block, or 0 where the order is not prescribed. Blocks that share a row
    always have one.

    Elsewhere a tile of several rows has fused additions.
    """
    if cut.CHUNKS == 1 and THREADS == 0:
        return Order(opaque_zero(count), FUSED=cut.ROWS > 1)
    whole = THREADS if cut.ALIGNED else 0
    X = a.SUM if given(a.SUM) else a.X
    return Order(opaque_zero(count), UNIT=unit(X, cut), THREADS=whole, SETTLED=True)


def order_of_dots(X, cut, count, COPIES, THREADS):
    """The order of the sums of the backward pass. THREADS: as in order_of.

    COPIES: rows that the compiler adds up in several copies of the code (backward.copied). Without
    THREADS, tiles of several rows of one segment are folded: fused additions would spill up to 112
    bytes (gated_rms_norm of 256 bfloat16, sm_90). With more segments, folding has up to 6 barriers
    more.
    """
    if THREADS > 0:
        return Order(opaque_zero(count), UNIT=unit(X, cut), THREADS=THREADS, SETTLED=True)
    if COPIES or cut.CHUNKS > 1:
        return Order(opaque_zero(count), UNIT=unit(X, cut), SETTLED=True)
    if cut.ROWS > 1 and len(cut.WIDTHS) == 1:
        return Order(opaque_zero(count), UNIT=unit(X, cut))
    return Order(opaque_zero(count), FUSED=cut.ROWS > 1)


def unit(X, cut):
    """How many elements of a row of X a thread reads at once."""
    return ct.static_eval(128 // X.dtype.bitwidth if cut.ALIGNED else 1)


@dataclass(frozen=True)
class Moments:
    """centered: the segments of x − mean, or () where `recentered` has to make them anew. The mean
    is the sum of two float32 numbers, mean and correction: what rounding left of it."""

    centered: Any
    mean: Any
    correction: Any
    variance: Any


def moments(this, tile, row, count, EXACT):
    """The moments of the chunk of a row that a tile has, of which `count` elements exist.

    row: what is normalised (inputs.Row). EXACT: the correction is found; where every input has 16
    bits no digit would show it. The variance is that of centered values, so that a mean far larger
    than the standard deviation costs no accuracy.
    """
    order, rest = this.order, this.cut.rest(tile.chunk)
    xs = row.values()
    if not this.norm.LAYER:
        return Moments(() if row.PACKED else xs, 0.0, 0.0, order.mean_square(xs, count))
    mean = order.mean(xs, count, 0.0 if EXACT else rest)
    if row.PACKED:
        xs = row.rematerialized(mean)
    xs = subtract_mean(xs, tile.masks(), mean)
    if not EXACT:
        return Moments(() if row.PACKED else xs, mean, 0.0, order.mean_square(xs, count))
    correction, square = correct_mean(xs, count, order)
    centered = ()
    for x in ct.static_iter(xs):
        centered += (x - correction,)
    # The compiler fuses a product of this difference. Equal numbers are all as far from the rounded
    # mean: what is left for them has either sign, and is more than eps where they are large.
    variance = ct.maximum(square - correction * correction, 0.0, propagate_nan=True)
    return Moments(() if row.PACKED else centered, mean, correction, variance)


def recentered(row, moments, number, LAYER):
    """The segments of x − mean once more, from the row itself, after `number` is known."""
    xs = row.rematerialized(number)
    centered = ()
    for x in ct.static_iter(xs):
        centered += ((x - moments.mean) - moments.correction,) if LAYER else (x,)
    return centered


def subtract_mean(xs, masks, mean):
    """The segments of x − mean, zero outside the masks."""
    tiles = ()
    for j, mask in ct.static_iter(enumerate(masks)):
        x = xs[j] - mean
        tiles += (x if mask is None else ct.where(mask, x, 0.0),)
    return tiles


def correct_mean(xs, count, order):
    """The mean of segments that are centered nearly, and the mean of their squares.

    The mean of x is rounded to float32, and adding up x to find it rounds more. That error is
    measured on the differences, so that in float32, too, a mean a thousand times the standard
    deviation costs no accuracy.
    """
    total = 0.0
    squares = 0.0
    slices = order.slices(xs)
    added = slices[0]
    added_squares = order.unfused(added * added)
    for x in ct.static_iter(slices[1:]):
        if x.shape[1] == added.shape[1]:
            added = added + x
            added_squares = added_squares + x * x
        else:
            part, part_squares = order.totals(added, added_squares)
            total = total + part
            squares = squares + part_squares
            added = x
            added_squares = order.unfused(x * x)
    part, part_squares = order.totals(added, added_squares)
    # The sum with 0.0 is no bare product: `mean + correction` would be a sum of two products, of
    # which the compiler fuses one in some kernels and the other in others.
    return (total + part) * (1.0 / count) + 0.0, (squares + part_squares) * (1.0 / count)


def halves(x):
    """The first half of the last dimension and the second, added."""
    R, M, L = x.shape
    return ct.extract(x, (0, 0, 0), (R, M, L // 2)) + ct.extract(x, (0, 0, 1), (R, M, L // 2))


def fused_add(a, b):
    return a * 1.0 + b


def fused_add_both(a, b, c, d):
    return a * 1.0 + c, b * 1.0 + d


def add_both(a, b, c, d):
    return a + c, b + d


def two_sums(x, y, add):
    """Σ x and Σ y by rows, in one reduction."""
    return ct.reduce((x, y), 1, add, (0.0, 0.0), keepdims=True)


@dataclass(frozen=True)
class Dots:
    """Σ g · x̂ and Σ g by rows so far, each (ROWS, 1).

    products, gs: g · x̂ and g of the segments of one width, which are added up before one reduction
    sums them.
    """

    dot: Any
    total: Any
    products: Any
    gs: Any

    def plus(self, x_hat, g, j, WIDTHS, order, LAYER):
        """The same with segment j of the widths."""
        every = ct.static_eval(slice_widths(WIDTHS, order.UNIT * order.THREADS))
        first = ct.static_eval(len(slice_widths(WIDTHS[:j], order.UNIT * order.THREADS)))
        dot, total, products, gs = self.dot, self.total, self.products, self.gs
        g_slices = order.slices((g,))
        x_slices = order.slices((x_hat,))  # static_iter takes no call of a tile function
        for i, x in ct.static_iter(enumerate(x_slices)):
            width = ct.static_eval(every[first + i])
            if ct.static_eval(width in every[: first + i]):
                products = products + x * g_slices[i]
                gs = gs + g_slices[i]
            else:
                products = order.unfused(x * g_slices[i])
                gs = g_slices[i]
            if ct.static_eval(width not in every[first + i + 1 :]):
                if LAYER:
                    part, part_total = order.totals(products, gs)
                    total = total + part_total
                else:
                    part = order.total(products)
                dot = dot + part
        return Dots(dot, total, products, gs)

    def through_norm(self, x_hat, g, rstd, N, LAYER, order):
        """dx of a segment: rstd · (g − x̂ · mean(g · x̂) − mean(g)), mean(g) for LAYER alone."""
        dx = g - x_hat * (self.dot * (1.0 / N))
        if LAYER:
            mean = self.total * (1.0 / N)
            dx = dx - (order.unfused(mean) if order.THREADS > 0 else mean)
        return dx * rstd

    def numbers(self, LAYER):
        """What a chunk publishes: Σ g · x̂, and Σ g for LAYER."""
        return (self.dot.item(), self.total.item()) if LAYER else (self.dot.item(),)


def slice_widths(widths, width):
    """The widths of the slices of segments (Order.slices). width: of a slice, or 0."""
    slices = ()
    for segment in widths:
        cut = min(segment, width) if width else segment
        slices += (cut,) * (segment // cut)
    return slices


def no_dots(ROWS):
    dot = ct.zeros((ROWS, 1), dtype=ct.float32)
    total = ct.zeros((ROWS, 1), dtype=ct.float32)
    return Dots(dot, total, 0.0, 0.0)
