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


def center(xs, masks, N, EXACT):
    """The segments of x − mean(x), zero outside the masks; the mean; mean((x − mean(x))²), by rows.

    The mean is rounded to float32, and adding up x to find it rounds more. EXACT measures what is
    left on the differences and takes it from them, so that in float32 too a mean a thousand times
    the standard deviation costs no accuracy. Where all is of 16 bits no digit would show it.
    """
    total = 0.0
    for x in ct.static_iter(xs):
        total = total + ct.sum(x, axis=1, keepdims=True)
    mean = total * (1.0 / N)
    near = ()
    left = 0.0
    squares = 0.0
    for j, mask in ct.static_iter(enumerate(masks)):
        x = xs[j] - mean
        if mask is not None:
            x = ct.where(mask, x, 0.0)
        if EXACT:
            differences, more = sums(x, x * x)
            left = left + differences
        else:
            more = ct.sum(x * x, axis=1, keepdims=True)
        squares = squares + more
        near += (x,)
    if not EXACT:
        return near, mean, squares * (1.0 / N)
    left = left * (1.0 / N)
    found = ()
    for x in ct.static_iter(near):
        found += (x - left,)
    return found, mean + left, squares * (1.0 / N) - left * left
