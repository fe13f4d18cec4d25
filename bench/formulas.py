"""The measured operations as a PyTorch model calls them. In float64 they are the oracle, too."""

from collections.abc import Callable

import torch.nn.functional as F

EPS = 1e-6


def rms_norm(x, weight=None):
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def layer_norm(x, weight=None, bias=None):
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def head_rms_norm(x, weight):
    # F.rms_norm takes only weights of the normalised shape.
    return rms_norm(x) * weight


def gated(norm: Callable) -> Callable:
    """A function that returns norm(x) · silu(gate)."""
    return lambda x, gate, *parameters: norm(x, *parameters) * F.silu(gate)


def added_to(norm: Callable) -> Callable:
    """A function that returns skip + norm(x)."""
    return lambda x, skip, *parameters: skip + norm(x, *parameters)


def of_sum(norm: Callable) -> Callable:
    """A function that returns the norm of x + residual, and x + residual."""

    def add_norm(x, residual, *parameters):
        total = x + residual
        return norm(total, *parameters), total

    return add_norm


def chained(norm: Callable) -> Callable:
    """A function that returns the norm of s = skip + norm(x), and s."""

    def norm_add_norm(x, skip, *parameters):
        each = len(parameters) // 2
        total = skip + norm(x, *parameters[:each])
        return norm(total, *parameters[each:]), total

    return norm_add_norm


def modulated(norm: Callable) -> Callable:
    """A function that returns norm(x) · (1 + scale) + shift of x (B, S, D), scale and shift (B, D).

    These are the operations of a diffusion transformer in diffusers.
    """
    return lambda x, scale, shift: norm(x) * (1 + scale[:, None]) + shift[:, None]


def modulated_sum(norm: Callable) -> Callable:
    """A function that returns the modulated norm of s = residual + gate · x, and s."""

    def gate_add_norm(x, residual, scale, shift, gate):
        total = residual + gate[:, None] * x
        return modulated(norm)(total, scale, shift), total

    return gate_add_norm
