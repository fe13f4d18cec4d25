"""Term: the normal form of a norm that is written as elementary operations, as models write them.

    scale · u^degree · (mean(u²) + eps)^power · (weight + offset) + bias,
    times act(gate), or times 1 + mod_scale and plus mod_shift, by group

u is x, or x − mean(x) for LayerNorm. A norm is the term of scale 1, degree 1 and power −1/2,
however it is written: x / sqrt(...), x times 1 / sqrt(...), or weight · x / sqrt(...). What lies by
group has leading sizes of x, and then those of a row. In a graph it is often a view with sizes of 1
in front of the row, such as scale[:, None].

A rule takes a Reader and a node, and returns the node's term, or NOTHING if the normal form does
not have it. spelled_out.py finds norms by the terms of a graph's nodes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import Node

from .nodes import (
    CASTS,
    DTYPES_16_BIT,
    argument_of,
    before_exact_casts,
    bind,
    cast_input,
    constant_of,
    in_turn,
    item_of,
    name_of,
    number_of,
    only_user,
    operands,
    operands_of,
    value_of,
    values_of,
    writes,
)
from .norms import (
    PARAMETER_DTYPES,
    Allowed,
    hidden_of,
    is_of_size_one,
    known,
    parameter_fits,
    same_sizes,
    statistic_shape,
    trailing,
)

CLOSE = 1e-9  # no float32 result tells a scale that is this close to 1 from 1
# PyTorch adds eps in this way where it decomposes its RMSNorm.
ADDS_IN_PLACE = (torch.ops.aten.add_.Scalar, torch.ops.aten.add_.Tensor)
POWERS = {"sqrt": 0.5, "rsqrt": -0.5, "square": 2.0, "reciprocal": -1.0}
# Functions that may put in sizes of 1, or leave them out.
VIEWS = ("unsqueeze", "squeeze", "view", "reshape", "_unsafe_view", "slice", "getitem")
Sizes = tuple[int | SymInt, ...]
EXPANDS = ("expand", "expand_as")
# The arguments of the functions that take norms of rows, in their order.
VECTOR_NORMS = {
    "normalize": ("input", "p", "dim", "eps"),
    "norm": ("input", "p", "dim", "keepdim"),
    "linalg_vector_norm": ("self", "ord", "dim", "keepdim", "dtype"),
}
UNCLAMPED = "it divides by a norm of the row that nothing keeps from 0"
OUTER_EPS = "its eps is added to the root of the mean square, not to the mean square"
TENSOR_EPS = "its eps is a tensor, or a number that depends on data"


@dataclass(frozen=True)
class Term:
    """What a node computes, in the normal form.

    base: "u" is what is normalised, "x" the input of a LayerNorm, and "mean" the mean of its rows.
    weight, bias, gate: the nodes before all exact casts. mod_scale, mod_shift: those by group.
    rounds: whether 1 + mod_scale is rounded to 16 bits. left: why no norm of tilenorm's is this
    expression, or None.
    """

    base: str = "u"
    scale: float = 1.0
    degree: int = 0
    power: float = 0.0
    eps: float = 0.0
    weight: Node | None = None
    offset: float = 0.0
    bias: Node | None = None
    gate: Node | None = None
    activation: str = "silu"
    mod_scale: Node | None = None
    mod_shift: Node | None = None
    rounds: bool = False
    left: str | None = None
    clamp: float = (
        0.0  # a norm divides by no less, where it is written with a clamped norm of the row
    )

    @property
    def is_normalized(self) -> bool:
        """Whether the term is a number times a norm."""
        return self.degree == 1 and self.power == -0.5

    @property
    def is_complete(self) -> bool:
        """Whether the term is a norm."""
        return self.is_normalized and is_one(self.scale)

    @property
    def is_affine(self) -> bool:
        """Whether the term is a norm that has neither a gate nor a modulation yet."""
        return self.is_complete and self.gate is None and self.mod_scale is None

    @property
    def is_parameter(self) -> bool:
        return self.weight is not None and not self.degree and not self.power

    @property
    def is_of_rows(self) -> bool:
        """Whether a row has one number: a power of the mean square, or the mean."""
        return self.base == "mean" or bool(self.power and not self.degree and self.weight is None)

    @property
    def is_input(self) -> bool:
        """Whether the term is u or x."""
        plain = self.base != "mean" and self.weight is None
        return plain and (self.scale, self.degree, self.power) == (1.0, 1, 0.0)

    @property
    def stage(self) -> str:
        """What was done to the normalised row last: x_hat or the name of one of the nodes."""
        names = ("gate", "mod_shift", "mod_scale", "bias", "weight")
        return next((name for name in names if getattr(self, name) is not None), "x_hat")

    @property
    def is_sum(self) -> bool:
        """Whether the term is no product of powers and a weight."""
        return any(node is not None for node in (self.bias, self.gate, self.mod_scale))

    def scaled(self, number: float) -> "Term":
        """The product with a number."""
        product = (self.degree or self.power) and not self.is_sum
        if not product or not number or not math.isfinite(number):
            return NOTHING
        return replace(self, scale=self.scale * number)

    def to_the(self, exponent: float | None) -> "Term":
        """A power of the term: the square of u, or any power of a number of a row."""
        if exponent is None or self.weight is not None or self.base != "u":
            return NOTHING
        if self.degree == 1 and not self.power and exponent == 2:
            return replace(self, degree=2, scale=self.scale**2)
        if not self.is_of_rows or self.scale <= 0 or not 0 < abs(exponent) <= 4:
            return NOTHING
        return replace(self, scale=self.scale**exponent, power=self.power * exponent)

    def times(self, other: "Term") -> "Term":
        """The product with another term."""
        pair = (self, other)
        sums = any(t.is_sum or t.base != "u" for t in pair)
        weights, roots = [t for t in pair if t.weight is not None], [t for t in pair if t.power]
        degree = self.degree + other.degree
        if sums or len(weights) > 1 or len(roots) > 1 or all(t.is_parameter for t in pair):
            return NOTHING
        if degree > 2 or (degree == 2 and (weights or roots)):
            return NOTHING
        weighted, root = (*weights, self)[0], (*roots, self)[0]
        return Term(
            "u", self.scale * other.scale, degree, root.power, root.eps,
            weighted.weight, weighted.offset, left=self.left or other.left, clamp=root.clamp,
        )  # fmt: skip


NOTHING = Term("nothing")  # of a number, and of what the normal form does not have


def is_one(scale: float) -> bool:
    return abs(scale - 1) < CLOSE


def product(reader: "Reader", node: Node) -> Term:
    for a, b in in_turn(operands(node)):
        term = reader.term(a)
        if term is NOTHING:
            continue
        if (number := constant_of(b)) is not None:
            return term.scaled(number)
        if (other := reader.term(b)) is not NOTHING:
            return _joined(reader, (a, term), (b, other))
        if term.is_affine and isinstance(b, Node):
            modulated = _modulated(reader, term, b)
            return _gated(reader, term, b) if modulated is NOTHING else modulated
    return NOTHING


def quotient(reader: "Reader", node: Node) -> Term:
    a, b = operands(node) or (None, None)
    term, inverse = reader.term(a), reader.term(b).to_the(-1)
    if number := constant_of(b):
        return term.scaled(1 / number)
    if (number := constant_of(a)) is not None:
        return inverse.scaled(number)
    return _joined(reader, (a, term), (b, inverse))


def _joined(reader: "Reader", *pairs: tuple[Node, Term]) -> Term:
    """The product of two terms, if the rows' numbers stand beside their rows."""
    if any(term.is_of_rows and not reader.fits_rows(node) for node, term in pairs):
        return NOTHING
    (_, term), (_, other) = pairs
    return term.times(other)


