"""Stage: the mean, variance and rstd of rows, and the sums of the backward pass, in float32.

The compiler chooses the order in which a thread adds up its elements, by the registers that are
left, unless an Order prescribes it. Either way a compiled kernel always adds in the same order.
"""

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

FOLDED = 256  # the least number of threads of a block, times the two terms that each may have left


@dataclass(frozen=True)
class Order:
    """The order in which a block adds up a row.

    UNIT: how many elements a thread reads at once, or 0 where the compiler chooses the order. zero:
    an opaque zero, or None where the compiler may fuse a product with an addition as it likes.
    """

    UNIT: int
    zero: Any

    def unfused(self, product):
        """The first of several products that are added up.

        The compiler fuses one of two products with their addition, not the same one in all kernels.
        It has no choice between a product and a sum, and product + opaque zero is a sum.
        """
        return product if self.zero is None else product + self.zero

    def folded(self, x):
        """A tile with the same sums by rows, of at most FOLDED columns.

        Adds the UNIT elements that a thread reads at once by halves, then vectors by halves, until
        a thread has at most two. The compiler's own order, by halves or in a chain, would depend on
        the registers that are left.
        """
        if self.UNIT > 0:
            R, W = x.shape
            vectors = W // self.UNIT
            x = x.reshape((R, vectors, self.UNIT))
            for _ in ct.static_iter(range(self.UNIT.bit_length() - 1)):
                x = halves(x)
            x = x.reshape((R, 1, vectors))
            for _ in ct.static_iter(range((vectors // FOLDED).bit_length() - 1)):
                x = halves(x)
            x = x.reshape((R, min(vectors, FOLDED)))
        return x

    def row_sum(self, xs):
        """The sum of segments by rows.

        Segments of one width are added up first, so that the block has one reduction, which is one
        barrier, for each width.
        """
        total = 0.0
        added = xs[0]
        for x in ct.static_iter(xs[1:]):
            if x.shape[1] == added.shape[1]:
                added = added + x
            else:
                total = total + ct.sum(self.folded(added), axis=1, keepdims=True)
                added = x
        return total + ct.sum(self.folded(added), axis=1, keepdims=True)

    def mean_square(self, xs, count):
        """The mean of the squares of segments, by rows."""
        squares = ()
        width = 0
        for x in ct.static_iter(xs):
            squares += (x * x if x.shape[1] == width else self.unfused(x * x),)
            width = x.shape[1]
        return self.row_sum(squares) * (1.0 / count)


def unit(X, ALIGNED):
    """How many elements of a row of X a thread reads at once."""
    return ct.static_eval(128 // X.dtype.bitwidth if ALIGNED else 1)


@dataclass(frozen=True)
class Moments:
    """centered: the segments of x − mean. The mean is the sum of two float32 numbers, mean and
    correction: what rounding left of it."""

    centered: Any
    mean: Any
    correction: Any
    variance: Any


def moments(row, masks, count, order, LAYER, EXACT):
    """The moments of a row, or of a chunk of `count` elements of it.

    row: what is normalised (inputs.Row). EXACT: the correction is found; where every input has 16
    bits no digit would show it. The variance is that of centered values, so that a mean far larger
    than the standard deviation costs no accuracy.
    """
    xs = row.values()
    if not LAYER:
        return Moments(xs, 0.0, 0.0, order.mean_square(xs, count))
    mean = order.row_sum(xs) * (1.0 / count)
    if row.PACKED:
        xs = row.rematerialized(mean)
    xs = subtract_mean(xs, masks, mean)
    if not EXACT:
        return Moments(xs, mean, 0.0, order.mean_square(xs, count))
    correction, square = correct_mean(xs, count, order)
    centered = ()
    for x in ct.static_iter(xs):
        centered += (x - correction,)
    return Moments(centered, mean, correction, square - correction * correction)


def recentered(row, found, number, LAYER):
    """The segments of x − mean once more, from the row itself, after `number` is known."""
    xs = row.rematerialized(number)
    centered = ()
    for x in ct.static_iter(xs):
        centered += ((x - found.mean) - found.correction,) if LAYER else (x,)
    return centered


def subtract_mean(xs, masks, mean):
    """The segments of x − mean, zero outside the masks."""
    found = ()
    for j, mask in ct.static_iter(enumerate(masks)):
        x = xs[j] - mean
        found += (x if mask is None else ct.where(mask, x, 0.0),)
    return found


def correct_mean(xs, count, order):
    """The mean of segments that are centered nearly, and the mean of their squares.

    The mean of x is rounded to float32, and adding up x to find it rounds more. That error is
    measured on the differences, so that in float32, too, a mean a thousand times the standard
    deviation costs no accuracy.
    """
    total = 0.0
    squares = 0.0
    for x in ct.static_iter(xs):
        more, more_squares = two_sums(order.folded(x), order.folded(order.unfused(x * x)))
        total = total + more
        squares = squares + more_squares
    return total * (1.0 / count), squares * (1.0 / count)


def halves(x):
    """The first half of the last dimension and the second, added."""
    R, M, L = x.shape
    return ct.extract(x, (0, 0, 0), (R, M, L // 2)) + ct.extract(x, (0, 0, 1), (R, M, L // 2))


def add_both(a, b, c, d):
    return a + c, b + d


def two_sums(x, y):
    """Σ x and Σ y by rows, in one reduction, which is one barrier of the block."""
    return ct.reduce((x, y), 1, add_both, (0.0, 0.0), keepdims=True)


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
        width = ct.static_eval(WIDTHS[j])
        dot, total = self.dot, self.total
        if ct.static_eval(width in WIDTHS[:j]):
            products = self.products + x_hat * g
            gs = self.gs + g
        else:
            products = order.unfused(x_hat * g)
            gs = g
        if ct.static_eval(width not in WIDTHS[j + 1 :]):
            if LAYER:
                more, more_total = two_sums(order.folded(products), order.folded(gs))
                total = total + more_total
            else:
                more = ct.sum(order.folded(products), axis=1, keepdims=True)
            dot = dot + more
        return Dots(dot, total, products, gs)

    def through_norm(self, x_hat, g, rstd, N, LAYER):
        """dx of a segment: rstd · (g − x̂ · mean(g · x̂) − mean(g)), mean(g) for LAYER alone."""
        dx = g - x_hat * (self.dot * (1.0 / N))
        if LAYER:
            dx = dx - self.total * (1.0 / N)
        return dx * rstd

    def numbers(self, LAYER):
        """What a chunk publishes: Σ g · x̂, and Σ g for LAYER."""
        return (self.dot.item(), self.total.item()) if LAYER else (self.dot.item(),)


def no_dots(ROWS):
    dot = ct.zeros((ROWS, 1), dtype=ct.float32)
    total = ct.zeros((ROWS, 1), dtype=ct.float32)
    return Dots(dot, total, 0.0, 0.0)
