"""fold_sums: tilenorm::norm_backward takes over the additions around it, and what follows from y.

dy = (a + b) + c     ->  the op reads up to four terms, and rounds each sum to dy's dtype
dx + other           ->  the op's grad_sum: dx + other is rounded once
readers of y         ->  the op's output: y is written again and need not be saved (output.py)
"""

from dataclasses import dataclass

from torch.fx import Graph, Node

from .emit import written
from .gradient import NORM_BACKWARD, Call, item_of, operands_of_sum
from .nodes import Left, is_idle
from .norms import known
from .output import Outputs

TERMS = ("grad_output", "grad_output_2", "grad_output_3", "grad_output_4")
WRITTEN = "a node in between may write to a tensor"


@dataclass(frozen=True)
class Folds:
    """What the gradients of a graph have taken over, and what they have not.

    folded: (kind, node name) of each change of a gradient; the kinds are "2 terms" to "4 terms",
    "sum" and "output", "2 multiplications" or more of accumulate_sums, and "rms_norm_quantized" for
    example of quantize_norms. left: (node name, reason) of each addition, product, output or chain
    that stays.
    """

    folded: tuple[tuple[str, str], ...] = ()
    left: tuple[tuple[str, str], ...] = ()

    def __add__(self, others: "Folds") -> "Folds":
        return Folds(self.folded + others.folded, self.left + others.left)

    @property
    def lines(self) -> list[str]:
        """The entries as text."""
        lines = [f"  {name}: {kind} folded" for kind, name in self.folded]
        return lines + [f"  {name} does not fold: {why}" for name, why in self.left]


def fold_sums(graph: Graph, *, output: bool = False) -> Folds:
    """Fold the sums around the gradients of a graph into them. The graph is changed in place.

    The graph is one of aten's operations with tilenorm's ops: of make_fx, or of AOTAutograd, best
    its joint graph of forward and backward, because what is saved for the backward pass follows
    from that. The sum of dy's terms has the bits of the operations that it replaces. The sum with
    dx is rounded once, and not twice.

    output: whether y is written by the backward pass too, for what reads it there.

    No node makes this raise: what is not understood stays, and the result tells why.
    """
    outputs = Outputs(graph) if output else None
    folded, left = [], []
    for node in [n for n in graph.nodes if n.target is NORM_BACKWARD]:
        for step in (_terms, _sum, outputs and outputs.fold):
            try:
                if step and (kind := step(Call(node))):
                    folded.append((kind, node.name))
            except Left as reason:
                left.append((node.name, str(reason)))
    return Folds(tuple(folded), tuple(dict.fromkeys(left)))


def _terms(call: Call) -> str | None:
    """Fold the additions whose result is dy."""
    if any(call.arguments[name] is not None for name in TERMS[1:]):
        return None
    first, more, sums = call.arguments["grad_output"], [], []
    like = known(first)
    while len(more) < len(TERMS) - 1 and (pair := operands_of_sum(first, like)):
        if not _has_one_user(first) or call.reads(first) > 1:
            if not more:
                raise Left(f"other nodes use the sum {first.name}")
            break
        sums.append(first)
        inner = [n for n in pair if operands_of_sum(n, like) and _has_one_user(n)]
        first, other = pair if not inner or inner[0] is pair[0] else pair[::-1]
        more.insert(0, other)
        if first is other:
            break
    if not more:
        return None
    if written(sums[-1], call.node, ()):
        raise Left(WRITTEN)
    call.change(**dict(zip(TERMS, (first, *more), strict=False)))
    for node in sums:
        _erase(node)
    return f"{1 + len(more)} terms"


def _sum(call: Call) -> str | None:
    """Fold the addition of dx to another gradient."""
    gradients = call.results(0)
    users = [user for dx in gradients for user in dx.users if not is_idle(user)]
    if len(gradients) != 1 or len(users) != 1:
        return None
    (dx,), (total,) = gradients, users
    pair = operands_of_sum(total, known(dx))
    if not pair or pair[0] is pair[1]:
        return None
    other = pair[1] if pair[0] is dx else pair[0]
    source, _ = item_of(other)
    if source is not None and source.target is NORM_BACKWARD and call.node < other:
        return None  # the later one of two gradients takes their sum
    if any(call.arguments[name] is not None for name in ("dropout_mask", "layer_scale")):
        raise Left(f"{total.name} adds to the gradient of an input that is masked or scaled")
    if call.arguments["grad_sum"] is not None:
        raise Left(f"it has the gradient of its sum already, and {total.name} adds another")
    if call.results(1) or known(dx).dtype != known(call.arguments["input"]).dtype:
        raise Left(f"{total.name} is the gradient of the input, but not of the residual")
    if call.node < other:
        raise Left(f"{other.name}, which {total.name} adds to its result, is computed after it")
    if written(call.node, total, ()):
        raise Left(WRITTEN)
    call.change(grad_sum=other)
    total.replace_all_uses_with(dx)
    _erase(total)
    return "sum"


def _has_one_user(node: Node) -> bool:
    return len([user for user in node.users if not is_idle(user)]) == 1


def _erase(node: Node) -> None:
    """Erase a node that only idle nodes use."""
    for user in list(node.users):
        _erase(user)
    node.graph.erase_node(node)
