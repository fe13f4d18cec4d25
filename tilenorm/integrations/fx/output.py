"""Outputs: the backward pass writes y again, so that the forward pass's y need not be saved.

What the backward pass reads of y, it then reads of the output of tilenorm::norm_backward, whose
inputs are saved in any case. The partitioner of AOTAutograd saves what the backward pass reads.
"""

import operator
from collections.abc import Iterator

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ...ops.library import Backward
from ...ops.plans import spec_of_tensors
from ...spec import Options
from .calls import bind
from .emit import derived
from .gradient import Call, before_detach, item_of
from .nodes import DETACHES, Left, key_of, name_of, value_of, values_of, writes
from .norms import known

NORM = torch.ops.tilenorm.norm.default
SUM, RSTD, OUTPUT = 1, 3, 5  # indices among the results of the two ops
VIEWS = ("view", "reshape", "_unsafe_view", "permute", "transpose", "t", "unsqueeze", "squeeze")
VIEWS += DETACHES
# Results that are saved for the backward pass, and not computed again from what they are made of.
SAVED = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm", "_grouped_mm")
ATTENTION = "_scaled_dot_product"
# What the forward and the backward call of a norm have in common.
COMMON = ("gate", "weight", "bias", *Options._fields, "eps")


class Outputs:
    """The norms of a joint graph of forward and backward.

    of_tangents: the nodes that depend on the gradients that come into the graph, which are those of
    the backward pass.
    """

    def __init__(self, graph: Graph):
        self.of_tangents: set[Node] = set()
        for node in graph.nodes:
            is_tangent = node.op == "placeholder" and "tangents" in str(node.target)
            if is_tangent or not self.of_tangents.isdisjoint(node.all_input_nodes):
                self.of_tangents.add(node)

    def fold(self, call: Call) -> str | None:
        """Have the backward pass read the output of a gradient in the place of y.

        Returns None if it does not read y. Raises Left if y would be saved all the same, or if the
        gradient cannot have the bits of y.
        """
        norm = _norm_of(call)
        if norm is None:
            return None
        returned = self._returned(norm)
        reads = list(self._reads(norm))
        if not reads:
            return None
        if returned:
            raise Left(f"{returned} is a result of the graph")
        if any(tag in norm.meta for tag in ("recompute", "ac_graph_id")):
            raise Left("its forward pass is computed again, and y is not saved")
        of_values = Backward.of(call.values)
        if why := spec_of_tensors(of_values.tensors, of_values.options).output_refused:
            raise Left(f"its backward pass writes no y for {why}")
        later = self._later(call, {reader for _, reader in reads})
        values, y = values_of(call.node), known(_items(norm, 0)[0])
        if not isinstance(values, tuple | list) or len(values) != OUTPUT + 1:
            raise Left("its results are not those of the op")
        call.change(output=True)
        call.node.meta[key_of(call.node)] = (*values[:OUTPUT], y)
        _replace(call, reads, later)
        return "output"

    def _reads(self, norm: Node) -> Iterator[tuple[tuple[Node, ...], Node]]:
        """What the backward pass reads of y: y or a view of it, with the views on the way to it."""
        stack = [(item,) for item in _items(norm, 0)]
        while stack:
            path = stack.pop()
            for user in path[-1].users:
                if user.op == "call_function" and user in self.of_tangents:
                    yield path, user
                elif name_of(user) in VIEWS:
                    stack.append((*path, user))

    def _returned(self, norm: Node) -> Node | None:
        """A result of the graph that is y or a view of y, or None.

        Raises Left if the backward pass reads what is made of y: it is computed again from y.
        """
        returned, seen, stack = None, set(), [(item, True) for item in _items(norm, 0)]
        while stack:
            node, is_view = stack.pop()
            for user in node.users:
                if user.op == "output":
                    returned = node if is_view else returned
                elif user in self.of_tangents and not is_view:
                    raise Left(f"the backward pass reads {node.name}, which is made of y")
                elif user not in self.of_tangents and user not in seen and not _is_saved(user):
                    seen.add(user)
                    stack.append((user, is_view and name_of(user) in VIEWS))
        return returned

    def _later(self, call: Call, readers: set[Node]) -> list[Node]:
        """The readers, and the nodes that depend on them, that stand before the gradient.

        Raises Left if the gradient depends on one of them.
        """
        later, node = [], min(readers)
        moved = set()
        while node is not call.node and node.op not in ("output", "root"):
            if node in readers or not moved.isdisjoint(node.all_input_nodes):
                if writes(node):
                    raise Left(f"{node.name}, which would be moved, may write to a tensor")
                moved.add(node)
                later.append(node)
            node = node.next
        if node is call.node and not moved.isdisjoint(node.all_input_nodes):
            raise Left(f"{min(readers).name} reads y before this gradient is computed")
        return later if node is call.node else []


def _norm_of(call: Call) -> Node | None:
    """The forward pass whose rstd a gradient reads, if both have the same arguments."""
    norm, place = item_of(before_detach(call.arguments["rstd"]))
    if norm is None or norm.target is not NORM or place != RSTD:
        return None
    arguments, x = bind(norm), before_detach(call.arguments["input"])
    if arguments["residual"] is not None:
        same = item_of(x) == (norm, SUM)
    else:
        same = isinstance(arguments["input"], Node) and before_detach(arguments["input"]) is x
    return norm if same and all(arguments[n] == call.arguments[n] for n in COMMON) else None


def _items(node: Node, place: int) -> list[Node]:
    return [user for user in node.users if item_of(user) == (node, place)]


def _is_saved(node: Node) -> bool:
    """Whether a node's result is saved for the backward pass, or made by no op of PyTorch's."""
    name = name_of(node)
    if name is None or not isinstance(node.target, OpOverload):
        return node.target is not operator.getitem
    return name in SAVED or name.startswith(ATTENTION)


def _replace(call: Call, reads: list[tuple[tuple[Node, ...], Node]], later: list[Node]) -> None:
    """Have readers read views of the gradient's output, and stand after it."""
    graph, node = call.node.graph, call.node
    with graph.inserting_after(node):
        last = derived(graph, operator.getitem, (node, OUTPUT), values_of(node)[OUTPUT], node)
    new = {path[0]: last for path, _ in reads}
    for path, reader in reads:
        for view in path[1:]:
            if view not in new:
                args, kwargs = map_arg((view.args, view.kwargs), lambda n: new.get(n, n))
                with graph.inserting_after(last):
                    last = derived(graph, view.target, args, value_of(view), node, **kwargs)
                new[view] = last
        reader.replace_input_with(path[-1], new[path[-1]])
    for moved in later:
        last.append(moved)
        last = moved
