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


def of_sum(norm: Callable) -> Callable:
    """A function that returns the norm of x + residual, and x + residual."""

    def add_norm(x, residual, *parameters):
        total = x + residual
        return norm(total, *parameters), total

    return add_norm
