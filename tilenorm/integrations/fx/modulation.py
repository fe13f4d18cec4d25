"""What scales and shifts a norm by group, and what gates the sum before it, in graphs.

    norm · (1 + scale) + shift          residual + gate · branch

Each of scale, shift and gate has leading sizes of x, and then those of a row, as tilenorm's ops
take it. In a graph it is often a view with sizes of 1 in front of the row, such as scale[:, None].
"""

from typing import Any

from torch import SymInt, Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .nodes import (
    DTYPES_16_BIT,
    argument_of,
    before_exact_casts,
    cast_input,
    constant_of,
    in_turn,
    item_of,
    name_of,
    operands_of,
    value_of,
)
from .norms import PARAMETER_DTYPES, same_sizes

VIEWS = ("unsqueeze", "squeeze", "view", "reshape", "_unsafe_view", "slice", "getitem")
Sizes = tuple[int | SymInt, ...]


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
    found, value = groups_of(node, x, dims), value_of(node)
    if not isinstance(node, Node) or found is None or value.dim() not in (dims, x.dim()):
        return None
    return None if groups is not None and not same_sizes(found, groups) else _source(node, x, dims)


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


def is_of_size_one(size: int | SymInt) -> bool:
    """Whether a size is 1 for all values of its symbols."""
    return statically_known_true(size == 1)
