"""Find norms that are written as elementary operations, as models write them.

A norm starts at the reduction that its statistic comes from: the mean or sum of squares, or the
variance. The search follows the users of this node as long as they have terms (term.py), and ends
at the last one that an op of tilenorm computes.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import torch
from torch.fx import Node

from ...spec import Options
from .nodes import (
    DTYPES_16_BIT,
    NUMBERS,
    Left,
    argument_of,
    before_exact_casts,
    bind,
    constant_of,
    is_idle,
    item_of,
    name_of,
    operands_of,
    users_of,
    value_of,
    values_of,
)
from .norms import Allowed, Norm, known, trailing
from .term import VECTOR_NORMS, Reader, Term, euclidean_norm, is_one

# A norm this many times larger or smaller than the clamp has the same float32 result with eps.
NEAR = 4096
CLAMPS = (
    "it divides by at least {:.0e}, and tilenorm adds eps to the mean square: rows with a norm from"
    " {:.0e} to {:.0e} would differ. inexact=True replaces it"
)
ROUNDED = "each of its operations rounds to 16 bits, and tilenorm's op rounds once"


def match_spelled_out(node: Node, allowed: Allowed) -> Norm | None:
    """The norm whose statistic a node computes, or None.

    Raises Left if the nodes compute a norm that no single op can replace.
    """
    why = None
    for reader in _readers(node, allowed):
        try:
            if norm := _longest(reader, node):
                return norm
        except Left as reason:
            why = reason
    if why is not None:
        raise why
    return None


def extended(norm: Norm, allowed: Allowed) -> Norm:
    """One of PyTorch's norms, with the casts, weight, bias, gate and modulation that are applied to
    its output; the same norm if there are none, or if other nodes use its results.
    """
    y = norm.outputs.get("output")
    if y is None:
        return norm
    norm = replace(norm, rounds_once=allowed.rounds_once)  # which its rotation asks for
    reader = Reader(norm.x, norm.options.norm == "layer", norm.dims, allowed)
    weight, bias = (p if p is None else before_exact_casts(p) for p in (norm.weight, norm.bias))
    reader.terms[y] = Term(degree=1, power=-0.5, eps=norm.eps, weight=weight, bias=bias)
    if any(node.users for node in norm.outputs.values() if node is not y):
        return replace(norm, apart=_shared(reader, norm))
    longer = _longest(reader, y, shorter=norm)
    return replace(norm, apart=longer.apart) if longer.at is y else longer


def _readers(node: Node, allowed: Allowed) -> Iterator[Reader]:
    """The inputs that a norm may have whose statistic a node computes."""
    source, place = item_of(node)
    is_variance = source is not None and place == 0 and name_of(source) == "var_mean"
    reduction = source if is_variance else node
    if is_variance or name_of(node) == "var":
        is_variance, x = True, argument_of(reduction)
    elif name_of(node) in ("mean", "sum"):
        x = _squared(argument_of(node))
    elif name_of(node) not in VECTOR_NORMS:
        return
    if name_of(node) in VECTOR_NORMS:
        x, dim = euclidean_norm(node) or (None, None)
    else:
        dim = bind(reduction).get("dim")
    if dim is not None and isinstance(x, Node) and (dims := trailing(known(x), dim)):
        pair = operands_of("sub", x)
        if pair and isinstance(pair[0], Node):
            yield Reader(pair[0], True, dims, allowed)
        yield Reader(x, is_variance, dims, allowed)


def _squared(node: object) -> object:
    """x if the node computes x², else None."""
    name = name_of(node) if isinstance(node, Node) else None
    if name == "square":
        return argument_of(node)
    if name == "pow":
        source, exponent = bind(node).values()
        return source if constant_of(exponent) == 2 else None
    pair = operands_of("mul", node)
    return pair[0] if pair and pair[0] is pair[1] else None


def _longest(reader: Reader, node: Node | None, shorter: Norm | None = None) -> Norm | None:
    """The longest norm that a node, or a chain of its users, computes. shorter: a shorter one.

    Raises Left if there is none, but a chain computes a norm that no single op can replace.
    """
    why = apart = None
    while node is not None:
        term = reader.term(node)
        if term.is_normalized:
            try:
                shorter, apart = _norm(reader, node, term, shorter), None
            except Left as reason:
                why = why or reason
                if apart is None and term.mod_scale is not None:
                    apart = node.name, f"it stays behind its norm: {reason}"
        node = _next(reader, node, may_end=shorter is not None)
    if shorter is None:
        if why is not None:
            raise why
        return None
    return replace(shorter, apart=apart or _shared(reader, shorter))


def _shared(reader: Reader, norm: Norm) -> tuple[str, str] | None:
    """A node that modulates a norm whose output other nodes use too, and this reason; or None."""
    users = [] if norm.mod_scale is not None else users_of(norm.outputs["output"])
    for user in users if len(users) > 1 or len(norm.outputs) > 1 else ():
        with suppress(Left):
            if reader.term(user).mod_scale is not None:
                return user.name, "it stays behind its norm, whose results other nodes use too"
    return None


def _next(reader: Reader, node: Node, may_end: bool) -> Node | None:
    """The user of a node with which the norm may go on. may_end: whether the norm may end here."""
    users = users_of(node)
    if may_end and (len(users) > 1 or any(value_of(user) is None for user in users)):
        return None
    for user in users:
        reader.term(user)
    return min(filter(reader.computes, users), default=None)


def _norm(reader: Reader, end: Node, term: Term, shorter: Norm | None) -> Norm:
    """The norm that ends at a node. shorter: a norm in it. Raises Left if no op is the same."""
    if term.left is not None:
        raise Left(term.left)
    # The smallest positive number of float16 is 6e-8: no row has a norm near the usual clamp.
    smallest = 6e-8 if reader.value.dtype == torch.float16 else 0
    if term.clamp * NEAR > smallest and not reader.allowed.inexact:
        raise Left(CLAMPS.format(term.clamp, term.clamp / NEAR, term.clamp * NEAR))
    first = {reader.x, term.weight, term.bias, term.gate, term.mod_scale, term.mod_shift}
    inside = _between(first, end)
    parts = sorted(filter(reader.computes, inside))
    for node in () if term.clamp and reader.allowed.inexact else parts:
        of_two = name_of(node) == "var_mean"
        if not (of_two or reader.terms[node].is_complete) and known(node).dtype != torch.float32:
            dtype = value_of(node).dtype
            raise Left(f"its intermediate result {node.name} is {dtype}, not float32")
    for node in parts:
        if node is not end and any(u not in inside and not is_idle(u) for u in node.users):
            what = f"its intermediate result {node.name}"
            raise Left(f"other nodes (perhaps of its gradient) use {what}")
    if not is_one(term.scale):
        raise Left(f"its result is {term.scale:.6g} times a norm")
    dtype = reader.value.dtype
    if known(end).dtype != dtype:
        raise Left(f"its output is {known(end).dtype}, its input {dtype}")
    rounded = {
        reader.terms[node].stage
        for node in parts
        if reader.terms[node].is_complete and known(node).dtype in DTYPES_16_BIT
    }
    if shorter is not None:
        inside |= {*shorter.parts, *shorter.outputs.values()}
    how = {"rounding": _rounding(reader, term, rounded), "activation": term.activation}
    options = Options(reader.count, "layer" if reader.centred else "rms", term.offset, **how)
    norm = Norm(
        options, reader.x, term.weight, term.bias, reader.dims, term.eps, {"output": end}, end,
        tuple(sorted(inside)), term.gate, term.mod_scale, term.mod_shift,
        reader.allowed.rounds_once,
    )  # fmt: skip
    if norm.mod_scale is not None:  # else the op of the norm alone serves
        norm.check()
    return norm


def _between(first: set[Node | None], end: Node) -> set[Node]:
    """The calls between some nodes and the end, which belongs to them."""
    between: set[Node] = set()
    stack = [end]
    while stack:
        node = stack.pop()
        computes = node.op != "placeholder" and not isinstance(values_of(node), NUMBERS)
        if computes and node not in first and node not in between:
            between.add(node)
            stack += node.all_input_nodes
    return between


def _rounding(reader: Reader, term: Term, rounded: set[str]) -> str:
    """The rounding of tilenorm's op that rounds where the term does.

    rounded: the stages after which the result is rounded to 16 bits. The last stage rounds to the
    input's dtype in any case.
    """
    rounded -= {term.stage}
    if term.clamp and reader.allowed.inexact:
        return "late"
    if term.mod_scale is not None:
        if term.offset:
            raise Left("no modulated norm of tilenorm's has an offset of the weight")
        if (rounded or term.rounds) and not reader.allowed.rounds_once:
            raise Left(ROUNDED)
        return "late"
    if not rounded:
        return "late"
    dtype = reader.value.dtype
    same = term.weight is not None and value_of(term.weight).dtype == dtype
    early = {"x_hat", "weight"} if same else {"x_hat"}
    if rounded != early - {term.stage}:
        raise Left("it rounds its intermediate results where tilenorm's op does not")
    return "early"
