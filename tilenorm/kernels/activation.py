"""The activation of a gate, and its derivative."""

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
