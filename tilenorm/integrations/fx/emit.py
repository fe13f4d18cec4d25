"""Insert tilenorm's ops into a graph in place of a norm's nodes; names and metadata are kept."""

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from ...ops.layout import rows_shape
from ...ops.library import norm_backward_fake, norm_fake
from ...ops.sharding import is_distributed
from ...spec import Options
from .nodes import VALUES, Left, erase, is_idle, key_of, operands_of, value_of, values_of, written
from .norms import Gradient, Norm, alike, hidden_of

ATEN = torch.ops.aten
OPS = torch.ops.tilenorm
# Metadata of a node's arguments and results. Inductor compares an op's arguments with those of
# "eager_input_vals".
OF_VALUES = (*VALUES, "tensor_meta", "eager_input_vals")
SUM = 1  # index of the sum among the results of tilenorm::norm


def emit_forward(norm: Norm) -> tuple[str, Node]:
    """Replace a norm, and the sum that it normalises if there is one. Returns the new op's kind,
    and its call.

    Raises Left if a node between the norm's first and last node may write to a tensor: the new op
    reads its inputs at another place of the graph and could read other values.
    """
    if written(norm.parts[0], norm.at, norm.parts):
        raise Left("a node between its operations may write to a tensor")
    order, how = norm.order, (*norm.options, norm.eps, _saves(norm))
    terms = _terms(norm) if order == sorted(order) and norm.gate is None else None
    summed = {**norm.outputs, SUM: norm.x}
    if terms and _moved(norm, terms, how, order, summed):
        terms = None
    if not terms and (reason := _moved(norm, (norm.x, None), how, order, norm.outputs)):
        raise Left(reason)
    at, outputs, parts = norm.at, norm.outputs, norm.parts
    if terms:
        at, outputs, parts = norm.x, summed, (norm.x, *parts)
    x, residual = terms or (norm.x, None)
    with at.graph.inserting_before(at):
        gate = None if norm.gate is None else _permuted(norm.gate, order)
        tensors = (_permuted(x, order), residual, gate, norm.weight, norm.bias)
        call = new_call(OPS.norm.default, norm_fake, (*tensors, *how), norm.at)
        new = {
            old: _result(call, place, old, x, order) if old.users else None
            for place, old in outputs.items()
        }
    take_over(new, (*parts, norm.at))
    return (f"add_{norm.kind}" if terms else norm.kind), call


def emit_backward(norm: Gradient) -> tuple[str, Node]:
    """Replace aten's gradient of a norm. Returns the new op's kind, and its call."""
    with norm.at.graph.inserting_before(norm.at):
        rstd = _rows(norm.rstd, norm)
        mean = None if norm.mean is None else _rows(norm.mean, norm)
        tensors = (norm.dy, None, norm.x, None, norm.weight, norm.bias, mean, rstd)
        hidden = hidden_of(value_of(norm.x), norm.dims)
        # Only second derivatives use eps. aten's op does not have it, so 0.0 stands for it here.
        how = (*Options(hidden, norm.norm), 0.0, False, norm.mask)
        target = OPS.norm_backward.default
        call = new_call(target, norm_backward_fake, (*tensors, *how), norm.at)
        new = {
            old: _result(call, place, old, norm.x) if norm.mask[place] else None
            for place, old in norm.outputs.items()
        }
    take_over(new, (norm.at,))
    return norm.kind, call


def _saves(norm: Norm) -> bool:
    """Whether the op has to return mean and rstd: the graph or a later backward pass uses them."""
    y = norm.outputs.get(0)
    traced_with_gradients = y is not None and key_of(y) == "example_value"
    return not traced_with_gradients or len(norm.outputs) > 1 or value_of(y).requires_grad


def _terms(norm: Norm) -> tuple[Node, Node] | None:
    """The two tensors whose sum is x, if the op can compute the sum at x's place in the graph."""
    terms = operands_of("add", norm.x)
    total = value_of(norm.x)
    if not terms or not total.is_contiguous() or not all(alike(value_of(t), total) for t in terms):
        return None
    late = any(p is not None and norm.x < p for p in (norm.weight, norm.bias))
    return None if late or written(norm.x, norm.at, norm.parts) else terms