def _modulated(reader: "Reader", term: Term, node: Node) -> Term:
    """The term times 1 + scale, by group."""
    factor = scale_of(node, reader.value, reader.dims)
    if factor is None:
        return NOTHING
    scale, rounds, left = factor
    return replace(term, mod_scale=scale, rounds=rounds, left=term.left or left)


def _gated(reader: "Reader", term: Term, node: Node) -> Term:
    """The term times silu(z) or sigmoid(z), for a z of x's shape, if float32 computes them."""
    z, activation, nodes = _activation(node) if only_user(node) else (None, "", ())
    value = value_of(z)
    fits = value is not None and same_sizes(value.shape, reader.value.shape)
    if not fits or not all(map(_is_float32, nodes)):
        return NOTHING
    return replace(term, gate=before_exact_casts(z), activation=activation)


def _is_float32(node: Node) -> bool:
    value = value_of(node)
    return value is not None and value.dtype == torch.float32


def _activation(node: Node) -> tuple[Node | None, str, tuple[Node, ...]]:
    """z, the activation's name, and its nodes, if a node computes silu(z) or sigmoid(z)."""
    if name_of(node) in ("silu", "sigmoid"):
        return argument_of(node), name_of(node), (node,)
    for z, sigmoid in in_turn(operands_of("mul", node)):
        if isinstance(z, Node) and isinstance(sigmoid, Node) and name_of(sigmoid) == "sigmoid":
            inner = argument_of(sigmoid)
            if isinstance(inner, Node) and before_exact_casts(inner) is before_exact_casts(z):
                return z, "silu", (node, sigmoid)
    return None, "", ()


