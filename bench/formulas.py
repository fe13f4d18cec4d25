"""The measured operations as PyTorch code: spelled out, and as a PyTorch model calls them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

EPS = 1e-6


def rms_norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def layer_norm(x, weight, bias):
    return rms_norm(x - x.mean(-1, keepdim=True), weight) + bias


def alone(norm: Callable) -> Callable:
    return norm


def gated(norm: Callable) -> Callable:
    """A function that returns norm(x) · silu(gate)."""
    return lambda x, gate, *parameters: norm(x, *parameters) * F.silu(gate)


def eager_rms_norm(x, weight):
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def eager_layer_norm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def eager_head_rms_norm(x, weight):
    # F.rms_norm takes only weights of the normalised shape.
    return F.rms_norm(x, x.shape[-1:], eps=EPS) * weight


def added_to(norm: Callable) -> Callable:
    """A function that returns skip + norm(x)."""
    return lambda x, skip, *parameters: skip + norm(x, *parameters)


def of_sum(norm: Callable) -> Callable:
    """A function that returns the norm of x + residual, and x + residual."""

    def add_norm(x, residual, *parameters):
        total = x + residual
        return norm(total, *parameters), total

    return add_norm
