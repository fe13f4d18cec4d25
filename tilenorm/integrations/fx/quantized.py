"""quantize_norms: a norm and the chain that quantises it become tilenorm::norm_quantized.

A chain quantises a norm's output y to 8-bit floats, as torchao writes it:

    factor = (F / max(a, 1e-12)).float()        a = max |y| of a row or of 128 elements, in float64
    factor = exp2(floor(log2(factor)))          in some chains
    q = clamp(y.float() * factor, -F, F).to(float8)

F is the largest number of the 8-bit dtype. A static chain has factor = 1 / scale, where scale is
one number that the graph is given. A chain is read from q to y. The pass runs after the norms of a
graph have become tilenorm::norm.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt
from torch.fx import Graph, Node

from ...ops.sharding import is_distributed
from ...spec import FP8, Quantization
from ...table import FACTORS, OPS
from . import calls
from .calls import FORWARD, Call, Tensors, derived, read_by, result_of, spec_of
from .emit import ATEN, size_of, take_over
from .nodes import (
    CASTS,
    DETACHES,
    DTYPES_16_BIT,
    Left,
    argument_of,
    bind,
    cast_input,
    constant_of,
    erase,
    in_turn,
    is_idle,
    is_recomputed,
    item_of,
    name_of,
    operands,
    operands_of,
    value_of,
    written,
)
from .norms import check_contiguous, check_spec, known, same_sizes, trailing

DTYPES = {getattr(torch, name): name for name in FP8}
BLOCK = 128
TENSORS = ("input", "residual", "weight", "bias", "addend")
# Operations that change neither a number nor the order of the numbers, if they keep the dtype.
VIEWS = ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze")
VIEWS += (*DETACHES, "contiguous", "clone")
CLAMPS = ("clamp", "clip", "clamp_min", "clamp_max")
SMALLEST = 1e-12
# (dtype, a dtype that has all its numbers).
WIDER = {(narrow, torch.float32) for narrow in DTYPES_16_BIT}
WIDER |= {(narrow, torch.float64) for narrow in (*DTYPES_16_BIT, torch.float32)}


def quantize_norms(graph: Graph) -> tuple[list[tuple[str, str, Node]], list[tuple[str, str]]]:
    """Replace the norms of a graph that are quantised, and the chains that quantise them.

    Returns (kind, the name of q, the norm's call that was erased) of each chain that became an op,
    and (the name of q, reason) of each other chain. The codes and the scales keep their bits. A
    factor that is rounded down to a power of two is the power of two: PyTorch's
    exp2(floor(log2(factor))) on a CPU is twice as large for some factors just below one.

    No node makes this raise. Chains that start at no norm are not reported.
    """
    quantized, left = [], []
    for q in list(graph.nodes):
        try:
            if chain := match_chain(q):
                name = q.name
                quantized.append((_replace(chain), name, chain.norm))
        except Left as reason:
            left.append((q.name, str(reason)))
    return quantized, left


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
    product, low, high = _clamped(cast_input(q), parts)
    operand, y, factor = _product(product)
    if y is None:
        return None
    norm, _ = read_by(y)
    if FORWARD[norm.target].quantized:
        raise Left("its norm is quantised already, and one op quantises once")
    if factor is None:
        raise Left(f"{product.name} is no product of its norm and a factor")
    if (low, high) != (-FP8[name], FP8[name]):
        raise Left(f"it is not clamped to ±{FP8[name]:g} before the cast to {value.dtype}")
    if known(product).dtype != torch.float32:
        raise Left(f"its product {product.name} is {known(product).dtype}, not float32")
    parts |= {product, *_before(operand), *_before(factor)}
    root = _same_numbers(factor)
    if given := _given(root, parts):
        if not same_sizes(known(product).shape, known(operand).shape):
            raise Left(f"its product {product.name} has another shape than its norm")
        how = Quantization("tensor", name)
        return Chain(norm, y, q, how, given, root, (), False, frozenset(parts))
    power_of_2, group = _dynamic(root, y, FP8[name], parts)
    _check_groups(known(operand).shape, known(factor).shape, group)
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
    call, name = read_by(node)
    return call is not None and call.target in FORWARD and name == "output"


def _product(node: object) -> tuple[Node | None, Node | None, Node | None]:
    """The operand made of y, y, and the other operand, of a product of y or of y itself."""
    if not isinstance(node, Node):
        return None, None, None
    pair = operands(node) if name_of(node) in ("mul", "div") else (node, None)
    for operand, factor in in_turn(pair):
        if isinstance(operand, Node) and _is_output(y := _same_numbers(operand)):
            if name_of(node) == "div":
                raise Left(f"{node.name} divides by its scale; the op multiplies by a factor")
            return operand, y, factor if isinstance(factor, Node) else None
    return None, None, None


def _given(factor: Node, parts: set[Node]) -> Node | None:
    """The static scale if the factor is its reciprocal; None if the factor has several numbers.

    Raises Left for a factor of one number that is no reciprocal.
    """
    source = cast_input(factor)
    of_row = source is not None and known(source).dtype == torch.float64  # of a single row
    one = all(isinstance(n, int) and n == 1 for n in known(factor).shape)
    if not one or of_row or name_of(factor) == "exp2":
        return None
    scale = _inverted(factor)
    if scale is None:
        what = f"its factor {factor.name} is given"
        raise Left(f"{what}; the op takes 1 / factor, whose reciprocal may be another number")
    parts |= {factor, *(n for n in factor.all_input_nodes if _inverted(n) is scale)}
    if known(scale).dtype != torch.float32 or known(factor).dtype != torch.float32:
        raise Left(f"its scale {scale.name} is {known(scale).dtype}, not float32")
    return scale


def _inverses(factor: Node, product: Node, parts: set[Node]) -> tuple[tuple[Node, ...], list[Node]]:
    """The nodes that compute 1 / factor, and the other users of the factor.

    The first ones are added to parts, with the views of the factor before them.
    """
    inverses, others, same = [], [], [factor]
    for node in same:
        for user in node.users:
            if user is product or is_idle(user):
                continue
            if _inverted(user) is node and known(user).dtype == torch.float32:
                products = [n for n in user.users if _inverted(n) is node]  # times 1
                inverses += products
                if products and len(products) == len(user.users):
                    parts.add(user)
                else:
                    inverses.append(user)
            elif _one_before(user) is node:
                same.append(user)
            else:
                others.append(user)
    parts |= {*inverses, *same}
    return tuple(inverses), others


def _dynamic(factor: Node, y: Node, most: float, parts: set[Node]) -> tuple[bool, int]:
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
    peak, low, high = _clamped(_divisor(source, most, parts), parts)
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
    return argument_of(node)


def _divisor(node: Node, most: float, parts: set[Node]) -> object:
    """d of most / d, or of the product of most and 1 / d."""
    parts.add(node)
    if (pair := operands_of("div", node)) and constant_of(pair[0]) == most:
        return pair[1]
    for inverse, number in in_turn(operands_of("mul", node)):
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
    source = _argument(_same_numbers(magnitude), "abs", parts)
    nodes = [*_before(magnitude), *_before(source)]
    if nodes[-1] is not y:
        raise Left(f"its factor is made of {nodes[-1].name}, not of {y.name}")
    parts |= {*nodes} - {y}
    sizes = known(magnitude).shape[-dims:]
    if not all(isinstance(size, int) for size in sizes):
        raise Left("the number of elements of its groups is symbolic")
    return math.prod(sizes)


def _check_groups(shape, factors, group: int) -> None:
    """Raise Left unless each group of a tensor stands beside its factor."""
    dims, count = 0, 1
    while count < group and dims < len(shape) and isinstance(shape[-1 - dims], int):
        dims += 1
        count *= shape[-dims]
    dims = dims or 1
    wanted = (*shape[: len(shape) - dims], *[1] * dims)
    if count != group or not same_sizes(factors, wanted):
        raise Left(f"its factors have the shape {list(factors)}, not {list(wanted)}")


def _clamped(node: object, parts: set[Node]) -> tuple[Any, float, float]:
    """The node before all clamps, and the bounds. Adds the clamps to parts."""
    low, high = -math.inf, math.inf
    while isinstance(node, Node) and name_of(node) in CLAMPS:
        parts.add(node)
        args = bind(node)
        given = {key: args[key] for key in ("min", "max") if args.get(key) is not None}
        bounds = {key: constant_of(bound) for key, bound in given.items()}
        if None in bounds.values():
            return node, math.nan, math.nan  # a bound that depends on data
        low, high = max(low, bounds.get("min", low)), min(high, bounds.get("max", high))
        node = argument_of(node)
    return node, low, high


def _before(node: object) -> Iterator[Node]:
    """A node, and the nodes before it that have the same numbers in the same order.

    The last one is that which computes the numbers.
    """
    while isinstance(node, Node):
        yield node
        node = _one_before(node)


def _one_before(node: Node) -> Node | None:
    """The input of a node that changes neither a number nor the order of the numbers, or None."""
    if name_of(node) in VIEWS:
        source, wider = argument_of(node), ()
    else:
        source, wider = cast_input(node), WIDER
    if not isinstance(source, Node):
        return None
    dtypes = known(source).dtype, known(node).dtype
    return source if dtypes[0] == dtypes[1] or dtypes in wider else None


def _same_numbers(node: Node) -> Node:
    """The first node with the numbers of a node."""
    *_, first = _before(node)
    return first


def _inverted(node: object) -> Node | None:
    """s if a node computes 1 / s, perhaps times 1."""
    source = None
    if isinstance(node, Node) and name_of(node) == "reciprocal":
        source = argument_of(node)
    elif pair := operands_of("div", node):
        source = pair[1] if constant_of(pair[0]) == 1 else None
    elif pair := operands_of("mul", node):
        inverse, number = pair if isinstance(pair[0], Node) else pair[::-1]
        is_inverse = isinstance(inverse, Node) and name_of(inverse) == "reciprocal"
        source = _inverted(inverse) if is_inverse and constant_of(number) == 1 else None
    return source if isinstance(source, Node) else None


def _replace(chain: Chain) -> str:
    """Replace one chain. Returns the new op's kind. Raises Left if this would change a result."""
    norm = _norm(chain)
    _check(chain, norm)
    removed, output = _removed(chain)
    sizes = {node: _sizes(chain, node) for node in removed}
    with chain.norm.graph.inserting_before(chain.norm):
        given = chain.given
        if given is not None and known(given).dim() != 1:
            given = derived(ATEN.view.default, (given, [1]), known(given).view(1), given)
        call = calls.norm_quantized(norm, given, chain.how._replace(output=output))
        new = {
            node: result_of(call, read_by(node)[1], node) if output or node is not chain.y else None
            for node in chain.norm.users
        }
        for node in removed:
            new[node] = _shaped(call, chain, node, sizes[node])
    for user in [user for user in chain.y.users if is_idle(user) and not output]:
        erase(user)
    take_over(new, (chain.norm, *chain.parts))
    added = "" if norm["residual"] is None else "add_"
    return f"{added}{norm['norm']}_norm_quantized"


def _norm(chain: Chain) -> Call:
    """The norm's call. Raises Left if the quantised op does not take its arguments."""
    norm = Call(chain.norm)
    name = FORWARD[chain.norm.target].name
    if f"{name}_quantized" not in OPS:
        raise Left(f"no quantised norm does what {name} does")
    for name in FACTORS:
        if norm[name] is not None:
            raise Left(f"its norm has a {name}, which no quantised norm takes")
    for name in (*norm.options._fields, "eps", "save"):
        if isinstance(norm[name], Node | SymInt | torch.SymFloat):
            raise Left(f"the argument {name!r} of its norm is symbolic")
    return norm


def _check(chain: Chain, call: Call) -> None:
    """Raise Left, with the reason, if tilenorm's op would give another result."""
    norm, q, end = chain.norm, chain.q, max((chain.q, *chain.inverses))
    if is_recomputed(norm) or is_recomputed(q):
        raise Left("it is part of a forward pass that is computed again")
    for node in (q, *chain.inverses):
        if known(node).requires_grad:
            raise Left(f"{node.name} passes a gradient on, and the op's results pass none")
        check_contiguous("quantised output" if node is q else "scale", known(node))
    for node in norm.users:
        if read_by(node)[0] is not norm:
            raise Left(f"{node.name} reads none of the results of its norm")
    x = known(call["input"])
    if is_distributed(x):
        raise Left("its tensors are DTensors")
    if chain.given is not None and not chain.given < norm:
        raise Left(f"its scale {chain.given.name} is computed after the norm")
    if chain.given is not None and known(chain.given).device != x.device:
        raise Left(f"its scale is on {known(chain.given).device}, its norm on {x.device}")
    switches = [n for n in q.graph.nodes if n.target is torch._C._set_grad_enabled]
    if written(norm, end, tuple(switches)):
        raise Left("a node between its operations may write to a tensor")
    tensors = {n: value_of(call[n]) for n in TENSORS if call[n] is not None}
    tensors = Tensors(*[tensors.get(name) for name in Tensors._fields])
    check_spec(spec_of(call.options, tensors, quantized=chain.how), x)


def _removed(chain: Chain) -> tuple[list[Node], bool]:
    """The nodes that results of the op replace, and whether anything else reads y."""
    removed = [chain.q, *chain.inverses, *([chain.factor] if chain.others else [])]
    gone = set(removed)
    for node in sorted(chain.parts - {chain.y}, reverse=True):
        if all(user in gone or is_idle(user) for user in node.users):
            gone.add(node)
    return removed, any(user not in gone and not is_idle(user) for user in chain.y.users)


def _sizes(chain: Chain, node: Node) -> list[int | tuple[int, SymInt]]:
    """The sizes of a node, of which a symbolic one is (the norm's dimension, the size) or -1."""
    x, found = known(bind(chain.norm)["input"]).shape, []
    for size in known(node).shape:
        same = [i for i, n in enumerate(x) if same_sizes([n], [size])]
        found.append(size if isinstance(size, int) else (same[0], size) if same else -1)
    if found.count(-1) > 1:
        raise Left(f"the shape {list(known(node).shape)} of {node.name} is symbolic")
    return found


def _shaped(call: Node, chain: Chain, old: Node, sizes: list) -> Node:
    """q, the scale, or its reciprocal in the place of the factor, in the shape of an old node."""
    node, wanted = result_of(call, "q" if old is chain.q else "scale", old), known(old)
    value = value_of(node)
    if old is chain.factor:  # a power of two, whose reciprocal is exact
        node = derived(ATEN.reciprocal.default, (node,), value.reciprocal(), old)
    if not same_sizes(value.shape, wanted.shape):
        x = bind(chain.norm)["input"]
        given = [size_of(x, *n) if isinstance(n, tuple) else n for n in sizes]
        node = derived(ATEN.view.default, (node, given), wanted, old)
    node.meta = dict(old.meta)
    return node
