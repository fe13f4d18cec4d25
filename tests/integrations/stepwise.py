"""Compiled models whose graphs run op by op: Inductor up to the partition, without its code."""

from functools import partial
from typing import NamedTuple

import pytest
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx import Graph, GraphModule, Node

from .graphs import ATEN


class Graphs(NamedTuple):
    """What Inductor would compile: forward, inference and backward graphs, in order."""

    forward: list[GraphModule]
    backward: list[GraphModule]

    @property
    def saved(self) -> int:
        """Bytes of all results of the forward graphs."""
        results = [a for gm in self.forward for a in gm.graph.output_node().args[0]]
        values = [a.meta["val"] for a in results if isinstance(a, Node)]
        return sum(v.numel() * v.element_size() for v in values if isinstance(v, Tensor))


@pytest.fixture
def stepwise(monkeypatch, dynamo):
    """Graphs of Inductor, filled while models are compiled by it. They run op by op."""
    from torch._inductor import compile_fx

    graphs = Graphs([], [])

    def inner_compile(graph_module, _, **how):
        (graphs.backward if how.get("is_backward") else graphs.forward).append(graph_module)
        return make_boxed_func(graph_module.forward)

    whole = partial(compile_fx.compile_fx, inner_compile=inner_compile)
    monkeypatch.setattr(compile_fx, "compile_fx", whole)
    with functorch_config.patch(enable_autograd_cache=False):  # of code that is not Inductor's
        yield graphs


def sums(graph: Graph, width: int) -> list[Node]:
    """The additions of two gradients of rows of a width, in a backward graph."""
    found = graph.find_nodes(op="call_function", target=ATEN.add.Tensor)
    return [node for node in found if _adds_rows(node, width)]


def _adds_rows(node: Node, width: int) -> bool:
    shape = node.meta["val"].shape
    return all(isinstance(a, Node) for a in node.args) and len(shape) > 1 and shape[-1] == width


def counted(graph: Graph, target: object) -> int:
    return len(graph.find_nodes(op="call_function", target=target))
