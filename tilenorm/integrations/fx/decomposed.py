"""Match RMSNorm written as elementary operations, as models write it and PyTorch decomposes it.

The pattern is x / sqrt(mean(x²) + eps), times a weight before or after a cast to x's dtype. The
code gives the nodes these names; root is an rsqrt, a sqrt or a power of -0.5:

    square -> mean -> mean_plus_eps -> root -> x_hat -> casts and the product with the weight
"""

import torch
from torch.fx import Node

from .calls import (
    added_number,
    before_exact_casts,
    bind,
    cast_input,
    operands,
    summands,
)
from .nodes import Left, name_of, number_of, only_user, value_of, writes
from .norms import Norm, known, parameter_fits, trailing


def match_decomposed(root: Node) -> Norm | None:
    """The RMSNorm whose (reciprocal) root of the mean square is `root`, or None if there is none.

    Raises Left if the nodes compute an RMSNorm that no single op can replace.
    """
    mean_square = _match_mean_square(root)
    if mean_square is None:
        return None
    square, mean, mean_plus_eps, dim, eps = mean_square
    for node in (square, mean, mean_plus_eps, root):
        if only_user(node) is None:
            raise Left(_other_users(node))
    x_hat = only_user(root)
    factor = _factor_beside_root(root, x_hat)
    x = before_exact_casts(factor) if isinstance(factor, Node) else None
    if x is None or before_exact_casts(_squared(square)) is not x:
        return None
    parts = {square, mean, mean_plus_eps, root, x_hat}
    for node in sorted(parts):
        if known(node).dtype != torch.float32:
            raise Left(
                f"its intermediate result {node.name} is {value_of(node).dtype}, not float32"
            )
    dims = trailing(value_of(square), dim)
    if not dims:
        return None
    if eps is None:
        raise Left("its eps is a tensor, or a number that depends on data")
    parts.update(_path(x, factor), _path(x, _squared(square)))
    return _extend(x, x_hat, dims, eps, parts)


def _match_mean_square(root: Node) -> tuple[Node, Node, Node, object, float | None] | None:
    """square, mean, mean_plus_eps, the dimensions that mean reduces, and eps if it is a number."""
    if not _is_root(root):
        return None
    mean_plus_eps = _input_of(root)
    pair = summands(mean_plus_eps)
    for mean, eps in (pair, pair[::-1]) if pair else ():
        if isinstance(mean, Node) and name_of(mean) == "mean":
            args, square = bind(mean), _input_of(mean)
            if args.get("keepdim") and isinstance(_squared(square), Node):
                return square, mean, mean_plus_eps, args.get("dim"), number_of(eps)
    return None


def _is_root(node: Node) -> bool:
    name = name_of(node)
    return name in ("rsqrt", "sqrt") or (name == "pow" and _exponent(node) == -0.5)


def _input_of(node: Node) -> object:
    return next(iter(bind(node).values()))


def _exponent(node: Node) -> float | None:
    _, exponent = bind(node).values()  # prims' op has another name for the second argument
    return number_of(exponent)


def _squared(node: object) -> Node | None:
    """x if the node computes x², else None."""
    name = name_of(node) if isinstance(node, Node) else None
    if name == "square" or (name == "pow" and _exponent(node) == 2):
        return _input_of(node)
    if name == "mul" and len(pair := operands(node)) == 2 and pair[0] is pair[1]:
        return pair[0]
    return None


def _factor_beside_root(root: Node, x_hat: Node) -> object:
    """x, or a cast of x, if x_hat is x * rsqrt(...) or x / sqrt(...), else None."""
    pair = operands(x_hat) if name_of(x_hat) in ("mul", "div") else ()
    if name_of(root) == "sqrt":
        return pair[0] if name_of(x_hat) == "div" and pair and pair[1] is root else None
    others = [p for p in pair if p is not root] if name_of(x_hat) == "mul" else []
    return others[0] if others else None


def _extend(x: Node, x_hat: Node, dims: int, eps: float, parts: set[Node]) -> Norm:
    """The longest norm that starts with x_hat, ends in x's dtype, and one op can compute."""
    dtype = known(x).dtype
    end, weight, offset, rounded, norm = x_hat, None, 0.0, False, None
    while True:
        if value_of(end).dtype == dtype:
            rounding = "early" if rounded and weight is not None else "late"
            norm = Norm(
                "rms", x, weight, None, dims, eps, offset, rounding, {0: end}, end,
                tuple(sorted(parts)),
            )  # fmt: skip
        user = only_user(end)
        if user is None or value_of(user) is None:
            break
        if cast_input(user) is end:
            target_dtype = value_of(user).dtype
            if target_dtype not in (dtype, torch.float32):
                break
            rounded = rounded or (weight is None and target_dtype == dtype != torch.float32)
        elif weight is None and (match := _match_weight(user, end, value_of(x), dims)) is not None:
            product_factor, weight, offset = match
            parts.update(_path(weight, product_factor))
        else:
            break
        parts.add(user)
        end = user
    if norm is None and only_user(end) is None:
        raise Left(_other_users(end))
    if norm is None:
        raise Left(f"its output is {value_of(end).dtype}, its input {dtype}")
    return norm


def _other_users(node: Node) -> str:
    if not node.users:
        return f"nothing uses its intermediate result {node.name}"
    return f"other nodes (perhaps of its gradient) use its intermediate result {node.name}"


def _match_weight(
    node: Node, x_hat: Node, x: torch.Tensor, dims: int
) -> tuple[Node, Node, float] | None:
    """If a node is x_hat * (weight + offset): the node of that sum, the weight and the offset."""
    pair = operands(node) if name_of(node) == "mul" else ()
    others = [p for p in pair if p is not x_hat and value_of(p) is not None]
    if len(others) != 1 or not parameter_fits(value_of(others[0]), x, dims):
        return None
    weight, offset = others[0], 0.0
    if value_of(weight).dtype == torch.float32 and not writes(weight):
        weight, offset = added_number(weight) or (weight, 0.0)
    return others[0], before_exact_casts(weight), offset


def _path(source: Node, node: Node) -> set[Node]:
    """The casts and additions of a number that lead from source to node, including node."""
    path = set()
    while node is not source:
        path.add(node)
        node = cast_input(node) or added_number(node)[0]
    return path
