"""Calls of tilenorm's ops in the place of a norm's nodes, under these nodes' names and metadata."""

import operator

import torch
from torch import SymInt, Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ...ops.library import norm_backward_fake, norm_fake
from ...spec import Options
from .nodes import (
    VALUES,
    Left,
    erase,
    is_idle,
    key_of,
    name_of,
    operands,
    value_of,
    values_of,
    writes,
)
from .norms import Gradient, Norm, hidden_of

ATEN = torch.ops.aten
OPS = torch.ops.tilenorm
SUM = 1  # its place among what tilenorm::norm returns


def emit_forward(graph: Graph, norm: Norm) -> str:
    """Replaces a norm, with the sum that it is of if there is one. The kind of what is there now.

    Raises Left if moving the reading of its inputs would change what is read.
    """
    if _written(norm.parts[0], norm.at, norm.parts):
        raise Left("a tensor is written to among its operations")
    order = norm.order
    terms = _terms(norm) if order == sorted(order) else None
    at, outputs, parts = norm.at, norm.outputs, norm.parts
    if terms:
        at, outputs, parts = norm.x, {**outputs, SUM: norm.x}, (norm.x, *parts)
    x, residual = terms or (norm.x, None)
    hidden = hidden_of(value_of(x), norm.dims)
    options = Options(hidden, norm.norm, norm.offset, rounding=norm.rounding)
    how = (*options, norm.eps, _saves(norm))
    with graph.inserting_before(at):
        tensors = (_permuted(graph, x, order), residual, None, norm.weight, norm.bias)
        call = _call(graph, OPS.norm.default, norm_fake, (*tensors, *how), norm.at)
        new = {
            old: _result(graph, call, place, old, x, order) if old.users else None
            for place, old in outputs.items()
        }
    _take_over(graph, new, (*parts, norm.at))
    return f"add_{norm.kind}" if terms else norm.kind


def emit_backward(graph: Graph, norm: Gradient) -> str:
    """Replaces aten's gradient of a norm; its kind."""
    with graph.inserting_before(norm.at):
        rstd = _rows(graph, norm.rstd)
        mean = None if norm.mean is None else _rows(graph, norm.mean)
        tensors = (norm.dy, None, norm.x, None, norm.weight, norm.bias, mean, rstd)
        hidden = hidden_of(value_of(norm.x), norm.dims)
        # Only second derivatives use eps, and aten's op has none.
        how = (*Options(hidden, norm.norm), 0.0, False, norm.mask)
        target = OPS.norm_backward.default
        call = _call(graph, target, norm_backward_fake, (*tensors, *how), norm.at)
        new = {
            old: _result(graph, call, place, old, norm.x) if norm.mask[place] else None
            for place, old in norm.outputs.items()
        }
    _take_over(graph, new, (norm.at,))
    return norm.kind


def _saves(norm: Norm) -> bool:
    """Whether the op has to save mean and rstd: they are used, or may be for a gradient."""
    y = norm.outputs.get(0)
    traced_with_gradients = y is not None and key_of(y) == "example_value"
    return not traced_with_gradients or len(norm.outputs) > 1 or value_of(y).requires_grad


def _terms(norm: Norm) -> tuple[Node, Node] | None:
    """The two tensors that x is the sum of, if the op can make the sum where it is made now."""
    terms = operands(norm.x) if name_of(norm.x) == "add" else ()
    values = [value_of(node) for node in (norm.x, *terms)]
    if len(values) != 3 or any(v is None for v in values) or not values[0].is_contiguous():
        return None
    total, *added = values
    if any((v.dim(), v.dtype, v.device) != (total.dim(), total.dtype, total.device) for v in added):
        return None
    if any(v.shape != total.shape for v in added):
        return None
    late = any(p is not None and norm.x < p for p in (norm.weight, norm.bias))
    return None if late or _written(norm.x, norm.at, norm.parts) else terms


def _written(first: Node, last: Node, parts: tuple[Node, ...]) -> bool:
    """Whether a node between two that is none of the parts may write to a tensor."""
    while first is not last:
        if writes(first) and first not in parts:
            return True
        first = first.next
    return False


def _call(graph: Graph, target, fake, arguments: tuple, like: Node) -> Node:
    """A call with the metadata of a node, and values of its own."""
    call = graph.call_function(target, arguments)
    values = [value_of(a) if isinstance(a, Node) else a for a in arguments]
    _describe(call, fake(*values), like)
    return call


def _derived(graph: Graph, target, arguments: tuple, value: Tensor, like: Node, **kwargs) -> Node:
    """A call that gives one tensor, with the metadata of the node it is for."""
    node = graph.call_function(target, arguments, kwargs)
    _describe(node, value, like)
    return node


def _describe(node: Node, value: object, like: Node) -> None:
    rest = {k: v for k, v in like.meta.items() if k not in (*VALUES, "tensor_meta")}
    node.meta = rest | {key_of(like): value}


def _result(graph: Graph, call: Node, place: int, old: Node, x: Node, order=None) -> Node:
    """What an op returns in a place, in the shape, dtype and layout of the node it stands for.

    order: of x's dimensions as the op has them.
    """
    value, wanted = values_of(call)[place], value_of(old)
    node = _derived(graph, operator.getitem, (call, place), value, old)
    if order is not None and place == 0:
        node = _permuted(graph, node, [order.index(d) for d in range(len(order))])
    if value.dim() != wanted.dim():  # mean and rstd, of x's leading dimensions
        sizes = [_size(graph, x, i, size) for i, size in enumerate(wanted.shape)]
        value = value.view(wanted.shape)
        node = _derived(graph, ATEN.view.default, (node, sizes), value, old)
    if value.dtype != wanted.dtype:
        target = ATEN._to_copy.default
        node = _derived(graph, target, (node,), wanted, old, dtype=wanted.dtype)
    node.meta = dict(old.meta)
    return node


def _permuted(graph: Graph, node: Node, order: list[int]) -> Node:
    if order == sorted(order):
        return node
    value = value_of(node).permute(order)
    return _derived(graph, ATEN.permute.default, (node, order), value, node)


def _size(graph: Graph, x: Node, dim: int, size: int | SymInt) -> int | Node:
    if isinstance(size, int):
        return size
    return _derived(graph, ATEN.sym_size.int, (x, dim), size, x)


def _rows(graph: Graph, statistic: Node) -> Node:
    """A mean or rstd of aten's as tilenorm's op takes it: (rows,), float32."""
    value = value_of(statistic).view(-1)
    node = _derived(graph, ATEN.view.default, (statistic, [-1]), value, statistic)
    if value.dtype != torch.float32:
        target, value = ATEN._to_copy.default, value.float()
        node = _derived(graph, target, (node,), value, statistic, dtype=torch.float32)
    return node


def _take_over(graph: Graph, new: dict[Node, Node | None], parts: tuple[Node, ...]) -> None:
    """New nodes, or None, in the place of old ones, and what nobody uses any more is erased."""
    for old, node in new.items():
        for user in list(old.users):
            user.args, user.kwargs = map_arg(
                (user.args, user.kwargs), lambda n, old=old, node=node: node if n is old else n
            )
    for node in sorted({*parts, *new}, reverse=True):
        if all(map(is_idle, node.users)):
            erase(graph, node)
            if new.get(node) is not None:
                new[node].name = node.name
