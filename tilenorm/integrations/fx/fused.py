"""PyTorch's own norms: functions with one output, and aten's ops with saved statistics."""

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
# Where tilenorm's ops return what aten's return.
FORWARD_PLACES = {"rms": (0, 3), "layer": (0, 2, 3)}  # output, mean and rstd
BACKWARD_PLACES = {"rms": (0, 3), "layer": (0, 3, 4)}  # gradients of input, weight and bias


def fused(node: Node) -> Norm | Gradient | None:
    """The norm or gradient that a node is by itself, or None. Raises Left if it cannot be read."""
    single = name_of(node) in ("rms_norm", "layer_norm")
    names = FORWARD_ARGUMENTS.get(name_of(node) if single else node.target)
    if names is not None:
        return _forward(node, arguments(node, *names), single)
    names = BACKWARD_ARGUMENTS.get(node.target)
    return None if names is None else _backward(node, arguments(node, *names))


def _forward(node: Node, given: dict, single: bool) -> Norm:
    norm = _norm_of(node)
    eps = given.get("eps", 1e-5 if norm == "layer" else None)
    eps = default_eps(known(given["input"])) if eps is None else number_of(eps)
    if eps is None:
        raise Left("its eps is a tensor")
    outputs = {0: node} if single else _items(node, FORWARD_PLACES[norm])
    return Norm(
        norm, given["input"], given.get("weight"), given.get("bias"), _dims(given), eps,
        0.0, "late", outputs, node, (node,),
    )  # fmt: skip


def _backward(node: Node, given: dict) -> Gradient:
    norm = _norm_of(node)
    places = BACKWARD_PLACES[norm]
    asked = {place for place, want in zip(places, given["output_mask"], strict=True) if want}
    present = {0: True, 3: given.get("weight") is not None, 4: given.get("bias") is not None}
    mask = tuple(place in asked and present.get(place, False) for place in range(5))
    return Gradient(
        norm, given["grad_out"], given["input"], given.get("weight"), given.get("bias"),
        given.get("mean"), given["rstd"], _dims(given), mask, _items(node, places), node,
    )  # fmt: skip


def _norm_of(node: Node) -> str:
    return "layer" if "layer" in name_of(node) else "rms"


def _dims(given: dict) -> int:
    shape = given["normalized_shape"]
    return len(shape) if isinstance(shape, tuple | list) else 1


def _items(node: Node, places: tuple[int, ...]) -> dict[int, Node]:
    """The nodes that take an op's results, by the place of each among those of tilenorm's op."""
    found = {}
    for user in node.users:
        if user.target is not operator.getitem:
            raise Left(f"its results are used together, by {user.name}")
        found[places[user.args[1]]] = user
    return found
