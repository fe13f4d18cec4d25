"""The pass: norms in a graph become calls of tilenorm::norm and tilenorm::norm_backward."""

from collections.abc import Callable
from dataclasses import dataclass

from torch.fx import Graph, GraphModule, Node

from .decomposed import decomposed
from .emit import emit_backward, emit_forward
from .fused import fused
from .nodes import Left
from .norms import Norm


@dataclass(frozen=True)
class Report:
    """replaced: kind and node of each norm that is now tilenorm's. left: node of each other, why.

    A node is named as in the graph; one in a subgraph has the subgraph's name before it.
    """

    replaced: tuple[tuple[str, str], ...]
    left: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"replaced {len(self.replaced)} norms, left {len(self.left)}"]
        lines += [f"  {name}: {kind}" for kind, name in self.replaced]
        lines += [f"  {name} is left: {reason}" for name, reason in self.left]
        return "\n".join(lines)


def replace_norms(
    graph_module: GraphModule, *, where: Callable[[Node], bool] | None = None
) -> Report:
    """Replace the norms in a graph, in place, by tilenorm's ops.

    Takes graphs of torch.compile's backends (before autograd), of torch.export, of make_fx and of
    AOTAutograd (forward, backward or both). Found are PyTorch's rms_norm and layer_norm; aten's
    fused forms of them and of their gradients; RMSNorm spelled out as in Hugging Face's models,
    with the weight before or after the cast, or 1 + weight. A norm of a sum of two tensors becomes
    one op with the sum. The gradient of a norm spelled out is not found: replace those before
    autograd, and tilenorm's own gradient follows.

    Every replaced node keeps its name, metadata, shape, strides and dtype. A norm is left alone
    where tilenorm would not keep these, where its intermediate results are used by others, where
    its dtype or size is not one that the kernels take, and where a tensor is written to in between.

    Args:
        graph_module: its nodes need the metadata "val" or "example_value" that tracing gives.
        where: takes the node that a norm's output or results are, before it is replaced; where it
            returns false the norm is left alone.

    Raises:
        TypeError: an argument of the wrong type.
    """
    if not isinstance(graph_module, GraphModule):
        got = type(graph_module).__name__
        raise TypeError(f"replace_norms: argument 'graph_module' takes a GraphModule, got {got}")
    check_where("replace_norms", where)
    replaced, left = [], []
    for path, module in list(graph_module.named_modules()):
        if isinstance(module, GraphModule):
            prefix = f"{path}." if path else ""
            done, not_done = _replace(module.graph, where)
            replaced += [(kind, prefix + name) for kind, name in done]
            left += [(prefix + name, reason) for name, reason in not_done]
            if done:
                module.graph.lint()
                module.recompile()
    return Report(tuple(replaced), tuple(left))


def check_where(function: str, where: object) -> None:
    """Raises TypeError for a filter that cannot be called."""
    if where is not None and not callable(where):
        got = type(where).__name__
        raise TypeError(f"{function}: argument 'where' takes a function of a node, got {got}")


def _replace(graph: Graph, where) -> tuple[list, list]:
    """Kind and name of the norms replaced; name and reason of those left."""
    replaced, left = [], []
    for node in list(graph.nodes):
        if node.op not in ("call_function", "call_method"):
            continue
        name = node.name
        try:
            norm = fused(node) or decomposed(node)
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
