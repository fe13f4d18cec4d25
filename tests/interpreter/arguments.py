"""Convert a launch's arguments for the kernel, and reject the arguments that ct.launch rejects."""

import cuda.tile as ct
import torch
from cuda.tile._annotated_function import LeafAnnotationNode
from torch._subclasses.fake_tensor import FakeTensor

from . import dtypes
from .errors import StateError
from .memory import Array, Blocks, Buffer, find_aliases
from .tile import scalar

SCALARS = {bool: ct.bool_, int: ct.int32, float: ct.float32}


def bind(kernel: ct.kernel, args: tuple, blocks: Blocks) -> tuple:
    """The values that a kernel's function receives for the arguments of a launch."""
    function = kernel._annotated_function
    names, nodes = tuple(function.pysig.parameters), function.parameter_annotations
    if len(args) != len(names):
        raise TypeError(f"Kernel expects {len(names)} arguments but {len(args)} was given")
    buffers = []

    def convert(value, node, name: str, label: str):
        if not isinstance(node, LeafAnnotationNode) or node.array or node.scalar:
            raise NotImplementedError(
                f"the interpreter does not implement the annotation of {name}"
            )
        if isinstance(value, tuple):
            if type(value) is not tuple:
                raise TypeError(
                    f"Invalid {label}: '{type(value).__name__}' is a subclass of 'tuple'."
                    " Only plain tuples are accepted."
                )
            item = LeafAnnotationNode(constant=node.constant)
            return tuple(
                convert(v, item, f"{name}[{i}]", f"item #{i} of {label}")
                for i, v in enumerate(value)
            )
        if node.constant:
            if type(value) not in SCALARS:
                raise TypeError(
                    f"Invalid {label}: Could not interpret object of type"
                    f" '{type(value).__name__}' as a constant."
                )
            return value
        if isinstance(value, torch.Tensor):
            return array(value, name)
        return _scalar(value, label)

    def array(tensor: torch.Tensor, name: str) -> Array:
        if tensor.device.type != "cpu":
            raise ValueError(f"'{name}' is on {tensor.device}: the interpreter runs on the CPU")
        if tensor.dtype not in dtypes.TILE_DTYPE:
            raise TypeError(f"Unsupported array dtype: '{name}' has {tensor.dtype}")
        if (state := _unresolved(tensor)) is not None:
            raise StateError(f"'{name}' is {state}: a kernel would read its memory as it is")
        tensor = tensor.detach()
        buffer = Buffer(name, tensor, blocks)
        buffers.append((buffer, tensor))
        return Array(buffer, tensor)

    bound = tuple(
        convert(value, node, name, f"kernel argument #{i}")
        for i, (value, node, name) in enumerate(zip(args, nodes, names, strict=True))
    )
    find_aliases(buffers)
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


def _scalar(value, label: str):
    """A 0-d tile of a Python number."""
    if type(value) is int and not -1 << 31 <= value < 1 << 31:
        raise OverflowError("Python int too large to convert to C int32_t")
    if type(value) not in SCALARS:
        name = type(value).__name__
        raise TypeError(f"Invalid {label}: Objects of type '{name}' are not supported.")
    return scalar(value, SCALARS[type(value)])
