"""replace_norms: replace the norms in an FX graph by tilenorm::norm and tilenorm::norm_backward."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch.fx import Graph, GraphModule, Node

from ...ops.arguments import check_argument
from .emit import emit_backward, emit_forward, emit_rotated
from .gradients import Folds, fold_sums
from .nodes import Left
from .norms import Allowed, Gradient, Norm, match_fused
from .rotation import rotated
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
    rotation: bool = False,
    inexact: bool = False,
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
    computes the sum. Where a float32 output is only cast to 16 bits, the op's out_dtype does that,
    and the cast is the node that is replaced.

    So does a modulation by sample, frame or token, as in diffusion transformers: the norm times
    1 + scale, plus shift, for views of them with sizes of 1 such as scale[:, None]; and a gate by
    group of one of the terms of the sum before it.

    Every replaced node keeps its name, metadata, shape, strides and dtype. A norm is not replaced
    if tilenorm's op would change one of these, if it has another formula (an eps that is added to
    the root, the variance of a sample), if other nodes use its intermediate results, if an
    intermediate result has 16 bits, if the kernels do not support its dtype or size, if a node in
    between writes to a tensor, or if its arguments do not fit the op's schema. The report gives the
    reason for each norm that stays. The pass raises for no node.

    Args:
        graph_module: its nodes need the metadata "val" or "example_value" that tracing gives.
        where: takes the node of a norm's output (of its tuple of results, for aten's fused ops)
            before it is replaced, and returns whether to replace the norm. None replaces all.
        fold: whether the gradients of a graph that holds some, from make_fx or AOTAutograd, take
            over the additions around them, as in tilenorm.compile.
        rounds_once: whether a modulation with its gate, and a rotation, may be taken over that the
            graph computes in 16 bits. The graph rounds after each operation. The op computes in
            float32 and rounds once, as the code does that Inductor makes of the graph.
        rotation: whether RMSNorm of queries and keys and the rotary embedding behind it, as Hugging
            Face's attention spells it, become one op. It has not been timed on a GPU.
        inexact: whether F.normalize(x) times the root of the row's size becomes RMSNorm, and other
            spellings that divide by a clamped norm of the row. F.normalize divides by at least
            1e-12. RMSNorm's eps gives zero rows, and the gradients of all zero rows, the same
            numbers. Rows of a norm from 2e-16 to 4e-9 come out smaller, by a factor of √2 at most.
            16-bit graphs round after each operation, and the op rounds once. Without this option,
            such a norm is replaced if its input is float16 and it is computed in float32: float16
            has no rows of such norms.

    Raises:
        TypeError: an argument has the wrong type.
    """
    right = isinstance(graph_module, GraphModule)
    check_argument("replace_norms", "graph_module", graph_module, right, "a GraphModule")
    allowed = Allowed(rounds_once, rotation, inexact)
    for name, value in {"fold": fold, **allowed._asdict()}.items():
        check_bool("replace_norms", name, value)
    check_where("replace_norms", where)

    def choose(norm: Norm | Gradient) -> None:
        if where is not None and not where(norm.at):
            raise Left("where() excludes it")

    return replace_chosen(graph_module, choose, allowed, fold)


def replace_chosen(
    graph_module: GraphModule,
    choose: Callable[[Norm | Gradient], None],
    allowed: Allowed,
    fold: bool = False,
) -> Report:
    """As replace_norms. choose: raises Left, with the reason, for a norm that is to stay."""
    replaced, left, folded, unfolded = [], [], [], []
    for path, module in list(graph_module.named_modules()):
        if isinstance(module, GraphModule):
            prefix = f"{path}." if path else ""
            entries, reasons = _Replacing(choose, allowed).run(module.graph)
            folds = fold_sums(module.graph) if fold else Folds()
            replaced += [(kind, prefix + name) for kind, name in entries]
            left += [(prefix + name, reason) for name, reason in reasons]
            folded += [(kind, prefix + name) for kind, name in folds.folded]
            unfolded += [(prefix + name, reason) for name, reason in folds.left]
            if entries or folds.folded:
                module.recompile()
    return Report(tuple(replaced), tuple(left), Folds(tuple(folded), tuple(unfolded)))


def check_bool(function: str, name: str, value: object) -> None:
    check_argument(function, name, value, isinstance(value, bool), "a bool")


def check_where(function: str, where: object) -> None:
    right = where is None or callable(where)
    check_argument(function, "where", where, right, "a function of a node")


class _Replacing:
    """Replaces the norms of a graph. replaced, left: the lists of a Report, with its names."""

    def __init__(self, choose: Callable, allowed: Allowed):
        self.choose = choose
        self.allowed = allowed
        self.replaced: list[tuple[str, str]] = []
        self.left: list[tuple[str, str]] = []
        # The node that the norm of queries starts at, by the tables that rotate them.
        self._waiting: dict[tuple, Node] = {}

    def run(self, graph: Graph) -> tuple[list, list]:
        for node in list(graph.nodes):
            if node.op in ("call_function", "call_method"):
                self._visit(node, self.allowed.rotation)
        for node in self._waiting.values():
            self._rotate(node)
        return self.replaced, self.left

    def _norm(self, node: Node, rotation: bool) -> Norm | Gradient | None:
        norm = match_fused(node)
        if isinstance(norm, Norm):
            norm = extended(norm, self.allowed)
        norm = norm or match_spelled_out(node, self.allowed)
        return rotated(norm) if rotation and isinstance(norm, Norm) else norm

    def _visit(self, node: Node, rotation: bool) -> None:
        name = node.name
        try:
            norm = self._norm(node, rotation)
            if norm is None:
                return
            name = norm.at.name
            self.choose(norm)
            if isinstance(norm, Norm) and norm.rotation is not None:
                tables = norm.rotation[:2]
                if tables in self._waiting:
                    self._rotate(self._waiting.pop(tables), node)
                else:
                    self._waiting[tables] = node
                return
            norm.check()
            emit = emit_forward if isinstance(norm, Norm) else emit_backward
            self.replaced.append((emit(norm), name))
            if isinstance(norm, Norm) and norm.apart is not None:
                self.left.append(norm.apart)
        except Left as reason:
            self.left.append((name, str(reason)))

    def _rotate(self, *nodes: Node) -> None:
        """Replace the norms that start at one node or two, with their rotation, by one op. If that
        cannot be, replace each with its rotation, or else alone.
        """
        norms: list = []
        try:
            norms += [self._norm(node, True) for node in nodes]
            emit_rotated(tuple(norms))
            self.replaced += [(norm.kind, norm.at.name) for norm in norms]
        except Left as reason:
            for node in nodes if len(nodes) > 1 else ():
                self._rotate(node)
            if len(nodes) == 1:
                name = norms[0].at.name if norms else nodes[0].name
                self.left.append((name, f"it stays behind its norm: {reason}"))
                self._visit(nodes[0], False)
