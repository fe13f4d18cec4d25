"""Checks of what a caller passes: at once, by name, in PyTorch's exception types."""

import math
from collections.abc import Sequence
from numbers import Integral, Real

import torch
from torch import SymFloat, SymInt, Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check(
    op: str,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    offset: float,
    backend: str | None,
) -> int:
    """The number of elements normalised together.

    Raises TypeError for an argument of the wrong type, NotImplementedError for a dtype that is not
    served, ValueError for an input of too few dimensions, RuntimeError for shapes or devices that
    do not fit.
    """
    if not isinstance(input, Tensor):
        raise TypeError(f"{op}: argument 'input' takes a Tensor, got {_kind(input)}")
    if not isinstance(normalized_shape, (tuple, list)):
        got = _kind(normalized_shape)
        raise TypeError(f"{op}: argument 'normalized_shape' takes a tuple of ints, got {got}")
    if eps is not None and not isinstance(eps, (float, Real, SymFloat)):
        raise TypeError(f"{op}: argument 'eps' takes a float or None, got {_kind(eps)}")
    if not isinstance(offset, (float, Real, SymFloat)):
        raise TypeError(f"{op}: argument 'offset' takes a float, got {_kind(offset)}")
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"{op}: argument 'backend' takes a str or None, got {_kind(backend)}")
    _check_dtype(op, "input", input)
    shape = tuple(normalized_shape)
    if not shape:
        raise RuntimeError(
            f"{op}: argument 'normalized_shape' takes at least one size, got {shape}"
        )
    for size in shape:
        # type() first: the abstract class takes longer than all the other checks of an int.
        if type(size) is not int and not _is_size(size):
            raise TypeError(f"{op}: argument 'normalized_shape' takes a tuple of ints, got {shape}")
    if input.dim() < len(shape):
        raise ValueError(
            f"{op}: argument 'input' takes at least the {len(shape)} dimensions of"
            f" normalized_shape, got {input.dim()}"
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
    _check_dtype(op, name, parameter)
    if parameter.device != input.device:
        raise RuntimeError(
            f"{op}: argument {name!r} takes the input's device {input.device},"
            f" got {parameter.device}"
        )


def _check_dtype(op: str, name: str, tensor: Tensor) -> None:
    if tensor.dtype not in DTYPES:
        takes = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise NotImplementedError(f"{op}: argument {name!r} takes {takes}, got {tensor.dtype}")


def _is_size(value: object) -> bool:
    return isinstance(value, (SymInt, Integral)) and not isinstance(value, bool)


def default_eps(dtype: torch.dtype) -> float:
    """What PyTorch takes for eps=None: the machine epsilon of the dtype it computes in."""
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def _kind(value: object) -> str:
    return type(value).__name__
