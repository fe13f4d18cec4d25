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


def center(x, mask, N):
    """x − mean(x), zero outside the mask; the mean; and mean((x − mean(x))²), by rows.

    The mean is rounded to float32, and adding up x to find it rounds more: what is left is measured
    on the differences and taken from them, so that a mean a thousand times the standard deviation
    costs no accuracy.
    """
    mean = ct.sum(x, axis=1, keepdims=True) / N
    x = x - mean
    if mask is not None:
        x = ct.where(mask, x, 0.0)
    left = ct.sum(x, axis=1, keepdims=True) / N
    variance = ct.sum(x * x, axis=1, keepdims=True) / N - left * left
    return x - left, mean + left, variance
