"""replace_norms: replace the norms in an FX graph by tilenorm::norm and tilenorm::norm_backward."""

from collections.abc import Callable
from dataclasses import dataclass

from torch.fx import Graph, GraphModule, Node

from .decomposed import match_decomposed
from .emit import emit_backward, emit_forward
from .fused import match_fused
from .nodes import Left
from .norms import Norm


@dataclass(frozen=True)
class Report:
    """The result of replace_norms: the norms that were replaced, and those that were not.

    replaced: (kind, node name) of each norm that is now an op of tilenorm. left: (node name,
    reason) of each other norm, and of each node whose arguments do not fit its op. The name of a
    node in a subgraph starts with the subgraph's name.
    """

    replaced: tuple[tuple[str, str], ...]
    left: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"{len(self.replaced)} norms replaced, {len(self.left)} not replaced"]
        lines += [f"  {name}: {kind}" for kind, name in self.replaced]
        lines += [f"  {name} is not replaced: {reason}" for name, reason in self.left]
        return "\n".join(lines)


def replace_norms(
    graph_module: GraphModule, *, where: Callable[[Node], bool] | None = None
) -> Report:
    """Replace the norms in a graph by tilenorm's ops. The graph is changed in place.

    The graph may come from a torch.compile backend (before autograd), from torch.export, from
    make_fx, or from AOTAutograd (forward, backward, or both in one graph). replace_norms finds:

    - PyTorch's rms_norm and layer_norm,
    - aten's fused norms and their gradients,
    - RMSNorm written as elementary operations, as in Hugging Face's models: with the weight before
      or after the cast, or with 1 + weight.

    A norm of the sum of two tensors becomes one op that also computes the sum. The gradient of an
    RMSNorm written as elementary operations is not found. Replace such a norm before autograd; its
    gradient is then tilenorm's.

    Every replaced node keeps its name, metadata, shape, strides and dtype. A norm is not replaced
    if tilenorm's op would change one of these, if other nodes use its intermediate results, if the
    kernels do not support its dtype or size, or if a node in between writes to a tensor.

    The pass raises for no node. A node that has the name of an op of a norm, and arguments that do
    not fit this op's schema, stays as it is, and the report gives the reason.

    Args:
        graph_module: its nodes need the metadata "val" or "example_value" that tracing gives.
        where: takes the node of a norm's output (of its tuple of results, for aten's fused ops)
            before it is replaced, and returns whether to replace the norm. None replaces all.

    Raises:
        TypeError: an argument has the wrong type.
    """
    if not isinstance(graph_module, GraphModule):
        got = type(graph_module).__name__
        raise TypeError(f"replace_norms: argument 'graph_module' takes a GraphModule, got {got}")
    check_where("replace_norms", where)
    replaced, left = [], []
    for path, module in list(graph_module.named_modules()):
        if isinstance(module, GraphModule):
            prefix = f"{path}." if path else ""
            graph_replaced, graph_left = _replace(module.graph, where)
            replaced += [(kind, prefix + name) for kind, name in graph_replaced]
            left += [(prefix + name, reason) for name, reason in graph_left]
            if graph_replaced:
                module.recompile()
    return Report(tuple(replaced), tuple(left))


def check_where(function: str, where: object) -> None:
    """Raise TypeError if `where` is neither None nor callable."""
    if where is not None and not callable(where):
        got = type(where).__name__
        raise TypeError(f"{function}: argument 'where' takes a function of a node, got {got}")


def _replace(graph: Graph, where) -> tuple[list, list]:
    """Replace the norms of one graph; the lists of a Report, with names as in this graph."""
    replaced, left = [], []
    for node in list(graph.nodes):
        if node.op not in ("call_function", "call_method"):
            continue
        name = node.name
        try:
            norm = match_fused(node) or match_decomposed(node)
            if norm is None:
                continue
            name = norm.at.name
            if where is not None and not where(norm.at):
                raise Left("where() excludes it")
            norm.check()
            emit = emit_forward if isinstance(norm, Norm) else emit_backward
            replaced.append((emit(graph, norm), name))
        except Left as reason:
            left.append((name, str(reason)))
    return replaced, left
