"""Reader: the terms of the nodes that are made of one input."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import SymInt
from torch.fx import Node

from . import reductions, rules
from .calls import CASTS, DTYPES_16_BIT, before_exact_casts, casts_between, summands
from .nodes import name_of, value_of
from .norms import check_width, hidden_of, known, parameter_fits, same_sizes
from .term import Term

DEPTH = 24  # how many nested operations are read; a spelled-out norm has about ten
RULES: dict[str, Callable[["Reader", Node], Term | None]] = {
    "mul": rules.product,
    "div": rules.quotient,
    "add": rules.total,
    "sub": rules.difference,
    "neg": rules.negative,
    "pow": rules.power,
    **dict.fromkeys(rules.POWERS, rules.power),
    **dict.fromkeys(CASTS, rules.cast),
    **dict.fromkeys(("mean", "sum"), reductions.reduced),
    **dict.fromkeys(("var", "std"), reductions.spread),
    "getitem": reductions.item,
    "unsqueeze": reductions.unsqueezed,
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), reductions.expanded),
    **dict.fromkeys(("norm", "linalg_norm", "linalg_vector_norm"), reductions.length),
    "normalize": reductions.unit_length,
    **dict.fromkeys(("clamp", "clamp_min", "clip"), reductions.clamped),
}


class Reader:
    """Reads the nodes that are made of one input x.

    x: the input, before all exact casts. centred: whether u is x − mean(x). dims: the number of
    dimensions that are normalised together. terms: the terms of the nodes that were read so far.
    """

    def __init__(self, x: Node, centred: bool, dims: int):
        self.x, self.centred, self.dims = before_exact_casts(x), centred, dims
        self.value = known(self.x)
        self.terms: dict[Node, Term | None] = {}
        self._depth = 0

    @property
    def rows(self) -> tuple[int | SymInt, ...]:
        """The shape of the rows' numbers, with the normalised dimensions as ones."""
        leading = self.value.shape[: self.value.dim() - self.dims]
        return (*leading, *[1] * self.dims)

    @property
    def count(self) -> int:
        """The number of elements that are normalised together."""
        check_width(self.value, self.dims)
        return hidden_of(self.value, self.dims)

    def term(self, node: object) -> Term | None:
        """The term that a node computes; None for a number, and for what the form does not have.

        Raises Left if a node of an expression is malformed, or has no metadata.
        """
        if not isinstance(node, Node):
            return None
        if node not in self.terms:
            if self._depth == DEPTH:
                return None
            self._depth += 1
            try:
                self.terms[node] = self._read(node)
            finally:
                self._depth -= 1
        return self.terms[node]

    def seed(self, node: Node, term: Term) -> None:
        """Give a node a term that is not read from its operands."""
        self.terms[node] = self._rounded(term, node)

    def fits_rows(self, node: Node) -> bool:
        """Whether a node has one number for each row, at its row's place beside x."""
        shape = known(node).shape
        return same_sizes(shape, self.rows) or same_sizes(shape, self.value.shape)

    def _read(self, node: Node) -> Term | None:
        if before_exact_casts(node) is self.x:
            base = "x" if self.centred else "u"
            return Term(base, degree=1, inputs=casts_between(self.x, node))
        name = name_of(node) or ("add" if summands(node) else None)  # or an addition in place
        term = RULES[name](self, node) if name in RULES else None
        if term is None:
            return self._parameter(node)
        if term.is_parameter:
            return term
        return self._rounded(replace(term, parts=term.parts | {node}), node)

    def _parameter(self, node: Node) -> Term | None:
        value = value_of(node)
        if value is None or not parameter_fits(value, self.value, self.dims):
            return None
        source = before_exact_casts(node)
        return Term(weight=source, inputs=casts_between(source, node))

    def _rounded(self, term: Term, node: Node) -> Term | None:
        """The term, with the rounding of its node's dtype."""
        dtype = known(node).dtype
        if not term.is_complete:
            return term
        if dtype not in (self.value.dtype, torch.float32):
            return None
        if dtype in DTYPES_16_BIT:
            return replace(term, rounded=term.rounded | {term.stage})
        return term
