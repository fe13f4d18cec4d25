"""Insert tilenorm's ops into a graph in place of a norm's nodes; names and metadata are kept."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import Node

from ...ops.passes.dims import rows_shape
from ...ops.pytorch.placements import is_distributed
from . import calls
from .calls import Tensors, derived, result_of
from .nodes import (
    DTYPES_16_BIT,
    Left,
    before_exact_casts,
    cast_input,
    erase,
    in_turn,
    is_idle,
    key_of,
    only_user,
    operands_of,
    users_of,
    value_of,
    written,
)
from .norms import Gradient, Norm, alike, known
from .term import groups_of, operand

ATEN = torch.ops.aten
SWAPPED = [0, 2, 1, 3]  # dimensions, with those of heads and tokens swapped


def emit_forward(norm: Norm) -> str:
    """Replace a norm, and the sum that it normalises if there is one. Returns the new op's kind.

    Raises Left if a node between the norm's first and last node may write to a tensor: the new op
    reads its inputs at another place of the graph and could read other values.
    """
    if written(norm.parts[0], norm.at, norm.parts):
        raise Left("a node between its operations may write to a tensor")
    if parts := _sum(norm):
        with suppress(Left):
            return _emit(norm, *parts)
    return _emit(norm, norm.tensors, norm.at)


def _emit(norm: Norm, tensors: Tensors, at: Node, sums: tuple[Node, ...] = ()) -> str:
    """Replace a norm by the op of these tensors, before the node `at`. Returns the op's kind. sums:
    the nodes of the sum that it normalises. Raises Left if DTensors do not allow it.
    """
    if len({is_distributed(value_of(node)) for node in tensors if node is not None}) > 1:
        raise Left("some of its tensors are DTensors, and others are not")
    order, before = norm.order, at.prev
    outputs = norm.outputs | ({"residual_out": sums[-1]} if sums else {})
    try:
        with at.graph.inserting_before(at):
            of_rows = ("input",) if tensors.scale is not None else ("input", "gate")
            permuted = {name: _permuted(getattr(tensors, name), order) for name in of_rows}
            tensors = _alike(tensors._replace(**permuted), norm.x)
            op, arguments = calls.arguments_of(tensors, norm.options, norm.eps, _saves(norm))
            if "out_dtype" in calls.FORWARD[op].options and (cast := _rounded(norm)):
                arguments["out_dtype"] = known(cast).dtype
                outputs["output"] = cast
            call = calls.called(op, arguments, norm.at)
            new = {
                old: _result(call, name, old, norm.x, order if name == "output" else None)
                if old.users
                else None
                for name, old in outputs.items()
            }
    except Left:
        while at.prev is not before:
            at.graph.erase_node(at.prev)
        raise
    if sums and at is norm.at:  # a check of the sum's metadata may stand before it
        for user in filter(is_idle, list(sums[-1].users)):
            erase(user)
    _take_over(new, (*sums, *norm.parts, *norm.outputs.values(), norm.at))
    if tensors.residual is None:
        return norm.kind
    if tensors.scale is None:
        return f"add_{norm.kind}"
    return f"{norm.kind} with residual{'' if tensors.gate is None else ' and gate'}"


def emit_rotated(norms: tuple[Norm, ...]) -> None:
    """Replace a norm with its rotation, or those of queries and of keys with the same tables, by an
    op in the place of the first one. Raises Left if it cannot stand there.
    """
    at, first = min(norm.at for norm in norms), norms[0]
    how: Any = first.rotation
    inputs = [norm.x for norm in norms]
    weights = [norm.weight for norm in norms]
    parts = {node for norm in norms for node in norm.parts}
    if len({_common(norm) for norm in norms}) > 1:
        raise Left("queries and keys differ in more than their heads")
    if any(node is not None and not node < at for node in (*inputs, *weights)):
        raise Left("its arguments are computed later")
    if written(min(parts), max(norm.at for norm in norms), tuple(parts)):
        raise Left("a node between its operations may write to a tensor")
    if any(is_distributed(value_of(x)) for x in inputs):
        raise Left("its tensors are DTensors")
    with at.graph.inserting_before(at):
        tables = [_without_heads(table, how.heads) for table in (how.cos, how.sin)]
        options = first.options._asdict() | {"eps": first.eps, "save": any(map(_saves, norms))}
        options |= {"rotary_dim": int(known(first.at).shape[-1]), "interleaved": False}
        options |= {"output_heads_first": how.contiguous, "cos": tables[0], "sin": tables[1]}
        options |= zip(("input", "key"), map(_heads_last, norms), strict=False)
        options |= zip(("weight", "key_weight"), weights, strict=False)
        calls.check_served(calls.ROTATED, options)
        call = calls.called(calls.ROTATED, options, first.at)
        order = SWAPPED if how.heads == 1 and not how.contiguous else None
        new = {
            norm.at: _result(call, name, norm.at, norm.x, order)
            for norm, name in zip(norms, ("output", "key_output"), strict=False)
        }
    _take_over(new, tuple(parts))


def _common(norm: Norm) -> tuple:
    """What the norms of queries and of keys have to have in common."""
    rotation: Any = norm.rotation
    how = norm.eps, norm.options[2:], norm.weight is None, known(norm.x).dtype
    return *rotation[:2], rotation.contiguous, *how, known(norm.x).dim()


def _heads_last(norm: Norm) -> Node:
    """The input of a norm that is rotated, as (batch, tokens, heads, elements)."""
    rotation: Any = norm.rotation
    if known(norm.x).dim() == 3:  # all heads of a token are normalised together
        shape = list(known(norm.at).shape)
        if rotation.heads == 1:
            shape[1:3] = shape[2:0:-1]
        return _viewed(norm.x, shape, norm.x)
    swap = rotation.heads == 1 and not rotation.swapped
    return _permuted(norm.x, SWAPPED) if swap else norm.x


def _without_heads(table: Node, heads: int) -> Node:
    """cos or sin as (batch or 1, tokens, columns)."""
    value = value_of(table)
    if value.dim() == 3:
        return table
    return derived(ATEN.squeeze.dim, (table, heads), value.squeeze(heads), table)


def emit_backward(norm: Gradient) -> str:
    """Replace aten's gradient of a norm. Returns the new op's kind."""
    with norm.at.graph.inserting_before(norm.at):
        arguments = {"input": norm.x, "weight": norm.weight, "bias": norm.bias}
        for name, statistic in (("rstd", norm.rstd), ("mean", norm.mean)):
            arguments[name] = None if statistic is None else _rows(statistic, norm)
        # Only second derivatives use eps. aten's op does not have it, so 0.0 stands for it here.
        arguments |= norm.options._asdict() | {"grad_output": norm.dy, "eps": 0.0, "added": False}
        results = calls.results_of(calls.NORM_BACKWARD)[:5]
        arguments["output_mask"] = [name in norm.wanted for name in results]
        call = calls.called(calls.NORM_BACKWARD, arguments, norm.at)
        new = {
            old: _result(call, name, old, norm.x) if name in norm.wanted else None
            for name, old in norm.outputs.items()
        }
    _take_over(new, (norm.at,))
    return norm.kind


def _rounded(norm: Norm) -> Node | None:
    """The node that rounds a float32 output to 16 bits, as the op does where nothing else reads the
    output.
    """
    y = norm.outputs.get("output")
    cast = y and only_user(y)
    if cast is None or cast_input(cast) is not y or known(y).dtype != torch.float32:
        return None
    value = known(cast)
    return cast if value.dtype in DTYPES_16_BIT and value.is_contiguous() else None


def _saves(norm: Norm) -> bool:
    """Whether the op has to return mean and rstd: the graph or a later backward pass uses them."""
    y = norm.outputs.get("output")
    traced_with_gradients = y is not None and key_of(y) == "example_value"
    return not traced_with_gradients or len(norm.outputs) > 1 or value_of(y).requires_grad


def _sum(norm: Norm) -> tuple[Tensors, Node, tuple[Node, ...]] | None:
    """The sum that x is, if an op can compute it too: the op's tensors, the node before which the
    op stands, and the nodes that compute the sum, of which the last one is the sum.

    The op stands at the sum's place. Where arguments of the op are computed later, and the sum is
    used later, it stands at the place of the norm's last node.
    """
    if norm.gate is not None or norm.order != sorted(norm.order):
        return None
    total, cast = norm.x, only_user(norm.x)
    if cast_input(cast) is not None and known(cast).dtype == known(total).dtype:
        total = cast
    tensors, nodes = _terms(norm, total)
    if not nodes or not known(total).is_contiguous():
        return None
    present = {node for node in tensors if node is not None}
    place = total if max(present) < total else norm.at
    going: set[Node] = {norm.at}
    for node in sorted(norm.parts, reverse=True):
        if going.issuperset(users_of(node)):
            going.add(node)
    if total in present or any(user < place for user in {*users_of(total)} - going):
        return None
    return None if written(min(nodes), norm.at, norm.parts) else (tensors, place, nodes)


def _terms(norm: Norm, total: Node) -> tuple[Tensors, tuple[Node, ...]]:
    """The op's tensors for a sum with the numbers of x, and the nodes that compute the sum, if it
    is residual + branch or residual + gate · branch. No nodes compute other sums.
    """
    cast = cast_input(total)
    whole = total if cast is None or only_user(cast) is not total else cast
    pair, like, tensors = operands_of("add", whole), known(norm.x), norm.tensors
    if norm.mod_scale is not None:
        groups = groups_of(norm.mod_scale, like, norm.dims)
        for other, product in in_turn(pair):
            for factor, scaled in in_turn(operands_of("mul", product)):
                gate = operand(factor, like, norm.dims, groups)
                residual, branch = _as(like, other), _as(like, scaled)
                value = value_of(product)
                rounds = value is None or value.dtype in DTYPES_16_BIT
                takes = gate and residual and branch and (norm.rounds_once or not rounds)
                if takes and only_user(product) is whole:
                    gated = tensors._replace(input=branch, residual=residual, gate=gate)
                    return gated, (product, whole, total)
    branch, residual = [_as(like, node) for node in pair] or (None, None)
    nodes = (whole, total) if branch and residual else ()
    return tensors._replace(input=branch, residual=residual), nodes


def _as(like: Tensor, node: Any) -> Node | None:
    """A term of a sum, or what it is an exact cast of, if one of them is as `like`."""
    return next((n for n in (node, before_exact_casts(node)) if alike(value_of(n), like)), None)


def _alike(tensors: Tensors, x: Node) -> Tensors:
    """The tensors with shift and gate in the shape of the scale. Its sizes of 1 may be others."""
    if tensors.scale is None:
        return tensors
    shape, new = value_of(tensors.scale).shape, {}
    for name in ("shift", "gate"):
        node = getattr(tensors, name)
        if node is not None and value_of(node).dim() != len(shape):
            new[name] = _viewed(node, shape, x)
    return tensors._replace(**new)


def _result(call: Node, name: str, old: Node, x: Node, order: list[int] | None = None) -> Node:
    """One result of an op, in the shape, dtype and layout of the node `old` that it replaces.

    order: the order of x's dimensions in which the op was called. Raises Left if a DTensor would
    have other placements: the nodes after it were traced for the old ones.
    """
    node: Node = result_of(call, name, old)
    wanted: Any = value_of(old)
    if order is not None:
        node = _permuted(node, [order.index(dim) for dim in range(len(order))])
    if value_of(node).dim() != wanted.dim():  # mean and rstd have the rows' sizes, aten's x's rank
        node = _viewed(node, wanted.shape, x)
    node = _cast(node, wanted.dtype)
    value: Any = value_of(node)
    if is_distributed(wanted) and value.placements != wanted.placements:
        places = f"{wanted.placements}, and would have {value.placements}"
        raise Left(f"{old.name} has the placements {places}")
    node.meta = dict(old.meta)
    return node


def _viewed(node: Node, shape: Sequence[int | SymInt], x: Node) -> Node:
    """A view of a node. A symbolic size of the shape is that of x in the same dimension."""
    sizes = [
        size if isinstance(size, int) else derived(ATEN.sym_size.int, (x, i), size, x)
        for i, size in enumerate(shape)
    ]
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


def _rows(statistic: Node, norm: Gradient) -> Node:
    """aten's mean or rstd in the shape and dtype that tilenorm's op takes: of rows, float32."""
    shape = rows_shape(value_of(norm.x).shape, norm.options.hidden)
    return _cast(_viewed(statistic, shape, norm.x), torch.float32)


def _take_over(new: dict[Node, Node | None], parts: tuple[Node, ...]) -> None:
    """Replace old nodes by new ones, or by None, and erase those of them, and of `parts`, that
    nothing uses any more.
    """
    for old, node in new.items():
        for user in list(old.users):
            user.replace_input_with(old, node)
    for node in sorted({*parts, *new}, reverse=True):
        if all(map(is_idle, node.users)):
            erase(node)
            if new.get(node) is not None:
                new[node].name = node.name
