"""What reductions over a row make of the terms of their operands, as the rules of rules.py."""

import math
from dataclasses import replace

import torch
from torch.fx import Node

from .calls import bind, bind_norm
from .nodes import constant_of, name_of, value_of, values_of
from .norms import known, same_sizes, trailing
from .term import Term

# The power of the mean square that is the variance, and that is the standard deviation.
SPREADS = {"var": 1.0, "std": 0.5, "var_mean": 1.0, "std_mean": 0.5}
LOWER_BOUND = "its eps is a lower bound of the root; tilenorm adds eps to the mean square"


def reduced(reader, node: Node) -> Term | None:
    """The mean or the sum of x or u² over a row."""
    args = bind(node)
    source = next(iter(args.values()))
    term = reader.term(source)
    if term is None or term.power or trailing(value_of(source), args.get("dim")) != reader.dims:
        return None
    if term.weight is not None:
        return None
    scale = term.scale * (reader.count if name_of(node) == "sum" else 1)
    if term.base == "x" and term.degree == 1:
        return replace(term, base="mean", scale=scale)
    if term.base == "u" and term.degree == 2:
        return replace(term, degree=0, power=1.0, scale=scale)
    return None


def spread(reader, node: Node) -> Term | None:
    """The variance or the standard deviation over a row, alone or as the first of two results."""
    args = bind(node)
    term = reader.term(args["self"])
    if not reader.centred or term is None or not term.is_input:
        return None
    if trailing(value_of(args["self"]), args.get("dim")) != reader.dims:
        return None
    if "unbiased" in args:
        correction = float(args["unbiased"])
    else:
        correction = 1.0 if args["correction"] is None else constant_of(args["correction"])
    if correction is None or reader.count <= correction:
        return None
    exponent = SPREADS[name_of(node)]
    scale = (reader.count / (reader.count - correction)) ** exponent
    return replace(term, base="u", degree=0, power=exponent, scale=scale)


def item(reader, node: Node) -> Term | None:
    """A result of var_mean or std_mean, or a row's number with new dimensions, t[..., None]."""
    if len(node.args) != 2 or node.kwargs or not isinstance(node.args[0], Node):
        return None
    source, index = node.args
    if name_of(source) not in ("var_mean", "std_mean"):
        new = isinstance(index, tuple) and all(i in (None, ..., slice(None)) for i in index)
        return unsqueezed(reader, node) if new else None
    term = spread(reader, source)
    if term is None or index not in (0, 1) or not isinstance(values_of(source), tuple | list):
        return None
    parts = term.parts | {source}
    if index == 0:
        return replace(term, parts=parts)
    of_x = reader.term(bind(source)["self"]).base == "x"
    return Term("mean", degree=1, parts=parts, inputs=term.inputs) if of_x else None


def unsqueezed(reader, node: Node) -> Term | None:
    """A row's number, with the dimensions of a row as ones."""
    term = reader.term(node.args[0]) if node.args else None
    if term is None or not term.is_of_rows:
        return None
    leading = reader.rows[: -reader.dims]
    before, after = known(node.args[0]).shape, known(node).shape
    return term if same_sizes(before, leading) and same_sizes(after, reader.rows) else None


def expanded(reader, node: Node) -> Term | None:
    """A row's number, once for each element of the row."""
    term = reader.term(node.args[0]) if node.args else None
    if term is None or not term.is_of_rows or not reader.fits_rows(node.args[0]):
        return None
    return term if same_sizes(known(node).shape, reader.value.shape) else None


def length(reader, node: Node) -> Term | None:
    """The Euclidean norm of a row."""
    args = bind_norm(node)
    term = None if args is None else reader.term(args["self"])
    if term is None or not term.is_input or term.base != "u" or constant_of(args["ord"]) != 2:
        return None
    if trailing(value_of(args["self"]), args["dim"]) != reader.dims:
        return None
    return replace(term, degree=0, power=0.5, scale=math.sqrt(reader.count))


def unit_length(reader, node: Node) -> Term | None:
    """F.normalize: a row divided by its Euclidean norm, of which eps is the lower bound."""
    root = length(reader, node)
    if root is None:
        return None
    args = bind_norm(node)
    bounded = _bounded(reader, root, args["eps"])
    return None if bounded is None else reader.term(args["self"]).times(bounded.to_the(-1))


def clamped(reader, node: Node) -> Term | None:
    """A power of the mean square with a lower bound."""
    args = bind(node)
    term = reader.term(args["self"])
    if term is None or not term.is_of_rows or term.base != "u" or args.get("max") is not None:
        return None
    return _bounded(reader, term, args["min"])


def _bounded(reader, term: Term, bound: object) -> Term | None:
    """The term with a lower bound, as an eps if it can be one.

    The mean square of a row of float16 is zero, or at least 2^-48 / N. A bound far below that is a
    bound of the rows of zeros alone, and so is an eps that is added.
    """
    number = constant_of(bound)
    if term.power <= 0 or term.scale <= 0:
        return None
    least = math.inf if number is None else max(number, 0.0) / term.scale
    least = least ** (1 / term.power) if least < 1e30 else math.inf
    if least <= term.eps:
        return term
    if reader.value.dtype == torch.float16 and not term.eps and least <= 2.0**-74 / reader.count:
        return replace(term, eps=least)
    return replace(term, left=term.left or LOWER_BOUND)
