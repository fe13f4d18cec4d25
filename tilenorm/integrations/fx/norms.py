"""What a norm in a graph computes, whatever nodes spell it, and whether tilenorm takes it."""

import math
from dataclasses import dataclass

import torch
from torch import SymInt, Tensor
from torch.fx import Node

from ...ops.plans import spec_of_tensors
from ...ops.registry import DTYPES, cutile_refuses, device_of, spec_refused
from ...ops.tensors import Tensors
from ...spec import Options
from .nodes import Left, value_of

PARAMETER_DTYPES = tuple(getattr(torch, name) for name in DTYPES)


@dataclass(frozen=True)
class Norm:
    """The norm of x over its last `dims` dimensions.

    outputs: the nodes that stand for output, mean and rstd, by their place among what
    tilenorm::norm returns. at: the node that gives the place in the graph and the metadata. parts:
    the nodes that compute it, of which those that nothing else uses are no longer needed.
    """

    norm: str
    x: Node
    weight: Node | None
    bias: Node | None
    dims: int
    eps: float
    offset: float
    rounding: str
    outputs: dict[int, Node]
    at: Node
    parts: tuple[Node, ...]

    @property
    def kind(self) -> str:
        return f"{self.norm}_norm"

    @property
    def order(self) -> list[int]:
        """The dimensions as they are in memory, those that are normalised last.

        Elementwise operations, unlike tilenorm's, write their output in the order of their input:
        of queries and keys that are transposed views, say.
        """
        y = known(self.outputs[0]) if 0 in self.outputs else known(self.x)
        by_heads = self.weight is not None and known(self.weight).dim() > self.dims
        if y.is_contiguous() or by_heads or len(self.outputs) > 1:
            return list(range(y.dim()))
        rows = sorted(range(y.dim() - self.dims), key=y.stride, reverse=True)
        return [*rows, *range(y.dim() - self.dims, y.dim())]

    def check(self) -> None:
        """Raises Left, with the reason, if tilenorm's op would not give what the nodes give."""
        x, outputs = known(self.x), {place: known(node) for place, node in self.outputs.items()}
        if 0 in outputs:
            check_dtype("output", outputs[0], x)
            check_contiguous("output", outputs[0].permute(self.order))
        check_tensors(self.norm, x, self.weight, self.bias, self.dims, self.rounding)


@dataclass(frozen=True)
class Gradient:
    """The gradients of a norm, by aten's op for it; outputs, at: as Norm's."""

    norm: str
    dy: Node
    x: Node
    weight: Node | None
    bias: Node | None
    mean: Node | None
    rstd: Node
    dims: int
    mask: tuple[bool, ...]
    outputs: dict[int, Node]
    at: Node

    @property
    def kind(self) -> str:
        return f"{self.norm}_norm_backward"

    def check(self) -> None:
        """Raises Left, with the reason, if tilenorm's op would not give what the node gives."""
        x, dy = known(self.x), known(self.dy)
        if dy.dtype != x.dtype:
            raise Left(f"its incoming gradient is {dy.dtype}, its input {x.dtype}")
        for statistic in filter(None, (self.mean, self.rstd)):
            known(statistic)
        outputs = {p: known(node) for p, node in self.outputs.items() if self.mask[p]}
        if 0 in outputs:
            check_dtype("gradient", outputs[0], x)
            check_contiguous("gradient", outputs[0])
        check_tensors(self.norm, x, self.weight, self.bias, self.dims, "late")


def known(node: object) -> Tensor:
    """The value of a node, which has one."""
    value = value_of(node)
    if value is None:
        raise Left(f"of {node} neither shape nor dtype is known, or it is no plain tensor")
    return value


def check_dtype(name: str, result: Tensor, x: Tensor) -> None:
    """Raises Left if a result is not of the input's dtype, as tilenorm's are."""
    if result.dtype != x.dtype:
        raise Left(f"its {name} is {result.dtype}, its input {x.dtype}")


def check_contiguous(name: str, result: Tensor) -> None:
    """Raises Left if a result is not laid out as tilenorm's are."""
    if not result.is_contiguous():
        raise Left(f"its {name} is not contiguous")


def hidden_of(x: Tensor, dims: int) -> int:
    """The number of elements normalised together."""
    return math.prod(map(int, x.shape[x.dim() - dims :]))


def check_tensors(norm: str, x: Tensor, weight, bias, dims: int, rounding: str) -> None:
    """Raises Left if a norm's tensors are not those that the kernels take."""
    if not all(map(_is_known, x.shape[x.dim() - dims :])):
        raise Left("it normalises a number of elements that varies")
    affine = {name: known(p) for name, p in (("weight", weight), ("bias", bias)) if p is not None}
    for name, parameter in affine.items():
        if not parameter_fits(parameter, x, dims) or parameter.device != x.device:
            of = f"{parameter.dtype} of shape {list(parameter.shape)} on {parameter.device}"
            raise Left(f"its {name} is {of}, which does not fit the input")
    options = Options(hidden_of(x, dims), norm, rounding=rounding)
    spec = spec_of_tensors(Tensors(x, **affine), options)
    if x.device.type == "cuda":
        reason = cutile_refuses(spec, 0, device_of("cuda", x.device.index))
    else:
        reason = spec_refused(spec)
    if x.device.type not in ("cpu", "cuda"):
        reason = f"it is on {x.device.type}"
    if reason:
        raise Left(reason)


def _is_known(size: int | SymInt) -> bool:
    return isinstance(size, int) or size.node.maybe_as_int() is not None


def parameter_fits(parameter: Tensor, x: Tensor, dims: int) -> bool:
    """Whether there is one number for each element of a row, or, by heads, of each head's row."""
    by_heads = dims == 1 and parameter.dim() == 2 < x.dim()
    if parameter.dim() != dims and not by_heads:
        return False
    return (
        parameter.dtype in PARAMETER_DTYPES
        and parameter.shape == x.shape[x.dim() - parameter.dim() :]
    )


def trailing(x: Tensor | None, dim: object) -> int:
    """How many dimensions `dim` names, if these are the last of x; else 0."""
    named = (dim,) if isinstance(dim, int) else tuple(dim) if isinstance(dim, tuple | list) else ()
    if x is None or not all(isinstance(d, int) for d in named):
        return 0
    positions = sorted(d % x.dim() for d in named) if x.dim() else []
    return len(named) if positions == list(range(x.dim() - len(named), x.dim())) else 0