def total(reader: "Reader", node: Node) -> Term:
    """A term plus a number, which is eps or the weight's offset, or plus the bias."""
    for a, b in in_turn(operands(node)):
        term, other = reader.term(a), reader.term(b)
        if term.is_of_rows and term.base == "u" and other is NOTHING:
            return _with_eps(term, b)
        if term.is_parameter and other is NOTHING and not term.offset and not writes(node):
            number = number_of(b) if _is_float32(node) else None
            if number is not None:
                return replace(term, offset=number)
        takes_bias = term.is_affine and term.bias is None
        if takes_bias and other.is_parameter and not other.offset:
            return replace(term, bias=other.weight)
        if term.is_complete and term.mod_scale is not None and term.mod_shift is None:
            groups = groups_of(term.mod_scale, reader.value, reader.dims)
            shift = operand(b, reader.value, reader.dims, groups)
            if shift is not None:
                return replace(term, mod_shift=shift)
    return NOTHING


def _with_eps(term: Term, added: object) -> Term:
    number = number_of(added)
    if number is None:
        return replace(term, left=term.left or TENSOR_EPS)
    if term.left == UNCLAMPED and number:
        return replace(term, left=OUTER_EPS)
    if term.power == 1:
        return replace(term, eps=term.eps + number / term.scale)
    return term if number == 0 else replace(term, left=term.left or OUTER_EPS)


def difference(reader: "Reader", node: Node) -> Term:
    """x − mean(x)."""
    a, b = operands(node) or (None, None)
    term, mean = reader.term(a), reader.term(b)
    if not term.is_input or (term.base, mean.base) != ("x", "mean") or not is_one(mean.scale):
        return NOTHING
    return Term(degree=1) if reader.fits_rows(b) else NOTHING


def power(reader: "Reader", node: Node) -> Term:
    source, exponent = argument_of(node), POWERS.get(name_of(node))
    if exponent is None:
        source, exponent = bind(node).values()  # prims' op has another name for the exponent
    return reader.term(source).to_the(constant_of(exponent))


def cast(reader: "Reader", node: Node) -> Term:
    term = reader.term(cast_input(node))
    return NOTHING if term.is_parameter else term


def reduced(reader: "Reader", node: Node) -> Term:
    """The mean or the sum of x or u² over a row."""
    source = argument_of(node)
    term = reader.term(source)
    if term.power or term.weight is not None or not reader.reduces(source, bind(node).get("dim")):
        return NOTHING
    scale = term.scale * (reader.count if name_of(node) == "sum" else 1)
    if term.base == "x" and term.degree == 1:
        return replace(term, base="mean", scale=scale)
    if term.base == "u" and term.degree == 2:
        return replace(term, degree=0, power=1.0, scale=scale)
    return NOTHING


def euclidean_norm(node: Node) -> tuple[Any, Any] | None:
    """The tensor whose Euclidean norms a call takes, or divides by, and the dimensions."""
    arguments = dict(zip(VECTOR_NORMS[name_of(node)], node.args, strict=False)) | node.kwargs
    if arguments.keys() & {"out", "dtype"} or arguments.get("p", arguments.get("ord", 2)) != 2:
        return None
    return argument_of(node), arguments.get("dim", 1 if name_of(node) == "normalize" else None)


