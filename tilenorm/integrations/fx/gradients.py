"""fold_sums: tilenorm::norm_backward takes over the additions around it, and what follows from y.

dy = (a + b) + c     ->  the op reads up to four terms, and rounds each sum to dy's dtype
dx + other           ->  the op's grad_sum: dx + other is rounded once
readers of y         ->  the op's output: y is written again and need not be saved
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from ...ops.pytorch.placements import is_distributed
from ...table import BRANCH_PORTS
from .calls import COMMON, FORWARD, NORM_BACKWARD, TERMS, Call, derived, read_by, result_of
from .nodes import (
    DETACHES,
    Left,
    bind,
    erase,
    is_recomputed,
    name_of,
    only_user,
    operands,
    value_of,
    written,
)
from .norms import alike, known

VIEWS = ("view", "reshape", "_unsafe_view", "permute", "transpose", "t", "unsqueeze", "squeeze")
VIEWS += DETACHES
# Results that are saved for the backward pass, and not computed again from what they are made of.
SAVED = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm", "_grouped_mm")
ATTENTION = "_scaled_dot_product"
# y or a view of it, with the views on the way to it, and what reads it.
Read = tuple[tuple[Node, ...], Node]
WRITTEN = "a node in between may write to a tensor"


@dataclass(frozen=True)
class Folds:
    """What the gradients of a graph have taken over, and what they have not.

    folded: (kind, node name) of each change of a gradient; the kinds are "2 terms" to "4 terms",
    "sum" and "output". left: (node name, reason) of each addition or output that stays.
    """

    folded: tuple[tuple[str, str], ...] = ()
    left: tuple[tuple[str, str], ...] = ()

    @property
    def lines(self) -> list[str]:
        lines = [f"  {name}: {kind} folded" for kind, name in self.folded]
        return lines + [f"  {name} does not fold: {why}" for name, why in self.left]


def fold_sums(graph: Graph, *, output: bool = False) -> Folds:
    """Fold the sums around the gradients of a graph into them. The graph is changed in place.

    The graph is one of aten's operations with tilenorm's ops: of make_fx, or of AOTAutograd, best
    its joint graph of forward and backward, because what is saved for the backward pass follows
    from that. The sum of dy's terms has the bits of the operations that it replaces. The sum with
    dx is rounded once, and not twice. output: whether y is written by the backward pass too, for
    what reads it there. No node makes this raise: the result tells why something stays.
    """
    steps = [_terms, _sum]
    if output:
        steps.append(partial(_output, backward=of_tangents(graph)))
    folded, left = [], []
    for node in graph.find_nodes(op="call_function", target=NORM_BACKWARD):
        for step in steps:
            try:
                if is_recomputed(node):
                    raise Left("it is part of a forward pass that is computed again")
                if kind := step(Call(node)):
                    folded.append((kind, node.name))
            except Left as reason:
                left.append((node.name, str(reason)))
    return Folds(tuple(folded), tuple(dict.fromkeys(left)))


def _terms(call: Call) -> str | None:
    """Fold the additions whose result is dy."""
    if any(call[name] is not None for name in TERMS[1:]):
        return None
    first, terms, sums = call[TERMS[0]], [], []
    like = known(first)
    while len(terms) < len(TERMS) - 1 and (pair := _terms_of(first, like)):
        reads = sum(argument is first for argument in call.arguments.values())
        if only_user(first) is None or reads > 1:
            if not terms:
                raise Left(f"other nodes use the sum {first.name}")
            break
        sums.append(first)
        inner = [n for n in pair if _terms_of(n, like) and only_user(n)]
        first, other = pair if not inner or inner[0] is pair[0] else pair[::-1]
        terms.insert(0, other)
        if first is other:
            break
    if not terms:
        return None
    if written(sums[-1], call.node):
        raise Left(WRITTEN)
    call.change(**dict(zip(TERMS, (first, *terms), strict=False)))
    for node in sums:
        erase(node)
    return f"{1 + len(terms)} terms"


def _sum(call: Call) -> str | None:
    """Fold the addition of dx to another gradient."""
    gradients = call.used("grad_input")
    total = only_user(gradients[0]) if len(gradients) == 1 else None
    if total is None:
        return None
    (dx,) = gradients
    pair = _terms_of(total, known(dx))
    if not pair or pair[0] is pair[1]:
        return None
    other = pair[1] if pair[0] is dx else pair[0]
    source, _ = read_by(other)
    if source is not None and source.target is NORM_BACKWARD and call.node < other:
        return None  # the later one of two gradients takes their sum
    if any(call[port.name] is not None for port in BRANCH_PORTS):
        raise Left(f"{total.name} adds to the gradient of an input that is masked or scaled")
    if call["grad_sum"] is not None:
        raise Left(f"it has the gradient of its sum already, and {total.name} adds another")
    if call.used("grad_residual") or known(dx).dtype != known(call["input"]).dtype:
        raise Left(f"{total.name} is the gradient of the input, but not of the residual")
    if call.node < other:
        raise Left(f"{other.name}, which {total.name} adds to its result, is computed after it")
    if written(call.node, total):
        raise Left(WRITTEN)
    call.change(grad_sum=other)
    total.replace_all_uses_with(dx)
    erase(total)
    return "sum"


def _terms_of(node: object, like: Tensor) -> tuple[Node, ...]:
    """The two tensors whose sum a node is, if they and the sum are contiguous and as `like`."""
    if not isinstance(node, Node) or node.target is not torch.ops.aten.add.Tensor:
        return ()
    terms = operands(node)
    values = [value_of(n) for n in (node, *terms)]
    if not all(alike(v, like) and _is_contiguous(v) and not is_distributed(v) for v in values):
        return ()
    return terms


def _is_contiguous(value: Tensor) -> bool:
    """Whether a tensor is contiguous for all values of its symbols. Adds no guard."""
    stride = 1
    for size, actual in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not statically_known_true(size == 1) and not statically_known_true(actual == stride):
            return False
        stride = stride * size
    return True


def of_tangents(graph: Graph) -> set[Node]:
    """The nodes of the backward pass: those of a joint graph that depend on the gradients that come
    into it.
    """
    nodes: set[Node] = set()
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if is_tangent or not nodes.isdisjoint(node.all_input_nodes):
            nodes.add(node)
    return nodes


def _output(call: Call, backward: set[Node]) -> str | None:
    """Have the backward pass read the output of a gradient in the place of y, if it reads y.

    The inputs of the gradient are saved in any case. The partitioner of AOTAutograd saves y only if
    the backward pass reads it. Raises Left if y would be saved all the same, or if the gradient
    cannot have the bits of y.
    """
    norm = _norm_of(call)
    if norm is None:
        return None
    reads, returned = _reads(norm, backward)
    if not reads:
        return None
    if returned:
        raise Left(f"{returned} is a result of the graph")
    if is_recomputed(norm.node):
        raise Left("its forward pass is computed again, and y is not saved")
    later = _later(call, {reader for _, reader in reads})
    call.write_output(known(norm.readers("output")[0]))
    _replace(call, reads, later)
    return "output"


def _norm_of(call: Call) -> Call | None:
    """The forward pass whose rstd a gradient reads, if both have the same arguments."""
    source, name = read_by(_before_detach(call["rstd"]))
    if source is None or source.target not in FORWARD or name != "rstd":
        return None
    op = FORWARD[source.target]
    if op.quantized or op.calls or "skip" in op.roles:
        return None
    norm, x = Call(source), _before_detach(call["input"])
    if norm["residual"] is not None:
        same = read_by(x) == (source, "residual_out")
    else:
        same = _before_detach(norm["input"]) is x
    return norm if same and all(norm[name] == call[name] for name in COMMON) else None


def _before_detach(node: Node) -> Node:
    """The node before those that give the same tensor to autograd."""
    while name_of(node) in DETACHES and isinstance(source := bind(node)["self"], Node):
        node = source
    return node


def _reads(norm: Call, backward: set[Node]) -> tuple[list[Read], Node | None]:
    """What the backward pass reads of y, and a result of the graph that is y or a view of y.

    Raises Left if the backward pass reads what is made of y: it is computed again from y.
    """
    reads, returned, seen = [], None, set()
    stack = [((item,), True) for item in norm.readers("output")]
    while stack:
        path, is_view = stack.pop()
        for user in path[-1].users:
            if user.op == "output":
                returned = path[-1] if is_view else returned
            elif user in backward and is_view:
                reads.append((path, user))
            elif user in backward:
                raise Left(f"the backward pass reads {path[-1].name}, which is made of y")
            elif user not in seen and not _is_saved(user):
                seen.add(user)
                stack.append(((*path, user), is_view and name_of(user) in VIEWS))
    return reads, returned


def _is_saved(node: Node) -> bool:
    """Whether a node's result is saved for the backward pass, or made by no op of PyTorch's."""
    name = name_of(node)
    return name is None or name in SAVED or name.startswith(ATTENTION)


def _later(call: Call, readers: set[Node]) -> list[Node]:
    """The readers, and the nodes that depend on them, that stand before the gradient.

    Raises Left if the gradient depends on one of them.
    """
    later, node = {}, min(readers)
    while node is not call.node and node.op not in ("output", "root"):
        if node in readers or not later.keys().isdisjoint(node.all_input_nodes):
            later[node] = None
        node = node.next
    if node is not call.node:
        return []
    if not later.keys().isdisjoint(node.all_input_nodes):
        raise Left(f"{min(readers).name} reads y before this gradient is computed")
    return list(later)


def _replace(call: Call, reads: list[Read], later: list[Node]) -> None:
    """Have readers read views of the gradient's output, and stand after it."""
    graph, node = call.node.graph, call.node
    with graph.inserting_after(node):
        result = result_of(node, "output", node)
    new = {path[0]: result for path, _ in reads}
    for path, reader in reads:
        for view in path[1:]:
            if view not in new:
                args, kwargs = map_arg((view.args, view.kwargs), lambda n: new.get(n, n))
                with graph.inserting_after(result):
                    result = derived(view.target, args, value_of(view), node, **kwargs)
                new[view] = result
        reader.replace_input_with(path[-1], new[path[-1]])
    for moved in later:
        result.append(moved)
        result = moved
