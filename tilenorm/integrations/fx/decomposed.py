"""RMSNorm spelled out, as models write it and as PyTorch decomposes its own.

x / sqrt(mean(x²) + eps), times a weight before or after a cast to x's dtype
"""

import torch
from torch.fx import Node

from .nodes import (
    Left,
    arguments,
    cast_of,
    name_of,
    number_of,
    only_user,
    operands,
    shifted,
    value_of,
    widened,
    writes,
)
from .norms import Norm, parameter_fits, trailing


def decomposed(root: Node) -> Norm | None:
    """The RMSNorm whose reciprocal root mean square, or root, is `root`; None if it is not one.

    Raises Left if it is one that no single op can stand for.
    """
    found = _mean_square(root)
    if found is None:
        return None
    square, mean, added, dims, eps = found
    for node in (square, mean, added, root):
        if only_user(node) is None:
            raise Left(_shared(node))
    x_hat = only_user(root)
    multiplied = _multiplied(root, x_hat)
    if value_of(multiplied) is None or value_of(x_hat) is None:
        return None
    x = widened(multiplied)
    if widened(_squared(square)) is not x:
        return None
    parts = {square, mean, added, root, x_hat}
    for node in parts:
        if value_of(node).dtype != torch.float32:
            raise Left(f"{node.name}, within it, is {value_of(node).dtype}, not float32")
    parts.update(_made_of(multiplied, x), _made_of(_squared(square), x))
    return _outermost(x, x_hat, dims, eps, parts)


def _mean_square(root: Node) -> tuple[Node, Node, Node, int, float] | None:
    """square, mean, mean + eps, how many dimensions they are over, eps."""
    if not _is_root(root):
        return None
    added = _input_of(root)
    mean, eps = shifted(added) or (None, 0.0)
    if mean is None or name_of(mean) != "mean":
        return None
    given = arguments(mean, "input", "dim", "keepdim")
    square, dims = given["input"], trailing(value_of(given["input"]), given.get("dim"))
    if not given.get("keepdim") or not dims or not _squared(square):
        return None
    if any(value_of(node) is None for node in (root, added, mean, square)):
        return None
    return square, mean, added, dims, eps


def _is_root(node: Node) -> bool:
    name = name_of(node)
    return name in ("rsqrt", "sqrt") or (name == "pow" and _exponent(node) == -0.5)


def _input_of(node: Node) -> object:
    return arguments(node, "input").get("input")


def _exponent(node: Node) -> float | None:
    return number_of(arguments(node, "input", "exponent").get("exponent"))


def _squared(node: object) -> Node | None:
    """x where a node is x²."""
    name = name_of(node) if isinstance(node, Node) else None
    if name == "square" or (name == "pow" and _exponent(node) == 2):
        return _input_of(node)
    if name == "mul" and len(pair := operands(node)) == 2 and pair[0] is pair[1]:
        return pair[0]
    return None


def _multiplied(root: Node, x_hat: Node) -> object:
    """x, or a cast of it, where x_hat is x / sqrt(mean(x²) + eps)."""
    pair = operands(x_hat) if name_of(x_hat) in ("mul", "div") else ()
    if name_of(root) == "sqrt":
        return pair[0] if name_of(x_hat) == "div" and pair and pair[1] is root else None
    others = [p for p in pair if p is not root] if name_of(x_hat) == "mul" else []
    return others[0] if others else None


def _outermost(x: Node, x_hat: Node, dims: int, eps: float, parts: set[Node]) -> Norm:
    """As much of what follows x̂ as one op computes, up to where there is x's dtype again."""
    dtype = value_of(x).dtype
    end, weight, offset, rounded, found = x_hat, None, 0.0, False, None
    while True:
        if value_of(end).dtype == dtype:
            rounding = "early" if rounded and weight is not None else "late"
            found = Norm(
                "rms", x, weight, None, dims, eps, offset, rounding, {0: end}, end,
                tuple(sorted(parts)),
            )  # fmt: skip
        user = only_user(end)
        if user is None or value_of(user) is None:
            break
        if cast_of(user) is end:
            to = value_of(user).dtype
            if to not in (dtype, torch.float32):
                break
            rounded = rounded or (weight is None and to == dtype != torch.float32)
        elif weight is None and (factor := _factor(user, end, value_of(x), dims)) is not None:
            product, weight, offset = factor
            parts.update(_made_of(product, weight))
        else:
            break
        parts.add(user)
        end = user
    if found is None:
        shared = only_user(end) is None
        raise Left(
            _shared(end) if shared else f"its output is {value_of(end).dtype}, its input {dtype}"
        )
    return found


def _shared(node: Node) -> str:
    return f"{node.name}, within it, is used by others too, as by a gradient spelled out"


def _factor(node: Node, x_hat: Node, x: torch.Tensor, dims: int) -> tuple[Node, Node, float] | None:
    """weight + offset, weight and offset where a node is x̂ · (weight + offset)."""
    pair = operands(node) if name_of(node) == "mul" else ()
    others = [p for p in pair if p is not x_hat and value_of(p) is not None]
    if len(others) != 1 or not parameter_fits(value_of(others[0]), x, dims):
        return None
    weight, offset = others[0], 0.0
    if value_of(weight).dtype == torch.float32 and not writes(weight):
        weight, offset = shifted(weight) or (weight, 0.0)
    return others[0], widened(weight), offset


def _made_of(node: Node, source: Node) -> set[Node]:
    """The casts and shifts that make a node of its source."""
    found = set()
    while node is not source:
        found.add(node)
        node = cast_of(node) or shifted(node)[0]
    return found
