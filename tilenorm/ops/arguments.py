"""Checks of what a caller passes: at once, by name, in PyTorch's exception types."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def check(
    op: str,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
) -> int:
    """The number of elements normalised together.

    Raises TypeError for an argument of the wrong type, NotImplementedError for an input that is
    not of floating point, RuntimeError for shapes or devices that do not fit.
    """
    if not isinstance(input, Tensor):
        raise TypeError(f"{op}: argument 'input' takes a Tensor, got {_kind(input)}")
    if not isinstance(normalized_shape, (tuple, list)):
        got = _kind(normalized_shape)
        raise TypeError(f"{op}: argument 'normalized_shape' takes a tuple of ints, got {got}")
    if not (eps is None or isinstance(eps, (float, int))):
        raise TypeError(f"{op}: argument 'eps' takes a float or None, got {_kind(eps)}")
    if not input.is_floating_point():
        raise NotImplementedError(
            f"{op}: argument 'input' takes a floating-point dtype, got {input.dtype}"
        )
    shape = tuple(normalized_shape)
    if not shape:
        raise RuntimeError(
            f"{op}: argument 'normalized_shape' takes at least one size, got {shape}"
        )
    if input.shape[-len(shape) :] != shape:
        raise RuntimeError(
            f"{op}: argument 'input' takes a shape that ends in normalized_shape {list(shape)},"
            f" got {list(input.shape)}"
        )
    if weight is not None:
        _check_parameter(op, "weight", weight, shape, input)
    if bias is not None:
        _check_parameter(op, "bias", bias, shape, input)
    return math.prod(shape)


def _check_parameter(op: str, name: str, parameter: Tensor, shape: tuple, input: Tensor) -> None:
    if not isinstance(parameter, Tensor):
        raise TypeError(f"{op}: argument {name!r} takes a Tensor or None, got {_kind(parameter)}")
    if parameter.shape != shape:
        raise RuntimeError(
            f"{op}: argument {name!r} takes the shape of normalized_shape {list(shape)},"
            f" got {list(parameter.shape)}"
        )
    if not parameter.is_floating_point():
        raise NotImplementedError(
            f"{op}: argument {name!r} takes a floating-point dtype, got {parameter.dtype}"
        )
    if parameter.device != input.device:
        raise RuntimeError(
            f"{op}: argument {name!r} takes the input's device {input.device},"
            f" got {parameter.device}"
        )


def default_eps(dtype: torch.dtype) -> float:
    """What PyTorch takes for eps=None: the machine epsilon of the dtype it computes in."""
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def _kind(value: object) -> str:
    return type(value).__name__
