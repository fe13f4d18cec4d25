"""The formulas that kernels share, on float32 tiles."""

import cuda.tile as ct

FOLDED = 256  # the least number of threads of a block times the two that they can add in one order


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


def halves(x):
    """The first half of the last dimension and the second, added."""
    R, M, L = x.shape
    return ct.extract(x, (0, 0, 0), (R, M, L // 2)) + ct.extract(x, (0, 0, 1), (R, M, L // 2))


def folded(x, UNIT):
    """A tile with the same sums by rows, of at most FOLDED columns, added up in an order of ours.

    In which order a thread adds up what it has of a tile, the compiler decides by the registers
    that are left: by halves here, in a chain there. It is told: first the UNIT elements that a
    thread reads at once, by halves, then vectors, until a thread has two at most. UNIT 0: as the
    compiler likes.
    """
    if UNIT > 0:
        R, W = x.shape
        vectors = W // UNIT
        x = x.reshape((R, vectors, UNIT))
        for _ in ct.static_iter(range(UNIT.bit_length() - 1)):
            x = halves(x)
        x = x.reshape((R, 1, vectors))
        for _ in ct.static_iter(range((vectors // FOLDED).bit_length() - 1)):
            x = halves(x)
        x = x.reshape((R, min(vectors, FOLDED)))
    return x


def unfused(product, zero):
    """The first of products that are added up.

    Of two products that are added, the compiler fuses one with the addition, not the same one in
    all kernels. Of a product and a sum it has no choice: given a zero that it does not know for
    one, this is a sum.
    """
    return product if zero is None else product + zero


def row_sum(xs, UNIT):
    """The sum of segments by rows. Those of one width are added up first: a block waits once."""
    total = 0.0
    added = xs[0]
    for x in ct.static_iter(xs[1:]):
        if x.shape[1] == added.shape[1]:
            added = added + x
        else:
            total = total + ct.sum(folded(added, UNIT), axis=1, keepdims=True)
            added = x
    return total + ct.sum(folded(added, UNIT), axis=1, keepdims=True)


def mean_of(xs, N, UNIT):
    """The mean of segments, by rows."""
    return row_sum(xs, UNIT) * (1.0 / N)


def mean_square(xs, N, zero, UNIT):
    squares = ()
    width = 0
    for x in ct.static_iter(xs):
        squares += (unfused(x * x, zero if x.shape[1] != width else None),)
        width = x.shape[1]
    return row_sum(squares, UNIT) * (1.0 / N)


def centered(xs, masks, mean):
    """The segments of x − mean, zero outside the masks."""
    near = ()
    for j, mask in ct.static_iter(enumerate(masks)):
        x = xs[j] - mean
        near += (x if mask is None else ct.where(mask, x, 0.0),)
    return near


def recentered(xs, N, zero, UNIT):
    """Segments whose mean is nearly 0 less that mean, the mean, and the variance.

    The mean of x is rounded to float32, and adding up x to find it rounds more. What that left
    is measured on the differences and taken from them, so that in float32 too a mean a thousand
    times the standard deviation costs no accuracy.
    """
    left = 0.0
    squares = 0.0
    for x in ct.static_iter(xs):
        differences, more = sums(folded(x, UNIT), folded(unfused(x * x, zero), UNIT))
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


def joined(tile, w, number):
    """The tile, in such a way that the compiler has to have w, of any dtype, before it.

    It would fetch a weight when the tile is normalised, a second wait for memory after the sum.
    """
    bits = ct.int32 if w.dtype == ct.float32 else ct.int16
    zero = ct.bitcast(w, bits) & nothing(number, bits)
    bits = ct.int32 if tile.dtype == ct.float32 else ct.int16
    return ct.bitcast(ct.bitcast(tile, bits) | zero.astype(bits), tile.dtype)


def unknown_zero(count):
    """0.0, of a count's sign: the compiler does not know that counts are never negative."""
    return ct.astype(count >> 31, ct.float32)


def nothing(number, dtype):
    """An integer 0 of which the compiler knows nothing until `number` is there: no 1 / √number² is
    negative."""
    return (ct.rsqrt(number * number) < 0.0).astype(dtype)
