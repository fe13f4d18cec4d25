"""Match PyTorch's own norms: F.rms_norm, F.layer_norm and aten's fused ops with statistics."""

import operator

from torch.fx import Node

from ...ops.arguments import default_eps
from .calls import bind
from .nodes import Left, name_of, number_of, values_of
from .norms import Gradient, Norm, known, same_sizes

SINGLE = ("rms_norm", "layer_norm")  # their result is the output alone
FORWARD = (*SINGLE, "_fused_rms_norm", "native_layer_norm")
BACKWARD = ("_fused_rms_norm_backward", "native_layer_norm_backward")
# For each result of aten's op: its index among the results of tilenorm's op.
FORWARD_INDICES = {"rms": (0, 3), "layer": (0, 2, 3)}  # output, mean (LayerNorm only), rstd
BACKWARD_INDICES = {"rms": (0, 3), "layer": (0, 3, 4)}  # gradients of input, weight, bias


def match_fused(node: Node) -> Norm | Gradient | None:
    """The norm or gradient that a single node computes, or None if it computes neither.

    Raises Left if the node is a norm that tilenorm's op cannot replace.
    """
    if name_of(node) in FORWARD:
        return _forward(node, bind(node))
    return _backward(node, bind(node)) if name_of(node) in BACKWARD else None


def _forward(node: Node, args: dict) -> Norm:
    norm = _norm_of(node)
    x, eps, dims = known(args["input"]), args["eps"], _dims(args)
    eps = default_eps(x) if eps is None else number_of(eps)
    if eps is None:
        raise Left("its eps is a number that depends on data")
    outputs = {0: node} if name_of(node) in SINGLE else _items(node, FORWARD_INDICES[norm])
    return Norm(
        norm, args["input"], args["weight"], args.get("bias"), dims, eps,
        0.0, "late", outputs, node, (node,),
    )  # fmt: skip


def _backward(node: Node, args: dict) -> Gradient:
    norm = _norm_of(node)
    indices = BACKWARD_INDICES[norm]
    wanted = {index for index, want in zip(indices, args["output_mask"], strict=True) if want}
    present = {0: True, 3: args["weight"] is not None, 4: args.get("bias") is not None}
    mask = tuple(index in wanted and present.get(index, False) for index in range(5))
    return Gradient(
        norm, args["grad_out"], args["input"], args["weight"], args.get("bias"),
        args.get("mean"), args["rstd"], _dims(args), mask, _items(node, indices), node,
    )  # fmt: skip


def _norm_of(node: Node) -> str:
    return "layer" if "layer" in name_of(node) else "rms"


def _dims(args: dict) -> int:
    """The number of dimensions that a call normalises together.

    Raises Left unless they are the input's last ones.
    """
    shape, x = args["normalized_shape"], known(args["input"])
    sizes = values_of(shape) if isinstance(shape, Node) else shape
    if sizes is None:
        raise Left(f"the value of its normalized_shape {shape} is not known")
    sizes = [values_of(size) if isinstance(size, Node) else size for size in sizes]
    last = x.shape[x.dim() - len(sizes) :] if len(sizes) <= x.dim() else ()
    if not sizes or None in sizes or not same_sizes(sizes, last):
        raise Left(f"its normalized_shape is {shape}, the shape of its input {list(x.shape)}")
    return len(sizes)


def _items(node: Node, indices: tuple[int, ...]) -> dict[int, Node]:
    """The getitem nodes of an op's results, by index among the results of tilenorm's op."""
    items = {}
    for user in node.users:
        if user.target is not operator.getitem or user.args[:1] != (node,):
            raise Left(f"{user.name} uses the tuple of its results")
        place = user.args[1] if len(user.args) == 2 and not user.kwargs else None
        if type(place) is not int or not -len(indices) <= place < len(indices):
            raise Left(f"{user.name} reads none of its {len(indices)} results")
        if items.setdefault(indices[place], user) is not user:
            raise Left(f"{user.name} and {items[indices[place]].name} read the same result")
    return items
