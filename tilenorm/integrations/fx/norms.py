"""Norm and Gradient: descriptions of a norm in a graph, and checks that tilenorm supports it.

match_fused reads them from calls of PyTorch's own norms: F.rms_norm, F.layer_norm, and aten's fused
ops with statistics.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import SymInt, Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import is_concrete_int, statically_known_true

from ...ops.arguments import default_eps
from ...ops.passes.registry import DTYPES
from ...spec import Options
from .calls import Tensors, arguments_of, check_served
from .nodes import Left, bind, item_of, name_of, number_of, value_of, values_of

PARAMETER_DTYPES = tuple(getattr(torch, name) for name in DTYPES)
SINGLE = ("rms_norm", "layer_norm")  # their result is the output alone
FORWARD = (*SINGLE, "_fused_rms_norm", "native_layer_norm")
BACKWARD = ("_fused_rms_norm_backward", "native_layer_norm_backward")
# For each result of aten's ops: its name among the results of tilenorm's op.
OUTPUTS = {"rms": ("output", "rstd"), "layer": ("output", "mean", "rstd")}
GRADIENTS = ("grad_input", "grad_weight", "grad_bias")  # the last one is LayerNorm's


class Rotation(NamedTuple):
    """How the heads are rotated that a norm gives: see rotation.py.

    cos, sin: (batch or 1, tokens, columns), or with a size of 1 for heads. heads: the dimension of
    heads of what is rotated. swapped: whether the input has the tokens before the heads, and what
    is rotated has not. contiguous: whether the result is contiguous; if not, it is with the heads
    behind the tokens.
    """

    cos: Node
    sin: Node
    heads: int
    swapped: bool
    contiguous: bool


class Allowed(NamedTuple):
    """What the pass may do besides keeping all results, as in replace_norms."""

    rounds_once: bool = False
    rotation: bool = False
    inexact: bool = False


@dataclass(frozen=True)
class Norm:
    """The norm of x over its last `dims` dimensions.

    Attributes:
        outputs: the nodes of output, mean and rstd, by their names.
        at: tilenorm's op goes to this node's place in the graph and takes over its metadata.
        parts: the nodes that compute the norm. Those that nothing else uses are erased.
        mod_scale, mod_shift: what scales and shifts the norm by group: see term.py.
        rounds_once: whether the op may round once where the graph rounds several times.
        apart: the node behind the norm that modulates or rotates it and that no op takes over, and
            the reason. rotation: if the op rotates the heads too.
    """

    options: Options
    x: Node
    weight: Node | None
    bias: Node | None
    dims: int
    eps: float
    outputs: dict[str, Node]
    at: Node
    parts: tuple[Node, ...]
    gate: Node | None = None
    mod_scale: Node | None = None
    mod_shift: Node | None = None
    rounds_once: bool = False
    apart: tuple[str, str] | None = None
    rotation: Rotation | None = None

    @property
    def kind(self) -> str:
        name = f"{self.options.norm}_norm"
        if self.rotation is not None:
            return f"{name}_rope"
        if self.mod_scale is not None:
            return f"modulated_{name}"
        return name if self.gate is None else f"gated_{name}"

    @property
    def order(self) -> list[int]:
        """The output's dimensions in memory order, with the normalised dimensions last.

        Elementwise operations give their output the memory order of their input, which may be a
        transposed view (queries and keys often are). tilenorm's output is always contiguous.
        """
        y = known(self.outputs.get("output", self.x))
        by_heads = self.weight is not None and known(self.weight).dim() > self.dims
        apart = by_heads or len(self.outputs) > 1 or self.mod_scale is not None
        if y.is_contiguous() or apart:
            return list(range(y.dim()))
        rows = sorted(range(y.dim() - self.dims), key=y.stride, reverse=True)
        return [*rows, *range(y.dim() - self.dims, y.dim())]

    def check(self) -> None:
        """Raise Left, with the reason, if tilenorm's op would give another result."""
        x = known(self.x)
        for name, node in self.outputs.items():
            if name == "output":
                check_shape(name, known(node), x.shape)
                check_layout(name, known(node).permute(self.order), x)
            else:
                check_shape("statistic", known(node), statistic_shape(x, self.dims))
        check_tensors(self.tensors, self.dims, self.options)

    @property
    def tensors(self) -> Tensors:
        affine, by_group = (self.weight, self.bias), (self.mod_scale, self.mod_shift)
        return Tensors(self.x, None, self.gate, *affine, *by_group)


