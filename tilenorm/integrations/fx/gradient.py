"""Call: a node that calls tilenorm::norm_backward, with its arguments and results by name."""

import operator

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_aggregate

from ...ops.sharding import is_distributed
from .calls import bind
from .nodes import DETACHES, Left, is_idle, name_of, value_of, values_of
from .norms import same_sizes

NORM_BACKWARD = torch.ops.tilenorm.norm_backward.default
TENSORS = tuple(a.name for a in NORM_BACKWARD._schema.arguments if "Tensor" in str(a.type))
EAGER_VALUES = "eager_input_vals"  # what Inductor compares an op's arguments with


class Call:
    """A call of tilenorm::norm_backward.

    arguments: all of them by name. Raises Left if they do not fit the op's schema, if a tensor has
    no metadata, or if the node has a tag of activation checkpointing.
    """

    def __init__(self, node: Node):
        if any(tag in node.meta for tag in ("recompute", "ac_graph_id")):
            raise Left("it is part of a forward pass that is computed again")
        self.node, self.arguments = node, bind(node)
        for name in TENSORS:
            tensor = self.arguments[name]
            if tensor is not None and value_of(tensor) is None:
                raise Left(f"its argument {name!r} is {tensor}, of which no shape is known")

    def change(self, **arguments: object) -> None:
        """Change some arguments, and the metadata of the arguments."""
        node = self.node
        self.arguments |= arguments
        node.args, node.kwargs = tuple(self.arguments.values()), {}
        if EAGER_VALUES in node.meta:
            node.meta[EAGER_VALUES] = (self.values, {})

    @property
    def values(self) -> tuple[object, ...]:
        """The traced values of the arguments."""
        arguments = tuple(self.arguments.values())
        return map_aggregate(arguments, lambda a: values_of(a) if isinstance(a, Node) else a)

    def reads(self, node: Node) -> int:
        """How many of the arguments are a node."""
        return sum(argument is node for argument in self.arguments.values())

    def results(self, place: int) -> list[Node]:
        """The nodes that read one result and that other nodes use."""
        return [
            user
            for user in self.node.users
            if item_of(user) == (self.node, place) and not is_idle(user) and user.users
        ]


def operands_of_sum(node: object, like: Tensor) -> tuple[Node, ...]:
    """The two tensors whose sum a node is, if they and the sum are contiguous and as `like`."""
    if not isinstance(node, Node) or node.target is not torch.ops.aten.add.Tensor:
        return ()
    first, second, alpha = bind(node).values()
    values = [value_of(n) for n in (node, first, second)]
    if alpha != 1 or not all(v is not None and _is_as(v, like) for v in values):
        return ()
    return first, second


def before_detach(node: Node) -> Node:
    """The node before those that give the same tensor to autograd."""
    while name_of(node) in DETACHES and isinstance(bind(node)["self"], Node):
        node = bind(node)["self"]
    return node


def item_of(node: Node) -> tuple[Node | None, int | None]:
    """The tuple that a node reads a result of, and the result's index; None for other nodes."""
    if node.target is not operator.getitem or len(node.args) != 2:
        return None, None
    source, place = node.args
    return (source, place) if isinstance(source, Node) else (None, None)


def _is_as(value: Tensor, like: Tensor) -> bool:
    if (value.dtype, value.device) != (like.dtype, like.device) or is_distributed(value):
        return False
    return same_sizes(value.shape, like.shape) and _is_contiguous(value)


def _is_contiguous(value: Tensor) -> bool:
    """Whether a tensor is contiguous for all values of its symbols. Adds no guard."""
    stride = 1
    for size, actual in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not statically_known_true(size == 1) and not statically_known_true(actual == stride):
            return False
        stride = stride * size
    return True
