"""The formulas that kernels share, on float32 tiles."""

import cuda.tile as ct


def sigmoid(z):
    return ct.truediv(1.0, 1.0 + ct.exp(-z), rounding_mode=ct.RoundingMode.FULL)


def silu(z):
    """z · σ(z)."""
    return ct.truediv(z, 1.0 + ct.exp(-z), rounding_mode=ct.RoundingMode.FULL)


def silu_slope(z):
    """silu'(z) = σ(z) · (1 + z · (1 − σ(z)))."""
    s = sigmoid(z)
    return s * (1.0 + z * (1.0 - s))


def add_both(a, b, c, d):
    return a + c, b + d


def sums(x, y):
    """Σ x and Σ y by rows, in one reduction: a block waits for itself once."""
    return ct.reduce((x, y), 1, add_both, (0.0, 0.0), keepdims=True)


def row_sum(xs):
    """The sum of segments by rows. Those of one width are added up first: a block waits once."""
    total = 0.0
    added = xs[0]
    for x in ct.static_iter(xs[1:]):
        if x.shape[1] == added.shape[1]:
            added = added + x
        else:
            total = total + ct.sum(added, axis=1, keepdims=True)
            added = x
    return total + ct.sum(added, axis=1, keepdims=True)


def mean_of(xs, N):
    """The mean of segments, by rows."""
    return row_sum(xs) * (1.0 / N)


def mean_square(xs, N):
    squares = ()
    for x in ct.static_iter(xs):
        squares += (x * x,)
    return row_sum(squares) * (1.0 / N)


def centered(xs, masks, mean):
    """The segments of x − mean, zero outside the masks."""
    near = ()
    for j, mask in ct.static_iter(enumerate(masks)):
        x = xs[j] - mean
        near += (x if mask is None else ct.where(mask, x, 0.0),)
    return near


def recentered(xs, N):
    """Segments whose mean is nearly 0 less that mean, the mean, and the variance.

    The mean of x is rounded to float32, and adding up x to find it rounds more. What that left
    is measured on the differences and taken from them, so that in float32 too a mean a thousand
    times the standard deviation costs no accuracy.
    """
    left = 0.0
    squares = 0.0
    for x in ct.static_iter(xs):
        differences, more = sums(x, x * x)
        left = left + differences
        squares = squares + more
    left = left * (1.0 / N)
    near = ()
    for x in ct.static_iter(xs):
        near += (x - left,)
    return near, left, squares * (1.0 / N) - left * left


def again(tile, number):
    """The tile, in such a way that the compiler takes it for new once `number` is known.

    It is kept in its own 16 bits over the sum that makes the number, and converted a second time,
    where the compiler would convert it once and keep float32.
    """
    return ct.bitcast(ct.bitcast(tile, ct.int16) ^ nothing(number, ct.int16), tile.dtype)


def nothing(number, dtype):
    """An integer 0 of which the compiler knows nothing until `number` is there: no 1 / √number² is
    negative."""
    return (ct.rsqrt(number * number) < 0.0).astype(dtype)