def vector_norm(reader: "Reader", node: Node) -> Term:
    """The Euclidean norm of a row, or the row divided by it."""
    source, dim = euclidean_norm(node) or (None, None)
    term = reader.term(source)
    if term.base != "u" or not term.is_input or not reader.reduces(source, dim):
        return NOTHING
    root = Term(power=0.5, scale=math.sqrt(reader.count), left=UNCLAMPED)
    if name_of(node) != "normalize":
        return root
    eps = number_of(node.args[3] if len(node.args) > 3 else node.kwargs.get("eps", 1e-12))
    return Term(degree=1).times(_clamped(root, eps).to_the(-1))


def clamp(reader: "Reader", node: Node) -> Term:
    """A norm of a row that is no less than a number."""
    arguments = bind(node)
    at_least = number_of(arguments.get("min"))
    return _clamped(reader.term(argument_of(node)), None if arguments.get("max") else at_least)


def _clamped(term: Term, number: float | None) -> Term:
    """max(√(s² · mean(u²)), number) is √(s² · (mean(u²) + eps)) for rows far from the number."""
    if term.left != UNCLAMPED or term.power != 0.5 or number is None or number <= 0:
        return NOTHING
    return replace(term, eps=(number / term.scale) ** 2, left=None, clamp=number)


def expanded(reader: "Reader", node: Node) -> Term:
    term = reader.term(argument_of(node))
    return term if term.is_of_rows else NOTHING


def variance(reader: "Reader", node: Node) -> Term:
    """The variance of a row, alone or as the first of two results."""
    args, source = bind(node), argument_of(node)
    term = reader.term(source)
    if not (reader.centred and term.is_input and reader.reduces(source, args.get("dim"))):
        return NOTHING
    correction = args.get("unbiased", args.get("correction"))
    correction = 1.0 if correction is None else constant_of(correction)
    if correction is None or reader.count <= correction:
        return NOTHING
    scale = reader.count / (reader.count - correction)
    return replace(term, base="u", degree=0, power=1.0, scale=scale)


def item(reader: "Reader", node: Node) -> Term:
    """A result of var_mean."""
    source, index = item_of(node)
    has_results = source is not None and isinstance(values_of(source), tuple | list)
    if not has_results or name_of(source) != "var_mean":
        return NOTHING
    reader.terms[source] = term = variance(reader, source)
    if term is NOTHING or index == 0:
        return term
    is_mean = index == 1 and reader.term(argument_of(source)).base == "x"
    return Term("mean", degree=1) if is_mean else NOTHING


DEPTH = 24  # how many nested operations are read; a spelled-out norm has about ten
RULES: dict[str, Callable[["Reader", Node], Term]] = {
    "mul": product,
    "div": quotient,
    "add": total,
    "sub": difference,
    "var": variance,
    "getitem": item,
    **dict.fromkeys(("pow", *POWERS), power),
    **dict.fromkeys(CASTS, cast),
    **dict.fromkeys(VECTOR_NORMS, vector_norm),
    **dict.fromkeys(("clamp", "clamp_min"), clamp),
    **dict.fromkeys(EXPANDS, expanded),
    **dict.fromkeys(("mean", "sum"), reduced),
}


def groups_of(node: object, x: Tensor, dims: int) -> Sizes | None:
    """The leading sizes of x by which a node lies, without ones at their end; None if it does not.

    dims: how many dimensions of x are a row.
    """
    value = value_of(node)
    if value is None or value.dtype not in PARAMETER_DTYPES or value.device != x.device:
        return None
    groups = list(value.shape[: max(0, value.dim() - dims)])
    while groups and is_of_size_one(groups[-1]):
        groups.pop()
    fits = same_sizes(value.shape[-dims:], x.shape[x.dim() - dims :])
    fits = fits and len(groups) <= x.dim() - dims and same_sizes(groups, x.shape[: len(groups)])
    return tuple(groups) if fits else None


def operand(node: object, x: Tensor, dims: int, groups: Sizes | None = None) -> Node | None:
    """What lies by group and meets x as this operand does, or None.

    groups: the sizes by which it has to lie, if only these fit.
    """
    lies_by = groups_of(node, x, dims)
    value = value_of(node)
    if not isinstance(node, Node) or lies_by is None or value.dim() not in (dims, x.dim()):
        return None
    return (
        None if groups is not None and not same_sizes(lies_by, groups) else _source(node, x, dims)
    )


