"""Checks of what a caller passes: at once, by name, in PyTorch's exception types."""

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import get_type_hints

import torch
from torch import SymFloat, SymInt, Tensor

from ..spec import WORDS, Options, norm_of
from .tensors import Tensors, statistics_dtype

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_SIZE = 2**63 - 1
OPTION_TYPES = get_type_hints(Options)


def check(
    op: str,
    tensors: Tensors,
    normalized_shape: Sequence[int],
    eps: float | None,
    asked: tuple,
    backend: str | None,
) -> Options:
    """What a call asks for.

    asked: the values of the fields of Options that follow `hidden` and `norm`.

    Raises TypeError for an argument of the wrong type, NotImplementedError for a dtype or layout
    that is not served, ValueError for an unknown word, RuntimeError for shapes or devices that do
    not fit, OverflowError for a number that no float holds. An RMSNorm's input of too few
    dimensions raises ValueError.
    """
    input, residual, gate, weight, bias, *more = tensors
    if not isinstance(input, Tensor):
        raise TypeError(f"{op}: argument 'input' takes a Tensor, got {_kind(input)}")
    if not isinstance(normalized_shape, (tuple, list)):
        got = _kind(normalized_shape)
        raise TypeError(f"{op}: argument 'normalized_shape' takes a tuple of ints, got {got}")
    # PyTorch's layer_norm takes no None, and has another exception for too few dimensions.
    layer = norm_of(op) == "layer"
    if layer or eps is not None:
        _check_float(op, "eps", eps, "a float" if layer else "a float or None")
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"{op}: argument 'backend' takes a str or None, got {_kind(backend)}")
    options = Options(0, norm_of(op), *asked)
    for name, value in zip(Options._fields[2:], options[2:], strict=True):
        check_option(op, name, value)
    _check_dtype(op, "input", input)
    shape = _sizes(op, normalized_shape, "a tuple of ints")
    if not shape:
        raise RuntimeError(
            f"{op}: argument 'normalized_shape' takes at least one size, got {shape}"
        )
    if input.dim() < len(shape):
        raise (RuntimeError if layer else ValueError)(
            f"{op}: argument 'input' takes at least the {len(shape)} dimensions of"
            f" normalized_shape, got {input.dim()}"
        )
    if input.shape[-len(shape) :] != shape:
        raise RuntimeError(
            f"{op}: argument 'input' takes a shape that ends in normalized_shape {list(shape)},"
            f" got {list(input.shape)}"
        )
    if op.startswith("add"):
        twice = len(more) > 0 and more[0] is not None
        check_like_input(op, "residual[1]" if twice else "residual", residual, input)
        if twice:
            _check_addend(op, residual, more[0], input)
        if more:
            _check_branch(op, Tensors(*tensors), options.dropout_scale, shape)
    elif op.endswith("add"):
        check_like_input(op, "residual", more[1], input)
    elif op.startswith("gated"):
        check_like_input(op, "gate", gate, input)
    heads = 0
    if weight is not None:
        heads = check_parameter(op, "weight", weight, shape, input)
    if bias is not None:
        bias_heads = check_parameter(op, "bias", bias, shape, input)
        if weight is not None and bias_heads != heads:
            raise RuntimeError(
                f"{op}: argument 'bias' takes the shape of weight {list(weight.shape)},"
                f" got {list(bias.shape)}"
            )
    values = [OPTION_TYPES[n](v) for n, v in zip(Options._fields[2:], options[2:], strict=True)]
    return Options(math.prod(shape), options.norm, *values)


