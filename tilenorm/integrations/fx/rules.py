"""What products, quotients, sums, powers and casts make of the terms of their operands.

Each rule takes a Reader and a node, and returns the node's term, or None if the normal form does
not have it.
"""

from dataclasses import replace

import torch
from torch.fx import Node

from .calls import before_exact_casts, bind, cast_input, casts_between, operands, summands
from .nodes import constant_of, name_of, number_of, only_user, value_of, writes
from .norms import same_sizes
from .term import Term, is_one

POWERS = {"sqrt": 0.5, "rsqrt": -0.5, "square": 2.0, "reciprocal": -1.0}
OUTER_EPS = "its eps is added to the root of the mean square, not to the mean square"
TENSOR_EPS = "its eps is a tensor, or a number that depends on data"


def product(reader, node: Node) -> Term | None:
    pair = operands(node)
    for a, b in (pair, pair[::-1]) if pair else ():
        term = reader.term(a)
        if term is None:
            continue
        if (number := constant_of(b)) is not None:
            return term.scaled(number)
        if (other := reader.term(b)) is not None:
            return _joined(reader, (a, term), (b, other))
        if term.is_complete and term.gate is None and isinstance(b, Node):
            return _gated(reader, term, b)
    return None


def quotient(reader, node: Node) -> Term | None:
    a, b = operands(node) or (None, None)
    term, below = reader.term(a), reader.term(b)
    if term is not None and (number := constant_of(b)):
        return term.scaled(1 / number)
    inverse = None if below is None else below.to_the(-1)
    if inverse is None:
        return None
    if (number := constant_of(a)) is not None:
        return inverse.scaled(number)
    return None if term is None else _joined(reader, (a, term), (b, inverse))


def _joined(reader, *pairs: tuple[Node, Term]) -> Term | None:
    """The product of two terms, if the rows' numbers stand beside their rows."""
    if any(term.is_of_rows and not reader.fits_rows(node) for node, term in pairs):
        return None
    (_, term), (_, other) = pairs
    return term.times(other)


def _gated(reader, term: Term, node: Node) -> Term | None:
    """The term times silu(z) or sigmoid(z), for a z of x's shape, if float32 computes them."""
    if only_user(node) is None:
        return None
    found = _activation(node)
    if found is None:
        return None
    z, activation, nodes = found
    shape = None if value_of(z) is None else value_of(z).shape
    if shape is None or not same_sizes(shape, reader.value.shape):
        return None
    if not all(map(_is_float32, nodes)):
        return None
    source = before_exact_casts(z)
    inputs = term.inputs | nodes | casts_between(source, z)
    return replace(term, gate=source, activation=activation, inputs=inputs)


def _is_float32(node: Node) -> bool:
    value = value_of(node)
    return value is not None and value.dtype == torch.float32


def _activation(node: Node) -> tuple[Node, str, set[Node]] | None:
    """z, the activation's name, and its nodes, if a node computes silu(z) or sigmoid(z)."""
    if name_of(node) in ("silu", "sigmoid"):
        z = next(iter(bind(node).values()))
        return (z, name_of(node), {node}) if isinstance(z, Node) else None
    pair = operands(node) if name_of(node) == "mul" else ()
    for z, sigmoid in (pair, pair[::-1]) if pair else ():
        nodes = isinstance(z, Node) and isinstance(sigmoid, Node)
        if nodes and name_of(sigmoid) == "sigmoid":
            inner = next(iter(bind(sigmoid).values()))
            if isinstance(inner, Node) and before_exact_casts(inner) is before_exact_casts(z):
                return z, "silu", {node, sigmoid}
    return None


def total(reader, node: Node) -> Term | None:
    """A term plus a number, which is eps or the weight's offset, or plus the bias."""
    pair = summands(node)
    for a, b in (pair, pair[::-1]) if pair else ():
        term, other = reader.term(a), reader.term(b)
        if term is None:
            continue
        if term.is_of_rows and term.base == "u" and other is None:
            return _with_eps(term, b)
        if term.is_parameter and other is None and not term.offset and not writes(node):
            number = number_of(b) if _is_float32(node) else None
            if number is not None:
                return replace(term, offset=number, inputs=term.inputs | {node})
        takes_bias = term.is_complete and term.bias is None and term.gate is None
        if takes_bias and other is not None and other.is_parameter and not other.offset:
            return replace(term, bias=other.weight, inputs=term.inputs | other.inputs)
    return None


def _with_eps(term: Term, added: object) -> Term:
    number = number_of(added)
    if number is None:
        return replace(term, left=term.left or TENSOR_EPS)
    if term.power == 1:
        return replace(term, eps=term.eps + number / term.scale)
    return term if number == 0 else replace(term, left=term.left or OUTER_EPS)


def difference(reader, node: Node) -> Term | None:
    """x − mean(x)."""
    a, b = operands(node) or (None, None)
    term, mean = reader.term(a), reader.term(b)
    if term is None or mean is None or (term.base, mean.base) != ("x", "mean"):
        return None
    if not term.is_input or not is_one(mean.scale) or not reader.fits_rows(b):
        return None
    return Term(degree=1, parts=mean.parts, inputs=term.inputs | mean.inputs)


def power(reader, node: Node) -> Term | None:
    if (exponent := POWERS.get(name_of(node))) is not None:
        term = reader.term(next(iter(bind(node).values())))
    else:
        source, given = bind(node).values()  # prims' op has another name for the exponent
        term, exponent = reader.term(source), constant_of(given)
    return None if term is None else term.to_the(exponent)


def negative(reader, node: Node) -> Term | None:
    term = reader.term(next(iter(bind(node).values())))
    return None if term is None else term.scaled(-1.0)


def cast(reader, node: Node) -> Term | None:
    term = reader.term(cast_input(node))
    return None if term is None or term.is_parameter else term