def _moved(norm: Norm, terms: tuple, how: tuple, order: list[int], outputs: dict) -> str | None:
    """Why the op would give a DTensor other placements than the node that it replaces, or None.

    The nodes after it were traced for the old placements.
    """
    given: list[Any] = [value_of(node) for node in (*terms, norm.gate, norm.weight, norm.bias)]
    there = [is_distributed(t) for t in given if t is not None]
    if not any(there):
        return None
    if not all(there):
        return "some of its tensors are DTensors, and others are not"
    given[0], given[2] = (None if t is None else t.permute(order) for t in (given[0], given[2]))
    results = list(_values(OPS.norm.default, norm_fake, (*given, *how)))
    results[0] = results[0].permute([order.index(d) for d in range(len(order))])
    for place, node in outputs.items():
        before: Any = value_of(node)
        now, then = results[place].placements, before.placements
        if now != then:
            return f"{node.name} has the placements {then}, and would have {now}"
    return None


def new_call(target, fake, arguments: tuple, like: Node) -> Node:
    """A new call with the metadata of the node `like`, and the values that `fake` computes."""
    call = like.graph.call_function(target, arguments)
    values = [value_of(a) if isinstance(a, Node) else a for a in arguments]
    _describe(call, _values(target, fake, values), like)
    return call


def _values(target, fake, values: Sequence) -> tuple[Tensor, ...]:
    """What `fake` computes, or, of DTensors, the op itself: their placements follow its rules."""
    if not is_distributed(values[0]):
        return fake(*values)
    with torch.no_grad():
        return target(*values)


def derived(target, arguments: tuple, value: Tensor, like: Node, **kwargs) -> Node:
    """A new call that returns one tensor, with the metadata of the node `like`."""
    node = like.graph.call_function(target, arguments, kwargs)
    _describe(node, value, like)
    return node


def _describe(node: Node, value: object, like: Node) -> None:
    rest = {k: v for k, v in like.meta.items() if k not in OF_VALUES}
    node.meta = rest | {key_of(like): value}


def result_of(call: Node, place: int, like: Node) -> Node:
    """One result of a call, with the metadata of the node `like`."""
    return derived(operator.getitem, (call, place), values_of(call)[place], like)


def _result(call: Node, place: int, old: Node, x: Node, order=None) -> Node:
    """One result of an op, in the shape, dtype and layout of the node `old` that it replaces.

    place: the index of the result. order: the order of x's dimensions in which the op was called.
    """
    node, wanted = result_of(call, place, old), value_of(old)
    if order is not None and place == 0:
        node = _permuted(node, [order.index(d) for d in range(len(order))])
    if value_of(node).dim() != wanted.dim():  # mean and rstd have the rows' sizes, aten's x's rank
        node = _viewed(node, wanted.shape, x)
    node = _cast(node, wanted.dtype)
    node.meta = dict(old.meta)
    return node


def _viewed(node: Node, shape: Sequence[int | SymInt], x: Node) -> Node:
    """A view of a node. A symbolic size of the shape is that of x in the same dimension."""
    sizes = [size_of(x, i, size) for i, size in enumerate(shape)]
    return derived(ATEN.view.default, (node, sizes), value_of(node).view(shape), node)


def _cast(node: Node, dtype: torch.dtype) -> Node:
    value = value_of(node)
    if value.dtype == dtype:
        return node
    return derived(ATEN._to_copy.default, (node,), value.to(dtype), node, dtype=dtype)


def _permuted(node: Node, order: list[int]) -> Node:
    if order == sorted(order):
        return node
    value = value_of(node).permute(order)
    return derived(ATEN.permute.default, (node, order), value, node)


def size_of(x: Node, dim: int, size: int | SymInt) -> int | Node:
    if isinstance(size, int):
        return size
    return derived(ATEN.sym_size.int, (x, dim), size, x)


def _rows(statistic: Node, norm: Gradient) -> Node:
    """aten's mean or rstd in the shape and dtype that tilenorm's op takes: of rows, float32."""
    x = value_of(norm.x)
    shape = rows_shape(x.shape, hidden_of(x, norm.dims))
    return _cast(_viewed(statistic, shape, norm.x), torch.float32)


def _exchanged(old: Node, new: Node | None, node: Node) -> Node | None:
    return new if node is old else node


def take_over(new: dict[Node, Node | None], parts: tuple[Node, ...]) -> None:
    """Replace old nodes by new ones (or by None), and erase the nodes that nothing uses any more.

    new: the new node, or None, for each old node. parts: more nodes to erase if unused.
    """
    for old, node in new.items():
        for user in list(old.users):
            change = partial(_exchanged, old, node)
            user.args, user.kwargs = map_arg((user.args, user.kwargs), change)
    for node in sorted({*parts, *new}, reverse=True):
        if all(map(is_idle, node.users)):
            erase(node)
            if new.get(node) is not None:
                new[node].name = node.name