def spread(op: str, tensors: tuple) -> tuple:
    """The tensors of a call whose residual is a sequence: its last item is the residual, and one
    before it the addend.

    Raises TypeError unless the sequence holds one or two tensors.
    """
    input, given, *others = tensors
    scale = [others.pop()] if op.endswith("quantized") else []
    # Dynamo of PyTorch 2.9 finds no attributes of a nested tensor that is made inside a graph.
    taken = [isinstance(t, Tensor) or hasattr(t, "__torch_function__") for t in given]
    if op.startswith("add") and all(taken):
        if len(given) == 1:
            return input, *given, *others, *scale
        if len(given) == 2:
            last = others[5:] or (None, None)
            return input, given[1], *others[:3], given[0], None, *last, *scale
    got = f"[{', '.join(map(_kind, given))}]"
    raise TypeError(
        f"{op}: argument 'residual' takes a Tensor or a sequence of one or two Tensors, got {got}"
    )


def without_tensor(number: object) -> object:
    """A number instead of a tensor that PyTorch takes for one: without dimensions or a gradient."""
    if isinstance(number, Tensor) and not number.dim() and not number.requires_grad:
        return number.item()
    return number


def _sizes(op: str, sizes: Sequence[int], takes: str) -> tuple[int, ...]:
    """The sizes of a normalized_shape. PyTorch takes integer tensors as sizes too."""
    sizes = tuple([int(n) if _is_integer_tensor(n) else n for n in sizes])
    for size in sizes:
        # type() first: the abstract class takes longer than all the other checks of an int.
        if not (-MAX_SIZE <= size <= MAX_SIZE if type(size) is int else _is_size(size)):
            raise TypeError(f"{op}: argument 'normalized_shape' takes {takes}, got {sizes}")
    return sizes


def sizes_of(module: str, normalized_shape: object) -> tuple[int, ...]:
    """What a module takes as its normalized_shape, an int or sizes, as a tuple."""
    takes = "an int or a tuple of ints, from 0 on"
    given = (normalized_shape,) if _is_size(normalized_shape) else normalized_shape
    if not isinstance(given, Iterable):
        got = _kind(given)
        raise TypeError(f"{module}: argument 'normalized_shape' takes {takes}, got {got}")
    sizes = _sizes(module, given, takes)
    if any(size < 0 for size in sizes):
        raise RuntimeError(f"{module}: argument 'normalized_shape' takes {takes}, got {sizes}")
    return sizes


def check_option(op: str, name: str, value: object) -> None:
    """Check that an option has its field's type, or is one of the words for it."""
    if name in WORDS:
        if not isinstance(value, str) or value not in WORDS[name]:
            takes = " or ".join(map(repr, WORDS[name]))
            raise ValueError(f"{op}: argument {name!r} takes {takes}, got {value!r}")
    elif OPTION_TYPES[name] is float:
        _check_float(op, name, value, "a float")
    elif not isinstance(value, bool):
        name = "norm_before_gate" if name == "gate_first" else name  # the caller's name
        raise TypeError(f"{op}: argument {name!r} takes a bool, got {_kind(value)}")


def _check_float(op: str, name: str, value: object, takes: str) -> None:
    if not isinstance(value, (float, Real, SymFloat)):
        raise TypeError(f"{op}: argument {name!r} takes {takes}, got {_kind(value)}")
    try:
        isinstance(value, Integral) and float(value)
    except OverflowError:
        raise OverflowError(
            f"{op}: argument {name!r} takes {takes}, got an int that no float holds"
        ) from None


