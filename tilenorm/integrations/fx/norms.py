"""Norm and Gradient: descriptions of a norm in a graph, and checks that tilenorm supports it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import SymInt, Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ...ops.plans import spec_of_tensors
from ...ops.registry import DTYPES, cutile_refuses, device_of, spec_refused
from ...ops.tensors import Tensors
from ...spec import Options
from .nodes import Left, value_of

PARAMETER_DTYPES = tuple(getattr(torch, name) for name in DTYPES)


@dataclass(frozen=True)
class Norm:
    """The norm of x over its last `dims` dimensions.

    Attributes:
        norm: "rms" or "layer".
        outputs: the nodes of output, mean and rstd, by their index among the results of
            tilenorm::norm.
        at: tilenorm's op goes to this node's place in the graph and takes over its metadata.
        parts: the nodes that compute the norm. Those that nothing else uses are erased.
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
    gate: Node | None = None
    activation: str = "silu"

    @property
    def kind(self) -> str:
        return f"{'gated_' if self.gate is not None else ''}{self.norm}_norm"

    @property
    def options(self) -> Options:
        hidden = hidden_of(known(self.x), self.dims)
        rest = {"rounding": self.rounding, "activation": self.activation}
        return Options(hidden, self.norm, self.offset, **rest)

    @property
    def order(self) -> list[int]:
        """The output's dimensions in memory order, with the normalised dimensions last.

        Elementwise operations give their output the memory order of their input, which may be a
        transposed view (queries and keys often are). tilenorm's output is always contiguous.
        """
        y = known(self.outputs[0]) if 0 in self.outputs else known(self.x)
        by_heads = self.weight is not None and known(self.weight).dim() > self.dims
        if y.is_contiguous() or by_heads or len(self.outputs) > 1:
            return list(range(y.dim()))
        rows = sorted(range(y.dim() - self.dims), key=y.stride, reverse=True)
        return [*rows, *range(y.dim() - self.dims, y.dim())]

    def check(self) -> None:
        """Raise Left, with the reason, if tilenorm's op would give another result."""
        x, outputs = known(self.x), {place: known(node) for place, node in self.outputs.items()}
        rows = (*x.shape[: x.dim() - self.dims], *[1] * self.dims)
        for place, output in outputs.items():
            name, shape = ("output", x.shape) if place == 0 else ("statistic", rows)
            check_shape(name, output, shape)
        if 0 in outputs:
            check_dtype("output", outputs[0], x)
            check_contiguous("output", outputs[0].permute(self.order))
        check_width(x, self.dims)
        check_tensors(x, self.gate, self.weight, self.bias, self.dims, self.options)


@dataclass(frozen=True)
class Gradient:
    """The gradients of a norm, computed by aten's op.

    outputs, at: as in Norm. mask: which results of tilenorm::norm_backward to compute.
    """

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
        """Raise Left, with the reason, if tilenorm's op would give another result."""
        x, dy = known(self.x), known(self.dy)
        if dy.dtype != x.dtype:
            raise Left(f"its incoming gradient is {dy.dtype}, its input {x.dtype}")
        check_shape("incoming gradient", dy, x.shape)
        rows = (*x.shape[: x.dim() - self.dims], *[1] * self.dims)
        for name, statistic in (("mean", self.mean), ("rstd", self.rstd)):
            if statistic is not None:
                check_shape(name, known(statistic), rows)
                check_statistic(name, known(statistic), x)
        outputs = {p: known(node) for p, node in self.outputs.items() if self.mask[p]}
        for place, output in outputs.items():
            like = {0: self.x, 3: self.weight, 4: self.bias}[place]
            check_shape(f"gradient of {like}", output, known(like).shape)
        if 0 in outputs:
            check_dtype("gradient", outputs[0], x)
            check_contiguous("gradient", outputs[0])
        check_width(x, self.dims)
        options = Options(hidden_of(x, self.dims), self.norm)
        check_tensors(x, None, self.weight, self.bias, self.dims, options)


def known(node: object) -> Tensor:
    """The fake tensor of a node. Raises Left if tracing stored none."""
    value = value_of(node)
    if value is None:
        raise Left(f"{node} has no shape and dtype in its metadata, or is of another tensor class")
    return value


