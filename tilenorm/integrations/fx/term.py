"""Term: the normal form that every spelling of a norm has.

    scale · u^degree · (mean(u²) + eps)^power · (weight + offset) + bias, times act(gate)

u is x, or x − mean(x) for LayerNorm. A norm is the term of scale 1, degree 1 and power −1/2,
however it is written: x / sqrt(...), x times 1 / sqrt(...), or weight · x / sqrt(...).
"""

import math
from dataclasses import dataclass, replace

from torch.fx import Node

CLOSE = 1e-9  # no float32 result tells a scale that is this close to 1 from 1


@dataclass(frozen=True)
class Term:
    """What a node computes, in the normal form.

    base: "u" is what is normalised, "x" the input of a LayerNorm, and "mean" the mean of its rows.
    left: why no norm of tilenorm's is this expression, or None. rounded: the stages (x_hat, weight,
    bias, gate) after which the result is rounded to 16 bits. parts: the nodes that compute the
    term. inputs: the nodes that prepare x, a parameter or a gate for it, by casts for example.
    Other nodes may use these.
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
    left: str | None = None
    rounded: frozenset[str] = frozenset()
    parts: frozenset[Node] = frozenset()
    inputs: frozenset[Node] = frozenset()

    @property
    def is_normalized(self) -> bool:
        """Whether the term is a number times a norm."""
        return self.degree == 1 and self.power == -0.5

    @property
    def is_complete(self) -> bool:
        """Whether the term is a norm."""
        return self.is_normalized and is_one(self.scale)

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
        """What was done to the normalised row last."""
        done = {"gate": self.gate, "bias": self.bias, "weight": self.weight}
        return next((stage for stage, node in done.items() if node is not None), "x_hat")

    def scaled(self, number: float) -> "Term | None":
        """The product with a number."""
        product = (self.degree or self.power) and self.bias is None and self.gate is None
        if not product or not number or not math.isfinite(number):
            return None
        return replace(self, scale=self.scale * number)

    def to_the(self, exponent: float | None) -> "Term | None":
        """A power of the term: the square of u, or any power of a number of a row."""
        if exponent is None or self.weight is not None or self.base != "u":
            return None
        if self.degree == 1 and not self.power and exponent == 2:
            return replace(self, degree=2, scale=self.scale**2)
        if not self.is_of_rows or self.scale <= 0 or not 0 < abs(exponent) <= 4:
            return None
        return replace(self, scale=self.scale**exponent, power=self.power * exponent)

    def times(self, other: "Term") -> "Term | None":
        """The product with a term that stands for no number."""
        pair = (self, other)
        sums = any(t.bias is not None or t.gate is not None or t.base != "u" for t in pair)
        weights, roots = [t for t in pair if t.weight is not None], [t for t in pair if t.power]
        degree = self.degree + other.degree
        if sums or len(weights) > 1 or len(roots) > 1 or all(t.is_parameter for t in pair):
            return None
        if degree > 2 or (degree == 2 and (weights or roots)):
            return None
        weighted, root = (*weights, self)[0], (*roots, self)[0]
        return Term(
            "u", self.scale * other.scale, degree, root.power, root.eps,
            weighted.weight, weighted.offset, left=self.left or other.left,
            rounded=self.rounded | other.rounded, parts=self.parts | other.parts,
            inputs=self.inputs | other.inputs,
        )  # fmt: skip


def is_one(scale: float) -> bool:
    return abs(scale - 1) < CLOSE