def check_like_input(op: str, name: str, tensor: Tensor, input: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: argument {name!r} takes a Tensor, got {_kind(tensor)}")
    if tensor.shape != input.shape:
        raise RuntimeError(
            f"{op}: argument {name!r} takes the input's shape {list(input.shape)},"
            f" got {list(tensor.shape)}"
        )
    _check_dtype(op, name, tensor)
    _check_device(op, name, tensor, input)


def _check_addend(op: str, residual: Tensor, addend: Tensor, input: Tensor) -> None:
    """Check the first of two residuals, and the dtype of the other."""
    check_like_input(op, "residual[0]", addend, input)
    if addend.dtype not in (input.dtype, residual.dtype):
        raise RuntimeError(
            f"{op}: argument 'residual[0]' takes the dtype of the input or of residual[1],"
            f" {input.dtype} or {residual.dtype}, got {addend.dtype}"
        )


def _check_branch(op: str, tensors: Tensors, scale: float, shape: tuple) -> None:
    """Check what multiplies the input before the residual is added."""
    input, mask, layer_scale = tensors.input, tensors.dropout_mask, tensors.layer_scale
    if mask is None and scale != 1:
        raise ValueError(
            f"{op}: argument 'dropout_scale' takes 1.0 without a dropout_mask, got {scale}"
        )
    for name, tensor in (("dropout_mask", mask), ("layer_scale", layer_scale)):
        if tensor is not None and tensors.addend is not None:
            raise RuntimeError(f"{op}: argument {name!r} takes None with two residuals, got one")
    if mask is not None:
        if not isinstance(mask, Tensor):
            got = _kind(mask)
            raise TypeError(f"{op}: argument 'dropout_mask' takes a Tensor or None, got {got}")
        if mask.shape != input.shape or mask.layout != torch.strided:
            raise RuntimeError(
                f"{op}: argument 'dropout_mask' takes the input's shape {list(input.shape)},"
                f" got {list(mask.shape)} {mask.layout}"
            )
        if mask.dtype != torch.bool:
            raise NotImplementedError(
                f"{op}: argument 'dropout_mask' takes torch.bool, got {mask.dtype}"
            )
        _check_device(op, "dropout_mask", mask, input)
    if layer_scale is None:
        return
    if check_parameter(op, "layer_scale", layer_scale, shape, input):
        raise RuntimeError(
            f"{op}: argument 'layer_scale' takes the shape of normalized_shape {list(shape)},"
            f" got {list(layer_scale.shape)}"
        )
    # The gradient of the layer scale is made of the residual's.
    if torch.finfo(tensors.residual.dtype).eps > torch.finfo(input.dtype).eps:
        raise RuntimeError(
            f"{op}: argument 'residual' takes at least the digits of the input's {input.dtype}"
            f" with a layer_scale, got {tensors.residual.dtype}"
        )


def check_parameter(op: str, name: str, parameter: Tensor, shape: tuple, input: Tensor) -> int:
    """The number of heads that have a row of the parameter each, or 0."""
    if not isinstance(parameter, Tensor):
        raise TypeError(f"{op}: argument {name!r} takes a Tensor or None, got {_kind(parameter)}")
    heads = 0
    if parameter.shape != shape:
        by_heads = input.shape[-len(shape) - 1 :]
        if len(by_heads) == len(shape) or parameter.shape != by_heads:
            or_heads = f" or, by heads, {list(by_heads)}" if len(by_heads) > len(shape) else ""
            raise RuntimeError(
                f"{op}: argument {name!r} takes the shape of normalized_shape {list(shape)}"
                f"{or_heads}, got {list(parameter.shape)}"
            )
        heads = by_heads[0]
    _check_dtype(op, name, parameter)
    _check_device(op, name, parameter, input)
    return heads


def _check_device(op: str, name: str, tensor: Tensor, input: Tensor) -> None:
    if tensor.device != input.device:
        raise RuntimeError(
            f"{op}: argument {name!r} takes the input's device {input.device}, got {tensor.device}"
        )


def _check_dtype(op: str, name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided:
        raise NotImplementedError(
            f"{op}: argument {name!r} takes the layout torch.strided, got {tensor.layout}"
        )
    if tensor.dtype not in DTYPES:
        takes = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise NotImplementedError(f"{op}: argument {name!r} takes {takes}, got {tensor.dtype}")


def _is_integer_tensor(value: object) -> bool:
    if not isinstance(value, Tensor) or value.dim():
        return False
    return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)


def _is_size(value: object) -> bool:
    return isinstance(value, (SymInt, Integral)) and not isinstance(value, bool)


def default_eps(*tensors: Tensor | None) -> float:
    """What PyTorch takes for eps=None: the machine epsilon of the dtype it computes in."""
    return torch.finfo(statistics_dtype(*tensors)).eps


def _kind(value: object) -> str:
    return type(value).__name__
