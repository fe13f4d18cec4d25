"""Insert tilenorm's ops into a graph in place of a norm's nodes; names and metadata are kept."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import SymInt
from torch.fx import Node
from torch.fx.node import map_arg

from ...ops.layout import rows_shape
from ...ops.sharding import is_distributed
from . import calls
from .calls import Tensors, derived, result_of
from .nodes import Left, erase, is_idle, key_of, operands_of, value_of, written
from .norms import Gradient, Norm, alike

ATEN = torch.ops.aten


def emit_forward(norm: Norm) -> str:
    """Replace a norm, and the sum that it normalises if there is one. Returns the new op's kind.

    Raises Left if a node between the norm's first and last node may write to a tensor: the new op
    reads its inputs at another place of the graph and could read other values.
    """
    if written(norm.parts[0], norm.at, norm.parts):
        raise Left("a node between its operations may write to a tensor")
    order, at, parts, outputs = norm.order, norm.at, norm.parts, norm.outputs
    tensors = Tensors(norm.x, None, norm.gate, norm.weight, norm.bias)
    terms = _terms(norm) if order == sorted(order) and norm.gate is None else None
    with_sum = {**outputs, "residual_out": norm.x}
    if terms and not _moved(norm, tensors._replace(input=terms[0], residual=terms[1]), with_sum):
        tensors = tensors._replace(input=terms[0], residual=terms[1])
        at, parts, outputs = norm.x, (norm.x, *parts), with_sum
    elif reason := _moved(norm, tensors, outputs):
        raise Left(reason)
    with at.graph.inserting_before(at):
        of_rows = {name: _permuted(getattr(tensors, name), order) for name in ("input", "gate")}
        tensors = tensors._replace(**of_rows)
        call = calls.norm(norm.at, tensors, norm.options, norm.eps, _saves(norm))
        new = {
            old: _result(call, name, old, norm.x, order) if old.users else None
            for name, old in outputs.items()
        }
    _take_over(new, (*parts, norm.at))
    return norm.kind if tensors.residual is None else f"add_{norm.kind}"


def emit_backward(norm: Gradient) -> str:
    """Replace aten's gradient of a norm. Returns the new op's kind."""
    with norm.at.graph.inserting_before(norm.at):
        rstd = _rows(norm.rstd, norm)
        mean = None if norm.mean is None else _rows(norm.mean, norm)
        saved = {"input": norm.x, "weight": norm.weight, "bias": norm.bias}
        saved |= {"mean": mean, "rstd": rstd}
        call = calls.norm_backward(norm.at, norm.dy, saved, norm.options, norm.wanted)
        new = {
            old: _result(call, name, old, norm.x) if name in norm.wanted else None
            for name, old in norm.outputs.items()
        }
    _take_over(new, (norm.at,))
    return norm.kind


def _saves(norm: Norm) -> bool:
    """Whether the op has to return mean and rstd: the graph or a later backward pass uses them."""
    y = norm.outputs.get("output")
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


def _moved(norm: Norm, tensors: Tensors, outputs: dict[str, Node]) -> str | None:
    """Why the op would give a DTensor other placements than the node that it replaces, or None.

    The nodes after it were traced for the old placements.
    """
    given: list[Any] = [value_of(node) for node in tensors]
    there = [is_distributed(t) for t in given if t is not None]
    if not any(there):
        return None
    if not all(there):
        return "some of its tensors are DTensors, and others are not"
    order, values = norm.order, Tensors(*given)
    gate = None if values.gate is None else values.gate.permute(order)
    values = values._replace(input=values.input.permute(order), gate=gate)
    results: dict[str, Any] = calls.norm_values(values, norm.options, norm.eps, _saves(norm))
    results["output"] = results["output"].permute(_inverse(order))
    for name, node in outputs.items():
        before: Any = value_of(node)
        now, then = results[name].placements, before.placements
        if now != then:
            return f"{node.name} has the placements {then}, and would have {now}"
    return None


def _result(call: Node, name: str, old: Node, x: Node, order: list[int] | None = None) -> Node:
    """One result of an op, in the shape, dtype and layout of the node `old` that it replaces.

    order: the order of x's dimensions in which the op was called.
    """
    node, wanted = result_of(call, name, old), value_of(old)
    if order is not None and name == "output":
        node = _permuted(node, _inverse(order))
    if value_of(node).dim() != wanted.dim():  # mean and rstd have the rows' sizes, aten's x's rank
        node = _viewed(node, wanted.shape, x)
    node = _cast(node, wanted.dtype)
    node.meta = dict(old.meta)
    return node


def _inverse(order: list[int]) -> list[int]:
    return [order.index(dim) for dim in range(len(order))]


def _viewed(node: Node, shape: Sequence[int | SymInt], x: Node) -> Node:
    """A view of a node. A symbolic size of the shape is that of x in the same dimension."""
    sizes = [_size_of(x, i, size) for i, size in enumerate(shape)]
    return derived(ATEN.view.default, (node, sizes), value_of(node).view(shape), node)


def _cast(node: Node, dtype: torch.dtype) -> Node:
    value = value_of(node)
    if value.dtype == dtype:
        return node
    return derived(ATEN._to_copy.default, (node,), value.to(dtype), node, dtype=dtype)


def _permuted(node: Node | None, order: list[int]) -> Node | None:
    if node is None or order == sorted(order):
        return node
    return derived(ATEN.permute.default, (node, order), value_of(node).permute(order), node)


def _size_of(x: Node, dim: int, size: int | SymInt) -> int | Node:
    if isinstance(size, int):
        return size
    return derived(ATEN.sym_size.int, (x, dim), size, x)


def _rows(statistic: Node, norm: Gradient) -> Node:
    """aten's mean or rstd in the shape and dtype that tilenorm's op takes: of rows, float32."""
    shape = rows_shape(value_of(norm.x).shape, norm.options.hidden)
    return _cast(_viewed(statistic, shape, norm.x), torch.float32)


def _take_over(new: dict[Node, Node | None], parts: tuple[Node, ...]) -> None:
    """Replace old nodes by new ones (or by None), and erase the nodes that nothing uses any more.

    new: the new node, or None, for each old node. parts: more nodes to erase if unused.
    """
    for old, node in new.items():
        for user in list(old.users):
            given = (user.args, user.kwargs)
            user.args, user.kwargs = map_arg(given, lambda n: node if n is old else n)  # noqa: B023
    for node in sorted({*parts, *new}, reverse=True):
        if all(map(is_idle, node.users)):
            erase(node)
            if new.get(node) is not None:
                new[node].name = node.name