@dataclass(frozen=True)
class Gradient:
    """The gradients of a norm, by aten's op. outputs, at: as in Norm. wanted: the names of those to
    compute.
    """

    options: Options
    dy: Node
    x: Node
    weight: Node | None
    bias: Node | None
    mean: Node | None
    rstd: Node
    dims: int
    wanted: frozenset[str]
    outputs: dict[str, Node]
    at: Node

    @property
    def kind(self) -> str:
        return f"{self.options.norm}_norm_backward"

    def check(self) -> None:
        """Raise Left, with the reason, if tilenorm's op would give another result."""
        x, dy = known(self.x), known(self.dy)
        if dy.dtype != x.dtype:
            raise Left(f"its incoming gradient is {dy.dtype}, its input {x.dtype}")
        check_shape("incoming gradient", dy, x.shape)
        for name, node in (("mean", self.mean), ("rstd", self.rstd)):
            if node is not None:
                check_shape(name, known(node), statistic_shape(x, self.dims))
        likes = {"grad_input": self.x, "grad_weight": self.weight, "grad_bias": self.bias}
        for name in self.wanted & self.outputs.keys():
            like, output = likes[name], known(self.outputs[name])
            check_shape(f"gradient of {like}", output, known(like).shape)
            if like is self.x:
                check_layout("gradient", output, x)
        tensors = Tensors(self.x, weight=self.weight, bias=self.bias)
        check_tensors(tensors, self.dims, self.options)


def known(node: object) -> Tensor:
    """The fake tensor of a node. Raises Left if tracing stored none."""
    value = value_of(node)
    if value is None:
        raise Left(f"{node} has no shape and dtype in its metadata, or is of another tensor class")
    return value


def check_layout(name: str, result: Tensor, x: Tensor) -> None:
    """Raise Left if a result is not contiguous, as tilenorm's are, or has another dtype than x."""
    if result.dtype != x.dtype:
        raise Left(f"its {name} is {result.dtype}, its input {x.dtype}")
    if not result.is_contiguous():
        raise Left(f"its {name} is not contiguous")


def check_shape(name: str, value: Tensor, expected: Sequence[int | SymInt]) -> None:
    """Raise Left if a value does not have the shape that PyTorch's op takes or gives."""
    if not same_sizes(value.shape, expected):
        raise Left(f"its {name} has the shape {list(value.shape)}, not {list(expected)}")


def check_tensors(nodes: Tensors, dims: int, options: Options) -> None:
    x, affine = known(nodes.input), ("weight", "bias")
    tensors = {name: known(node) for name, node in nodes._asdict().items() if node is not None}
    for name, tensor in tensors.items():
        if name == "gate":
            check_shape(name, tensor, x.shape)
            if tensor.device != x.device:
                raise Left(f"its gate is on {tensor.device}, its input on {x.device}")
        elif name in affine and not (parameter_fits(tensor, x, dims) and tensor.device == x.device):
            of = f"{tensor.dtype} of shape {list(tensor.shape)} on {tensor.device}"
            raise Left(f"its {name} is {of}, which does not fit the input")
    check_served(*arguments_of(nodes, options))


def statistic_shape(x: Tensor, dims: int) -> tuple[int | SymInt, ...]:
    """The shape of aten's statistics: the normalised dimensions are ones."""
    return (*x.shape[: x.dim() - dims], *[1] * dims)


