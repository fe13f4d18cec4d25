"""Converts the arguments of a launch for the kernel."""

import cuda.tile as ct
import torch
from torch._subclasses.fake_tensor import FakeTensor

from .errors import InterpreterError
from .memory import Array, find_aliases
from .tile import scalar

SCALARS = {bool: ct.bool_, int: ct.int32, float: ct.float32}


def bind(kernel: ct.kernel, args: tuple, launch) -> tuple:
    """The values that a kernel's function receives for the arguments. launch: see Array."""
    function = kernel._annotated_function
    names, nodes = tuple(function.pysig.parameters), function.parameter_annotations
    arrays = []

    def convert(value, node, name: str):
        if isinstance(value, tuple):
            if type(value) is not tuple:
                raise TypeError(f"'{name}' is of a subclass of tuple, which ct.launch refuses")
            return tuple(convert(v, node, f"{name}[{i}]") for i, v in enumerate(value))
        if node.constant:
            return value
        return array(value, name) if isinstance(value, torch.Tensor) else _scalar(value)

    def array(tensor: torch.Tensor, name: str) -> Array:
        if (state := _unresolved(tensor)) is not None:
            raise InterpreterError(f"'{name}' is {state}: a kernel would read its memory as it is")
        arrays.append(Array(name, tensor.detach(), launch))
        return arrays[-1]

    bound = tuple(convert(*one) for one in zip(args, nodes, names, strict=True))
    find_aliases(arrays)
    return bound


def _unresolved(tensor: torch.Tensor) -> str | None:
    """The state of a tensor that PyTorch's dispatcher resolves before it calls a kernel."""
    if tensor.is_neg():
        return "lazily negated"
    if tensor._is_zerotensor():
        return "a zero tensor"
    if torch._is_functional_tensor(tensor):
        return "a functional wrapper"
    if isinstance(tensor, FakeTensor):
        return "fake"
    return None


def _scalar(value: float):
    """A 0-d tile of a Python number."""
    if isinstance(value, int) and not -1 << 31 <= value < 1 << 31:
        raise OverflowError("Python int too large to convert to C int32_t")
    return scalar(value, SCALARS[type(value)])
