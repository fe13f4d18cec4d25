"""accumulate_sums: a dy that is a sum of matrix products becomes one tilenorm::mm_sum.

dy = (view(mm(a, b)) + view(mm(c, d))) + e    ->    dy = view(mm_sum([a, c], [b, d])) + e

Such are the gradients of one tensor that several projections read: queries, keys and values, or
gate and up. The sum of a residual and a product in front of a norm stays as it is: the backward
pass reads the residual, so the product cannot be added in the residual's place, and PyTorch's addmm
copies the residual first, which takes as long as the addition.
"""

import torch
from torch.fx import Graph, Node

from ...ops import mm_sum  # noqa: F401  defines the op
from .calls import bind
from .emit import derived, written
from .fold import WRITTEN, Folds
from .gradient import NORM_BACKWARD, Call, operands_of_sum
from .nodes import Left, erase, name_of, only_user, value_of
from .norms import known, same_sizes

MM = torch.ops.aten.mm.default
MM_SUM = torch.ops.tilenorm.mm_sum.default
VIEWS = ("view", "reshape", "_unsafe_view")


def accumulate_sums(graph: Graph) -> Folds:
    """Add up the products in the sums that the gradients of norms read, inside the products.

    The graph is one of aten's operations with tilenorm's ops, as of fold_sums, and is changed in
    place. Terms that are no products stay, and are added to the sum of the products in their order.
    Each addition that goes rounded a product and a sum, where mm_sum rounds the sum alone.

    No node makes this raise: what is not understood stays, and the result tells why. The kinds of
    the result are "2 multiplications" and so on.
    """
    folded, left = [], []
    for node in graph.find_nodes(op="call_function", target=NORM_BACKWARD):
        try:
            count, reasons = _accumulate(Call(node).arguments["grad_output"])
        except Left as reason:
            count, reasons = 0, [str(reason)]
        if count > 1:
            folded.append((f"{count} multiplications", node.name))
        left += [(node.name, reason) for reason in reasons]
    return Folds(tuple(folded), tuple(left))


def _accumulate(dy: Node) -> tuple[int, list[str]]:
    """How many products of a sum were added up inside the last of them, and why others were not.

    Raises Left if a node in between may write to a tensor.
    """
    products = {term: mm for term in _terms(dy) if (mm := _product(term)) is not None}
    if len(products) < 2:
        return 0, []
    reasons = {term: _why_not(term, mm) for term, mm in products.items()}
    last = max((products[term] for term in products if not reasons[term]), default=None)
    for term, mm in products.items():
        if not reasons[term] and not same_sizes(known(mm).shape, known(last).shape):
            reasons[term] = f"{mm.name} has another shape than {last.name}"
    chosen = {term: mm for term, mm in products.items() if not reasons[term]}
    if len(chosen) > 1:
        _replace(chosen, last)
    return len(chosen), [why for why in reasons.values() if why]


def _terms(dy: Node) -> list[Node]:
    """The terms of a sum, from left to right. A partial sum with other readers is one term."""
    terms, stack, like = [], [dy], known(dy)
    while stack:
        node = stack.pop()
        pair = operands_of_sum(node, like) if node is dy or only_user(node) else ()
        if pair and pair[0] is not pair[1]:
            stack += reversed(pair)
        else:
            terms.append(node)
    return terms


def _product(term: Node) -> Node | None:
    """The multiplication whose result a term is, or a view of it."""
    while name_of(term) in VIEWS and isinstance(bind(term)["self"], Node):
        term = bind(term)["self"]
    return term if term.target is MM else None


def _why_not(term: Node, mm: Node) -> str:
    """Why a product cannot be added up inside a multiplication, or an empty text."""
    if any(value_of(n) is None for n in (mm, *bind(mm).values())):
        return f"{mm.name} or one of its factors has no shape in its metadata"
    if any(tag in mm.meta for tag in ("recompute", "ac_graph_id")):
        return f"{mm.name} is part of a forward pass that is computed again"
    node = mm
    while node is not term and (user := only_user(node)):
        node = user
    if node is not term or only_user(term) is None:
        return f"other nodes use the product {mm.name}"
    return ""


def _replace(products: dict[Node, Node], last: Node) -> None:
    """Put the sum of some terms' products in the place of the last product in the graph's order.

    All factors have been computed there. The additions of the other terms go.
    """
    if written(min(products.values()), last, ()):
        raise Left(WRITTEN)
    factors = zip(*(bind(mm).values() for mm in products.values()), strict=True)
    graph = last.graph
    with graph.inserting_before(last):
        total = derived(graph, MM_SUM, tuple(map(list, factors)), known(last), last)
    for term, mm in products.items():
        if mm is last:
            continue
        addition = only_user(term)
        first, second, _ = bind(addition).values()
        addition.replace_all_uses_with(second if first is term else first)
        erase(graph, addition)
        while term is not mm:
            before = bind(term)["self"]
            erase(graph, term)
            term = before
        erase(graph, mm)
    last.replace_all_uses_with(total)
    erase(graph, last)