def check_dtype(name: str, result: Tensor, x: Tensor) -> None:
    """Raise Left if a result's dtype is not the input's. tilenorm's results have that dtype."""
    if result.dtype != x.dtype:
        raise Left(f"its {name} is {result.dtype}, its input {x.dtype}")


def check_contiguous(name: str, result: Tensor) -> None:
    """Raise Left if a result is not contiguous. tilenorm's results are contiguous."""
    if not result.is_contiguous():
        raise Left(f"its {name} is not contiguous")


def check_shape(name: str, value: Tensor, expected: Sequence[int | SymInt]) -> None:
    """Raise Left if a value does not have the shape that PyTorch's op takes or gives."""
    if not same_sizes(value.shape, expected):
        raise Left(f"its {name} has the shape {list(value.shape)}, not {list(expected)}")


def check_statistic(name: str, statistic: Tensor, x: Tensor) -> None:
    """Raise Left if tilenorm's op cannot read a mean or rstd."""
    if statistic.dtype not in PARAMETER_DTYPES or statistic.device != x.device:
        raise Left(f"its {name} is {statistic.dtype} on {statistic.device}")
    check_contiguous(name, statistic)


def hidden_of(x: Tensor, dims: int) -> int:
    """The number of elements normalised together."""
    return math.prod(map(int, x.shape[x.dim() - dims :]))


def check_width(x: Tensor, dims: int) -> None:
    """Raise Left if the number of elements that a norm of x normalises together is not known."""
    if not all(map(_is_known, x.shape[x.dim() - dims :])):
        raise Left("the number of elements that it normalises together is symbolic")


def check_tensors(x: Tensor, gate, weight, bias, dims: int, options: Options) -> None:
    """Raise Left if the kernels do not support a norm's tensors."""
    if gate is not None:
        check_shape("gate", known(gate), x.shape)
        if known(gate).device != x.device:
            raise Left(f"its gate is on {known(gate).device}, its input on {x.device}")
    affine = {name: known(p) for name, p in (("weight", weight), ("bias", bias)) if p is not None}
    for name, parameter in affine.items():
        if not parameter_fits(parameter, x, dims) or parameter.device != x.device:
            of = f"{parameter.dtype} of shape {list(parameter.shape)} on {parameter.device}"
            raise Left(f"its {name} is {of}, which does not fit the input")
    gates = {} if gate is None else {"gate": known(gate)}
    spec = spec_of_tensors(Tensors(x, **gates, **affine), options)
    if x.device.type == "cuda":
        reason = cutile_refuses(spec, 0, device_of("cuda", x.device.index))
    else:
        reason = spec_refused(spec)
    if x.device.type not in ("cpu", "cuda"):
        reason = f"its input is on {x.device.type}"
    if reason:
        raise Left(reason)


def _is_known(size: int | SymInt) -> bool:
    return isinstance(size, int) or size.node.maybe_as_int() is not None


def same_sizes(a: Sequence[int | SymInt], b: Sequence[int | SymInt]) -> bool:
    """Whether two lists of sizes are equal for all values of their symbols."""
    pairs = zip(a, b, strict=False)
    return len(a) == len(b) and all(statically_known_true(m == n) for m, n in pairs)


def parameter_fits(parameter: Tensor, x: Tensor, dims: int) -> bool:
    """Whether a parameter has one number per element of a row, or per element of each head."""
    by_heads = dims == 1 and parameter.dim() == 2 < x.dim() and all(map(_is_known, parameter.shape))
    if parameter.dim() != dims and not by_heads:
        return False
    return parameter.dtype in PARAMETER_DTYPES and same_sizes(
        parameter.shape, x.shape[x.dim() - parameter.dim() :]
    )


def trailing(x: Tensor | None, dim: object) -> int:
    """The number of dimensions that `dim` names if they are the last ones of x, else 0."""
    named = (dim,) if isinstance(dim, int) else tuple(dim) if isinstance(dim, tuple | list) else ()
    if x is None or not all(isinstance(d, int) and -x.dim() <= d < x.dim() for d in named):
        return 0
    positions = sorted(d % x.dim() for d in named)
    return len(named) if positions == list(range(x.dim() - len(named), x.dim())) else 0
