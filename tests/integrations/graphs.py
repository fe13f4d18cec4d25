"""Graphs for the pass: traced in each way that PyTorch has, and made by hand."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from tilenorm.integrations.fx import Report, replace_norms

ATEN = torch.ops.aten
NORM, NORM_BACKWARD = torch.ops.tilenorm.norm.default, torch.ops.tilenorm.norm_backward.default


class Replaced(NamedTuple):
    """What the pass made of a module: how to call it, the graph and the report."""

    run: Callable
    graph_module: GraphModule
    report: Report


def by_dynamo(module: Callable, *args: Tensor, **options) -> Replaced:
    """The graph that a backend of torch.compile is given."""
    found = []

    def backend(graph_module, _):
        found[:] = [graph_module, replace_norms(graph_module, **options)]
        return graph_module

    run = torch.compile(module, backend=backend, fullgraph=True)
    run(*args)
    return Replaced(run, *found)


def by_export(module: nn.Module, *args: Tensor, **options) -> Replaced:
    program = torch.export.export(module, args)
    report = replace_norms(program.graph_module, **options)
    return Replaced(program.module(), program.graph_module, report)


def by_make_fx(module: nn.Module, *args: Tensor, **options) -> Replaced:
    parameters = dict(module.named_parameters())
    graph_module = make_fx(lambda p, *a: functional_call(module, p, a))(parameters, *args)
    report = replace_norms(graph_module, **options)
    return Replaced(lambda *a: graph_module(parameters, *a), graph_module, report)


TRACERS = {"dynamo": by_dynamo, "export": by_export, "make_fx": by_make_fx}


def by_hand(build: Callable[..., object], *args: Tensor) -> GraphModule:
    """A graph whose output is what build(call, *placeholders) returns; call makes a node.

    For nodes that no tracer leaves on a CPU, or none at all.
    """
    graph = Graph()
    placeholders = [graph.placeholder(f"arg{i}") for i in range(len(args))]

    def call(target, *arguments, **kwargs) -> Node:
        if isinstance(target, str):
            return graph.call_method(target, arguments, kwargs)
        return graph.call_function(target, arguments, kwargs)

    graph.output(build(call, *placeholders))
    graph_module = GraphModule({}, graph)
    FakeTensorProp(graph_module).propagate(*args)
    return graph_module


def calls(graph_module: GraphModule, target: object = NORM) -> list[Node]:
    return [node for node in graph_module.graph.nodes if node.target == target]


def targets(graph_module: GraphModule) -> list[object]:
    """What a graph calls, in order."""
    called = ("call_function", "call_method")
    return [node.target for node in graph_module.graph.nodes if node.op in called]
