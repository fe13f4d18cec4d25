"""Comparisons of sizes, some of which the data alone tell: the rows of x[mask] have such a number.

A graph has a symbol for such a size. Python's own comparison raises for it, because the graph would
have to be another one for each answer. Here a comparison that only the data decide has one answer,
and the graph asserts what has to hold for that when it runs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import SymBool, SymInt, Tensor
from torch.compiler import is_compiling


def known(condition: Any) -> bool:
    """Whether a condition of sizes holds for certain; no where only the data tell."""
    if not is_compiling() and not isinstance(condition, SymBool):
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # imports SymPy

    return guard_or_false(condition)


def holds(condition: Any) -> bool:
    """Whether a condition of sizes holds. Yes where only the data tell: the graph asserts it."""
    if not is_compiling() and not isinstance(condition, SymBool):
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import guard_or_true  # imports SymPy

    if not guard_or_true(condition):
        return False
    torch._check(condition)
    return True


def same(a: Sequence, b: Sequence) -> bool:
    """Whether two shapes are equal, both of them tuples or lists."""
    if not is_compiling():
        try:
            return a == b
        except RuntimeError:  # what make_fx raises where only the data tell
            pass
    return len(a) == len(b) and all(holds(m == n) for m, n in zip(a, b, strict=True))


def has_value(size: Any) -> bool:
    """Whether a size is a number, or a symbol that stands for one that the graph's maker has."""
    if not isinstance(size, SymInt):
        return True
    from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols  # imports SymPy

    return not has_free_unbacked_symbols(size)


def divides(few: Any, many: Any) -> bool:
    """Whether a size is a divisor of another, or both are 0.

    Of two sizes that only the data tell, the graph asserts that they are equal.
    """
    if known(few == many):
        return True
    if known(few > 0):
        return holds(many % few == 0)
    return holds(few == many)


def without_tensor(number: Any) -> Any:
    """A number instead of a tensor that PyTorch takes for one: without dimensions or a gradient."""
    if isinstance(number, Tensor) and not number.dim() and not number.requires_grad:
        return number.item()
    return number
