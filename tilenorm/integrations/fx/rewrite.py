"""replace_norms: replace the norms in an FX graph by tilenorm::norm and tilenorm::norm_backward."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch.fx import Graph, GraphModule, Node

from .emit import emit_backward, emit_forward
from .gradients import Folds, fold_sums
from .nodes import Left
from .norms import Gradient, Norm, match_fused
from .spelled_out import extended, match_spelled_out


@dataclass(frozen=True)
class Report:
    """The result of replace_norms: the norms that were replaced, and those that were not.

    replaced: (kind, node name) of each norm that is now an op of tilenorm. left: (node name,
    reason) of each other norm, and of each modulation that stays behind its norm. folds: what the
    gradients have taken over, if replace_norms was asked to fold. The name of a node in a subgraph
    starts with the subgraph's name.
    """

    replaced: tuple[tuple[str, str], ...]
    left: tuple[tuple[str, str], ...]
    folds: Folds = field(default_factory=Folds)

    def __str__(self) -> str:
        lines = [f"{len(self.replaced)} norms replaced, {len(self.left)} not replaced"]
        lines += [f"  {name}: {kind}" for kind, name in self.replaced]
        lines += [f"  {name} is not replaced: {reason}" for name, reason in self.left]
        return "\n".join([*lines, *self.folds.lines])


def replace_norms(
    graph_module: GraphModule,
    *,
    where: Callable[[Node], bool] | None = None,
    fold: bool = False,
    rounds_once: bool = False,
) -> Report:
    """Replace the norms in a graph by tilenorm's ops. The graph is changed in place.

    The graph may come from a torch.compile backend (before autograd), from torch.export, from
    make_fx, or from AOTAutograd (forward, backward, or both in one graph). replace_norms finds
    PyTorch's rms_norm and layer_norm, aten's fused norms and their gradients, and RMSNorm and
    LayerNorm written as elementary operations: the statistic is a mean or sum of squares, or a
    variance, and x̂ is x divided by its root, or times a reciprocal or power of it. The gradient of
    the latter is not found. Replace such a norm before autograd; its gradient is then tilenorm's.

    The weight, the bias and a gate silu(z) or sigmoid(z) that are applied to a norm belong to the
    op, with the casts between them, if the op rounds where they do. A gate that is computed in 16
    bits stays outside, for example. A norm of the sum of two tensors becomes one op that also
    computes the sum.

    So does a modulation by sample, frame or token, as in diffusion transformers: the norm times
    1 + scale, plus shift, for views of them with sizes of 1 such as scale[:, None]; and a gate by
    group of one of the terms of the sum before it.

    Every replaced node keeps its name, metadata, shape, strides and dtype. A norm is not replaced
    if tilenorm's op would change one of these, if it has another formula (an eps that is added to
    the root, the variance of a sample), if other nodes use its intermediate results, if an
    intermediate result has 16 bits, if the kernels do not support its dtype or size, or if a node
    in between writes to a tensor. The pass raises for no node. A node that has the name of an op of
    a norm, and arguments that do not fit this op's schema, stays as it is. The report gives the
    reason for each norm that stays.

    Args:
        graph_module: its nodes need the metadata "val" or "example_value" that tracing gives.
        where: takes the node of a norm's output (of its tuple of results, for aten's fused ops)
            before it is replaced, and returns whether to replace the norm. None replaces all.
        fold: whether the gradients of a graph that holds some, from make_fx or AOTAutograd, take
            over the additions around them. The op adds up to four terms of dy, with the bits of
            the additions that it replaces. It also adds dx to another gradient, and rounds this
            sum once instead of twice. tilenorm.compile does both by itself.
        rounds_once: whether a modulation, with its gate, may be taken over that the graph computes
            in 16 bits. The graph rounds after each operation. The op computes in float32 and rounds
            once, as the code does that Inductor makes of the graph.

    Raises:
        TypeError: an argument has the wrong type.
    """
    if not isinstance(graph_module, GraphModule):
        got = type(graph_module).__name__
        raise TypeError(f"replace_norms: argument 'graph_module' takes a GraphModule, got {got}")
    if not isinstance(fold, bool):
        raise TypeError(f"replace_norms: argument 'fold' takes a bool, got {type(fold).__name__}")
    if not isinstance(rounds_once, bool):
        got = type(rounds_once).__name__
        raise TypeError(f"replace_norms: argument 'rounds_once' takes a bool, got {got}")
    check_where("replace_norms", where)

    def choose(norm: Norm | Gradient) -> None:
        if where is not None and not where(norm.at):
            raise Left("where() excludes it")

    return replace_chosen(graph_module, choose, fold, rounds_once)


def replace_chosen(
    graph_module: GraphModule,
    choose: Callable[[Norm | Gradient], None],
    fold: bool = False,
    rounds_once: bool = False,
) -> Report:
    """As replace_norms. choose: raises Left, with the reason, for a norm that is to stay."""
    replaced, left, folds = [], [], Folds()
    for path, module in list(graph_module.named_modules()):
        if isinstance(module, GraphModule):
            prefix = f"{path}." if path else ""
            entries, reasons = _replace(module.graph, choose, rounds_once)
            new = fold_sums(module.graph) if fold else Folds()
            replaced += [(kind, prefix + name) for kind, name in entries]
            left += [(prefix + name, reason) for name, reason in reasons]
            folds += new.named(prefix)
            if entries or new.folded:
                module.recompile()
    return Report(tuple(replaced), tuple(left), folds)


def check_where(function: str, where: object) -> None:
    """Raise TypeError if `where` is neither None nor callable."""
    if where is not None and not callable(where):
        got = type(where).__name__
        raise TypeError(f"{function}: argument 'where' takes a function of a node, got {got}")


def _replace(graph: Graph, choose, rounds_once: bool) -> tuple[list, list]:
    """Replace the norms of one graph; the lists of a Report, with names as in this graph."""
    replaced, left = [], []
    for node in list(graph.nodes):
        if node.op not in ("call_function", "call_method"):
            continue
        name = node.name
        try:
            norm = match_fused(node)
            if isinstance(norm, Norm):
                norm = extended(norm, rounds_once)
            norm = norm or match_spelled_out(node, rounds_once)
            if norm is None:
                continue
            name = norm.at.name
            choose(norm)
            norm.check()
            emit = emit_forward if isinstance(norm, Norm) else emit_backward
            replaced.append((emit(norm), name))
            if isinstance(norm, Norm) and norm.apart is not None:
                left.append(norm.apart)
        except Left as reason:
            left.append((name, str(reason)))
    return replaced, left
