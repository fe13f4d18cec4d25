"""Read the operations that quantise a norm's output to 8-bit floats, as torchao writes them.

    factor = (F / max(a, 1e-12)).float()        a = max |y| of a group, in float64
    factor = exp2(floor(log2(factor)))          in some chains
    q = clamp(y.float() * factor, -F, F).to(float8)

F is the largest number of the 8-bit dtype. A static chain has factor = 1 / scale, where scale is
one number that the graph is given. A chain is read from q to y.
"""

from dataclasses import dataclass

import torch
from torch.fx import Node

from ...spec import FP8, Quantization
from .calls import CASTS, bind, cast_input, operands
from .factor import before, check_groups, clamped, dynamic, inverted, one_before, same_numbers
from .gradient import item_of
from .nodes import Left, is_idle, name_of, value_of
from .norms import known, same_sizes

NORM = torch.ops.tilenorm.norm.default
NORM_QUANTIZED = torch.ops.tilenorm.norm_quantized.default
OUTPUT = 3  # index of y among the results of tilenorm::norm_quantized
DTYPES = {getattr(torch, name): name for name in FP8}
BLOCK = 128


@dataclass(frozen=True)
class Chain:
    """The operations from a norm's output y to its codes q.

    norm: the call of tilenorm::norm. given: the static scale, or None. factor: the node of the
    factor. inverses: the nodes that compute 1 / factor. others: whether more nodes use the factor.
    parts: the nodes of the chain, of which other nodes may use some.
    """

    norm: Node
    y: Node
    q: Node
    how: Quantization
    given: Node | None
    factor: Node
    inverses: tuple[Node, ...]
    others: bool
    parts: frozenset[Node]


def match_chain(q: Node) -> Chain | None:
    """The chain that ends at a cast to 8-bit floats; None if it does not start at a norm.

    Raises Left if it starts at a norm, and tilenorm's op would give other codes or scales.
    """
    value, parts = value_of(q), {q}
    if value is None or value.dtype not in DTYPES or name_of(q) not in CASTS:
        return None
    name = DTYPES[value.dtype]
    product, low, high = clamped(cast_input(q), parts)
    operand, y, factor = _product(product)
    if y is None:
        return None
    norm, place = item_of(y)
    if (norm.target, place) == (NORM_QUANTIZED, OUTPUT):
        raise Left("its norm is quantised already, and one op quantises once")
    if factor is None:
        raise Left(f"{product.name} is no product of its norm and a factor")
    if (low, high) != (-FP8[name], FP8[name]):
        raise Left(f"it is not clamped to ±{FP8[name]:g} before the cast to {value.dtype}")
    if known(product).dtype != torch.float32:
        raise Left(f"its product {product.name} is {known(product).dtype}, not float32")
    parts |= {product, *before(operand), *before(factor)}
    root = same_numbers(factor)
    if given := _given(root, parts):
        if not same_sizes(known(product).shape, known(operand).shape):
            raise Left(f"its product {product.name} has another shape than its norm")
        how = Quantization("tensor", name)
        return Chain(norm, y, q, how, given, root, (), False, frozenset(parts))
    power_of_2, group = dynamic(root, y, FP8[name], parts)
    check_groups(known(operand).shape, known(factor).shape, group)
    inverses, others = _inverses(root, product, parts)
    if others and not power_of_2:
        what = f"{others[0].name} uses its factor {root.name}"
        raise Left(f"{what}, and the op returns 1 / factor, from which it is not found again")
    hidden = bind(norm)["hidden"]
    if group not in (hidden, BLOCK):
        raise Left(f"its groups have {group} elements; the op takes {BLOCK}, or rows of {hidden}")
    how = Quantization("row" if group == hidden else "block", name, power_of_2)
    return Chain(norm, y, q, how, None, root, inverses, bool(others), frozenset(parts))


def _is_output(node: Node) -> bool:
    """Whether a node is y, of a norm or of a quantised norm."""
    call, place = item_of(node)
    return call is not None and (call.target, place) in ((NORM, 0), (NORM_QUANTIZED, OUTPUT))


def _product(node: object) -> tuple[Node | None, Node | None, Node | None]:
    """The operand made of y, y, and the other operand, of a product of y or of y itself."""
    if not isinstance(node, Node):
        return None, None, None
    pair = operands(node) if name_of(node) in ("mul", "div") else (node, None)
    for operand, factor in (pair, pair[::-1]) if pair else ():
        if isinstance(operand, Node) and _is_output(y := same_numbers(operand)):
            if name_of(node) == "div":
                raise Left(f"{node.name} divides by its scale; the op multiplies by a factor")
            return operand, y, factor if isinstance(factor, Node) else None
    return None, None, None


def _given(factor: Node, parts: set[Node]) -> Node | None:
    """The static scale if the factor is its reciprocal; None if the factor has several numbers.

    Raises Left for a factor of one number that is no reciprocal.
    """
    one = all(isinstance(n, int) and n == 1 for n in known(factor).shape)
    if not one or _is_row_factor(factor):
        return None
    scale = inverted(factor)
    if scale is None:
        what = f"its factor {factor.name} is given"
        raise Left(f"{what}; the op takes 1 / factor, whose reciprocal may be another number")
    parts |= {factor, *(n for n in factor.all_input_nodes if inverted(n) is scale)}
    if known(scale).dtype != torch.float32 or known(factor).dtype != torch.float32:
        raise Left(f"its scale {scale.name} is {known(scale).dtype}, not float32")
    return scale


def _is_row_factor(factor: Node) -> bool:
    """Whether the factor of a single row or block is computed as that of many would be."""
    if name_of(factor) == "exp2":
        return True
    source = cast_input(factor)
    return source is not None and known(source).dtype == torch.float64


def _inverses(factor: Node, product: Node, parts: set[Node]) -> tuple[tuple[Node, ...], list[Node]]:
    """The nodes that compute 1 / factor, and the other users of the factor.

    The first ones are added to parts, with the views of the factor before them.
    """
    inverses, others, same = [], [], [factor]
    for node in same:
        for user in node.users:
            if user is product or is_idle(user):
                continue
            if inverted(user) is node and known(user).dtype == torch.float32:
                products = [n for n in user.users if inverted(n) is node]  # times 1
                inverses += products
                if products and len(products) == len(user.users):
                    parts.add(user)
                else:
                    inverses.append(user)
            elif one_before(user) is node:
                same.append(user)
            else:
                others.append(user)
    parts |= {*inverses, *same}
    return tuple(inverses), others
