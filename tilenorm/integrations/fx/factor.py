"""Read how the factor of a quantised row, or of a group of 128 elements, is computed from y.

factor = (F / max(a, 1e-12)).float()        a = max |y| of a group, in float64
factor = exp2(floor(log2(factor)))          in some chains
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import SymInt
from torch.fx import Node

from .calls import CASTS, DTYPES_16_BIT, bind, cast_input, operands
from .gradient import item_of
from .nodes import DETACHES, Left, constant_of, name_of, values_of
from .norms import known, same_sizes, trailing

# Operations that change neither a number nor the order of the numbers, if they keep the dtype.
VIEWS = ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze")
VIEWS += (*DETACHES, "contiguous", "clone")
CLAMPS = ("clamp", "clip", "clamp_min", "clamp_max")
SMALLEST = 1e-12
# (dtype, a dtype that has all its numbers).
WIDER = {(narrow, torch.float32) for narrow in DTYPES_16_BIT}
WIDER |= {(narrow, torch.float64) for narrow in (*DTYPES_16_BIT, torch.float32)}


def dynamic(factor: Node, y: Node, most: float, parts: set[Node]) -> tuple[bool, int]:
    """Whether a factor is a power of two, and the number of elements of a group.

    Raises Left for a factor that is made in another way.
    """
    node, power_of_2 = factor, name_of(factor) == "exp2"
    if power_of_2:
        for step in ("exp2", "floor", "log2"):
            node = _argument(node, step, parts, torch.float32)
    parts.add(node)
    source = cast_input(node)
    if source is None or known(node).dtype != torch.float32:
        raise Left(f"{node}, of its factor, is no cast to float32")
    if known(source).dtype != torch.float64:
        why = "rounds other than the op's" if known(source).dtype == torch.float32 else "is not"
        raise Left(f"its quotient {source.name} is {known(source).dtype}, and {why} float64")
    peak, low, high = clamped(_divisor(source, most, parts), parts)
    if (low, high) != (SMALLEST, math.inf):
        raise Left(f"its largest magnitude is not clamped to at least {SMALLEST:g}")
    return power_of_2, _group(peak, y, parts)


def _argument(node: object, name: str, parts: set[Node], dtype=None) -> object:
    """What a node of one argument reads. Raises Left for a node of another name or dtype."""
    if not isinstance(node, Node) or name_of(node) != name:
        raise Left(f"{node}, of its factor, is no {name}")
    if dtype is not None and known(node).dtype != dtype:
        raise Left(f"{node.name}, of its factor, is {known(node).dtype}, not {dtype}")
    parts.add(node)
    return next(iter(bind(node).values()))


def _divisor(node: Node, most: float, parts: set[Node]) -> object:
    """d of most / d, or of the product of most and 1 / d."""
    pair = operands(node) if name_of(node) in ("mul", "div") else ()
    parts.add(node)
    if pair and name_of(node) == "div" and constant_of(pair[0]) == most:
        return pair[1]
    for inverse, number in (pair, pair[::-1]) if pair and name_of(node) == "mul" else ():
        if isinstance(inverse, Node) and constant_of(number) == most:
            return _argument(inverse, "reciprocal", parts, torch.float64)
    raise Left(f"{node.name}, of its factor, is not {most:g} divided by the largest magnitude")


def _group(peak: Any, y: Node, parts: set[Node]) -> int:
    """The number of elements of which a node is the largest magnitude."""
    while isinstance(peak, Node) and name_of(peak) in CASTS:
        source = cast_input(peak)
        if source is None or known(source).dtype.itemsize > known(peak).dtype.itemsize:
            break
        parts.add(peak)
        peak = source
    name, (reduction, place) = "amax", item_of(peak) if isinstance(peak, Node) else (None, None)
    if reduction is not None and place == 0:
        parts.add(peak)
        name, peak = "max", reduction
        parts |= {user for user in reduction.users if not user.users}
    magnitude = _argument(peak, name, parts)
    args = bind(peak)
    if not isinstance(magnitude, Node) or not args.get("keepdim") or "dim" not in args:
        raise Left(f"{peak.name}, of its factor, reduces without keepdim")
    dims = trailing(known(magnitude), args["dim"])
    if not dims:
        raise Left(f"{peak.name}, of its factor, does not reduce the last dimensions")
    source = _argument(same_numbers(magnitude), "abs", parts)
    nodes = [*before(magnitude), *before(source)]
    if nodes[-1] is not y:
        raise Left(f"its factor is made of {nodes[-1].name}, not of {y.name}")
    parts |= {*nodes} - {y}
    sizes = known(magnitude).shape[-dims:]
    if not all(isinstance(size, int) for size in sizes):
        raise Left("the number of elements of its groups is symbolic")
    return math.prod(sizes)


def check_groups(shape, factors, group: int) -> None:
    """Raise Left unless each group of a tensor stands beside its factor."""
    dims, count = 0, 1
    while count < group and dims < len(shape) and isinstance(shape[-1 - dims], int):
        dims += 1
        count *= shape[-dims]
    dims = dims or 1
    wanted = (*shape[: len(shape) - dims], *[1] * dims)
    if count != group or not same_sizes(factors, wanted):
        raise Left(f"its factors have the shape {list(factors)}, not {list(wanted)}")


def clamped(node: object, parts: set[Node]) -> tuple[Any, float, float]:
    """The node before all clamps, and the bounds. Adds the clamps to parts."""
    low, high = -math.inf, math.inf
    while isinstance(node, Node) and name_of(node) in CLAMPS:
        parts.add(node)
        args = bind(node)
        bounds = {
            key: constant_of(args[key]) for key in ("min", "max") if args.get(key) is not None
        }
        if None in bounds.values():
            return node, math.nan, math.nan  # a bound that depends on data
        low, high = max(low, bounds.get("min", low)), min(high, bounds.get("max", high))
        node = next(iter(args.values()))
    return node, low, high


def before(node: object) -> Iterator[Node]:
    """A node, and the nodes before it that have the same numbers in the same order.

    The last one is that which computes the numbers.
    """
    while isinstance(node, Node):
        yield node
        node = one_before(node)


def one_before(node: Node) -> Node | None:
    """The input of a node that changes neither a number nor the order of the numbers, or None."""
    if name_of(node) in VIEWS:
        source, wider = _viewed(node), ()
    else:
        source, wider = cast_input(node), WIDER
    if not isinstance(source, Node):
        return None
    dtypes = known(source).dtype, known(node).dtype
    return source if dtypes[0] == dtypes[1] or dtypes in wider else None


def _viewed(node: Node) -> object:
    """What a view reads. The methods view and reshape take sizes one by one too."""
    sizes = node.args[1:]
    one_by_one = node.target in ("view", "reshape") and not node.kwargs
    if not one_by_one or not sizes or isinstance(sizes[0], tuple | list | torch.dtype):
        return next(iter(bind(node).values()))
    shape = known(node).shape
    sizes = [values_of(n) if isinstance(n, Node) else n for n in sizes]
    fit = len(sizes) == len(shape) and all(
        isinstance(n, int | SymInt) and (same_sizes([n], [-1]) or same_sizes([n], [size]))
        for n, size in zip(sizes, shape, strict=True)
    )
    if not fit:
        raise Left(f"{node.name} has other sizes than it was traced with")
    return node.args[0]


def same_numbers(node: Node) -> Node:
    """The first node with the numbers of a node."""
    *_, first = before(node)
    return first


def inverted(node: object) -> Node | None:
    """s if a node computes 1 / s, perhaps times 1."""
    name, source = name_of(node) if isinstance(node, Node) else None, None
    if name == "reciprocal":
        source = next(iter(bind(node).values()))
    elif name == "div" and (pair := operands(node)):
        source = pair[1] if constant_of(pair[0]) == 1 else None
    elif name == "mul" and (pair := operands(node)):
        inverse, number = pair if isinstance(pair[0], Node) else pair[::-1]
        is_inverse = isinstance(inverse, Node) and name_of(inverse) == "reciprocal"
        source = inverted(inverse) if is_inverse and constant_of(number) == 1 else None
    return source if isinstance(source, Node) else None
