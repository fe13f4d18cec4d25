"""The activation of a gate, and its derivative: silu(z) = z · σ(z), or σ(z)."""

import cuda.tile as ct


def activated(z, norm):
    """act(z), in float32."""
    return sigmoid(z) if norm.SIGMOID else silu(z)


def slope(z, norm):
    """act'(z): σ(z) · (1 + z · (1 − σ(z))), or σ(z) · (1 − σ(z)).

    The second is σ(|z|)² · exp(−|z|): where σ(z) is close to 1, 1 − σ(z) would have few digits.
    """
    if norm.SIGMOID:
        s = sigmoid(abs(z))
        return s * s * ct.exp(-abs(z))
    s = sigmoid(z)
    return s * (1.0 + z * (1.0 - s))


def sigmoid(z):
    return ct.truediv(1.0, 1.0 + ct.exp(-z), rounding_mode=ct.RoundingMode.FULL)


def silu(z):
    return ct.truediv(z, 1.0 + ct.exp(-z), rounding_mode=ct.RoundingMode.FULL)