def hidden_of(x: Tensor, dims: int) -> int:
    """The number of elements normalised together. Raises Left if it is not known."""
    sizes = x.shape[x.dim() - dims :]
    if not all(map(is_concrete_int, sizes)):
        raise Left("the number of elements that it normalises together is symbolic")
    return math.prod(map(int, sizes))


def same_sizes(a: Sequence[int | SymInt], b: Sequence[int | SymInt]) -> bool:
    """Whether two lists of sizes are equal for all values of their symbols."""
    pairs = zip(a, b, strict=False)
    return len(a) == len(b) and all(statically_known_true(m == n) for m, n in pairs)


def is_of_size_one(size: int | SymInt) -> bool:
    """Whether a size is 1 for all values of its symbols."""
    return statically_known_true(size == 1)


def alike(value: Tensor | None, like: Tensor) -> bool:
    """Whether a tensor has the dtype, the device and the shape of another one."""
    if value is None or (value.dtype, value.device) != (like.dtype, like.device):
        return False
    return same_sizes(value.shape, like.shape)


def parameter_fits(parameter: Tensor, x: Tensor, dims: int) -> bool:
    """Whether a parameter has one number per element of a row, or per element of each head."""
    by_heads = (
        dims == 1 and parameter.dim() == 2 < x.dim() and all(map(is_concrete_int, parameter.shape))
    )
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


def match_fused(node: Node) -> Norm | Gradient | None:
    """The norm or gradient that a single node computes, or None if it computes neither. Raises Left
    if the node is a norm that tilenorm's op cannot replace.
    """
    name = name_of(node)
    if name not in (*FORWARD, *BACKWARD):
        return None
    args, norm = bind(node), "layer" if "layer" in name else "rms"
    x, weight, bias, dims = args["input"], args["weight"], args.get("bias"), _dims(args)
    options = Options(hidden_of(known(x), dims), norm)
    if name in BACKWARD:
        masked = zip(GRADIENTS, (x, weight, bias), args["output_mask"], strict=False)
        wanted = frozenset(name for name, like, want in masked if want and like is not None)
        dy, mean, rstd = args["grad_out"], args.get("mean"), args["rstd"]
        outputs = _items(node, GRADIENTS[: 3 if norm == "layer" else 2])
        return Gradient(options, dy, x, weight, bias, mean, rstd, dims, wanted, outputs, node)
    eps = default_eps(known(x)) if args["eps"] is None else number_of(args["eps"])
    if eps is None:
        raise Left("its eps is a number that depends on data")
    outputs = {"output": node} if name in SINGLE else _items(node, OUTPUTS[norm])
    return Norm(options, x, weight, bias, dims, eps, outputs, node, (node,))


def _dims(args: dict) -> int:
    """How many dimensions a call normalises. Raises Left unless they are the last ones."""
    shape, x = args["normalized_shape"], known(args["input"])
    sizes = values_of(shape) if isinstance(shape, Node) else shape
    if not isinstance(sizes, tuple | list):
        raise Left(f"the value of its normalized_shape {shape} is not known")
    sizes = [values_of(size) if isinstance(size, Node) else size for size in sizes]
    normalized = x.shape[x.dim() - len(sizes) :] if len(sizes) <= x.dim() else ()
    if not sizes or None in sizes or not same_sizes(sizes, normalized):
        raise Left(f"its normalized_shape is {shape}, the shape of its input {list(x.shape)}")
    return len(sizes)


def _items(node: Node, names: tuple[str, ...]) -> dict[str, Node]:
    """The getitem nodes of an op's results, by the results' names."""
    items = {}
    for user in node.users:
        source, place = item_of(user)
        if source is not node:
            raise Left(f"{user.name} uses the tuple of its results")
        if place not in range(len(names)) or names[place] in items:
            raise Left(f"{user.name} reads none of its results, or one that is read already")
        items[names[place]] = user
    return items