def scale_of(node: Node, x: Tensor, dims: int) -> tuple[Node, bool, str | None] | None:
    """The scale of a factor 1 + scale, whether the factor is rounded to 16 bits, and why no op
    takes the scale, or None. Returns None for other factors.
    """
    scale, factor, rounds = None, node, False
    while scale is None:
        value = value_of(factor)
        rounds = rounds or value is None or value.dtype in DTYPES_16_BIT
        pairs = in_turn(operands_of("add", factor))
        scale = next((a for a, b in pairs if isinstance(a, Node) and constant_of(b) == 1), None)
        source = _viewed(factor) or cast_input(factor)
        if scale is None and source is None:
            return None
        factor = source
    groups = groups_of(scale, x, dims)
    if groups is None or operand(node, x, dims, groups) is None:
        value = value_of(node)
        shape = "unknown" if value is None else list(value.shape)
        return scale, rounds, f"1 + scale is {shape}, with no leading sizes of {list(x.shape)}"
    return _source(scale, x, dims), rounds, None


def _source(node: Node, x: Tensor, dims: int) -> Node:
    """The first node that has the numbers of a node and lies by the same groups."""
    while True:
        node = before_exact_casts(node)
        source = _viewed(node)
        if source is None or groups_of(source, x, dims) is None:
            return node
        node = source


def _viewed(node: Node) -> Node | None:
    """The input of a view that puts in or leaves out nothing but sizes of 1, or None."""
    source: Any = argument_of(node)
    if name_of(node) not in VIEWS or value_of(source) is None or value_of(node) is None:
        return None
    index = item_of(node)[1] if name_of(node) == "getitem" else ()
    parts = index if isinstance(index, tuple | list) else (index,)
    if not all(part is None or part is ... or isinstance(part, slice) for part in parts):
        return None
    sizes = [[n for n in value_of(t).shape if not is_of_size_one(n)] for t in (node, source)]
    return source if same_sizes(*sizes) else None


class Reader:
    """Reads the nodes that are made of one input x.

    x: the input, before all exact casts. centred: whether u is x − mean(x). dims: the number of
    dimensions that are normalised together. terms: the terms of the nodes that were read so far.
    """

    def __init__(self, x: Node, centred: bool, dims: int, allowed: Allowed):
        self.x, self.centred, self.dims = before_exact_casts(x), centred, dims
        self.value = known(self.x)
        self.allowed = allowed
        self.terms: dict[Node, Term] = {}
        self._depth = 0

    @property
    def count(self) -> int:
        """The number of elements that are normalised together."""
        return hidden_of(self.value, self.dims)

    def term(self, node: object) -> Term:
        """The term that a node computes, or NOTHING.

        Raises Left if a node of an expression is malformed, or has no metadata.
        """
        if not isinstance(node, Node):
            return NOTHING
        if node not in self.terms:
            if self._depth == DEPTH:
                return NOTHING
            self._depth += 1
            try:
                self.terms[node] = self._read(node)
            finally:
                self._depth -= 1
        return self.terms[node]

    def reduces(self, node: Node, dim: object) -> bool:
        """Whether `dim` names the dimensions of a node that are normalised together."""
        return trailing(value_of(node), dim) == self.dims

    def fits_rows(self, node: Node) -> bool:
        """Whether a node has one number for each row, at its row's place beside x."""
        while name_of(node) in EXPANDS:
            node = argument_of(node)
        return same_sizes(known(node).shape, statistic_shape(self.value, self.dims))

    def computes(self, node: Node) -> bool:
        """Whether a node computes a term of x. A cast of x, a parameter or a gate does not."""
        term = self.terms.get(node, NOTHING)
        of_x = term is not NOTHING and not term.is_parameter
        return of_x and before_exact_casts(node) is not self.x

    def _read(self, node: Node) -> Term:
        if before_exact_casts(node) is self.x:
            return Term("x" if self.centred else "u", degree=1)
        rule = total if node.target in ADDS_IN_PLACE else RULES.get(name_of(node))
        term = NOTHING if rule is None else rule(self, node)
        if term is not NOTHING:
            dtypes = (self.value.dtype, torch.float32)
            return NOTHING if term.is_complete and known(node).dtype not in dtypes else term
        value = value_of(node)
        if value is None or not parameter_fits(value, self.value, self.dims):
            return NOTHING
        return Term(weight=before_exact_casts(node))
