"""Match PyTorch's own norms: F.rms_norm, F.layer_norm and aten's fused ops with statistics."""

import operator

import torch
from torch.fx import Node

from ...ops.arguments import default_eps
from .nodes import Left, arguments, name_of, number_of
from .norms import Gradient, Norm, known

ATEN = torch.ops.aten
FORWARD_ARGUMENTS = {
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    ATEN._fused_rms_norm.default: ("input", "normalized_shape", "weight", "eps"),
    ATEN.native_layer_norm.default: ("input", "normalized_shape", "weight", "bias", "eps"),
}
BACKWARD_ARGUMENTS = {
    ATEN._fused_rms_norm_backward.default: (
        *("grad_out", "input", "normalized_shape", "rstd", "weight", "output_mask"),
    ),
    ATEN.native_layer_norm_backward.default: (
        *("grad_out", "input", "normalized_shape", "mean", "rstd", "weight", "bias"),
        "output_mask",
    ),
}
# For each result of aten's op: its index among the results of tilenorm's op.
FORWARD_INDICES = {"rms": (0, 3), "layer": (0, 2, 3)}  # output, mean (LayerNorm only), rstd
BACKWARD_INDICES = {"rms": (0, 3), "layer": (0, 3, 4)}  # gradients of input, weight, bias


def match_fused(node: Node) -> Norm | Gradient | None:
    """The norm or gradient that a single node computes, or None if it computes neither.

    Raises Left if the node is a norm that tilenorm's op cannot replace.
    """
    single = name_of(node) in ("rms_norm", "layer_norm")
    names = FORWARD_ARGUMENTS.get(name_of(node) if single else node.target)
    if names is not None:
        return _forward(node, arguments(node, *names), single)
    names = BACKWARD_ARGUMENTS.get(node.target)
    return None if names is None else _backward(node, arguments(node, *names))


def _forward(node: Node, args: dict, single: bool) -> Norm:
    norm = _norm_of(node)
    eps = args.get("eps", 1e-5 if norm == "layer" else None)
    eps = default_eps(known(args["input"])) if eps is None else number_of(eps)
    if eps is None:
        raise Left("its eps is a tensor")
    outputs = {0: node} if single else _items(node, FORWARD_INDICES[norm])
    return Norm(
        norm, args["input"], args.get("weight"), args.get("bias"), _dims(args), eps,
        0.0, "late", outputs, node, (node,),
    )  # fmt: skip


def _backward(node: Node, args: dict) -> Gradient:
    norm = _norm_of(node)
    indices = BACKWARD_INDICES[norm]
    wanted = {index for index, want in zip(indices, args["output_mask"], strict=True) if want}
    present = {0: True, 3: args.get("weight") is not None, 4: args.get("bias") is not None}
    mask = tuple(index in wanted and present.get(index, False) for index in range(5))
    return Gradient(
        norm, args["grad_out"], args["input"], args.get("weight"), args.get("bias"),
        args.get("mean"), args["rstd"], _dims(args), mask, _items(node, indices), node,
    )  # fmt: skip


def _norm_of(node: Node) -> str:
    return "layer" if "layer" in name_of(node) else "rms"


def _dims(args: dict) -> int:
    shape = args["normalized_shape"]
    return len(shape) if isinstance(shape, tuple | list) else 1


def _items(node: Node, indices: tuple[int, ...]) -> dict[int, Node]:
    """The getitem nodes of an op's results, by index among the results of tilenorm's op."""
    items = {}
    for user in node.users:
        if user.target is not operator.getitem:
            raise Left(f"{user.name} uses the tuple of its results")
        items[indices[user.args[1]]] = user
    return items
