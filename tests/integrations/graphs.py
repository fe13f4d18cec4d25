"""Graphs for tests of the FX pass: traced by TorchDynamo, torch.export or make_fx, or by hand."""

from collections.abc import Callable
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from tests.support.calls import random
from tilenorm import table
from tilenorm.integrations.fx import Report, replace_norms

ATEN = torch.ops.aten
NORM_BACKWARD = torch.ops.tilenorm.norm_backward.default
NORMS = {getattr(torch.ops.tilenorm, name).default: name for name in table.NORMS}


class HuggingFaceNorm(nn.Module):
    """The same operations as transformers' LlamaRMSNorm."""

    def __init__(self, size: int, eps: float = 1e-6):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(size)), eps

    def forward(self, hidden_states):
        dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(dtype)


class FeedForward(nn.Module):
    """A transformer's block without attention, and a norm behind it."""

    def __init__(self, first: nn.Module, second: nn.Module, size: int):
        super().__init__()
        self.first, self.second = first, second
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x):
        return self.second(x + self.down(torch.relu(self.up(self.first(x)))))


class Replaced(NamedTuple):
    """A module after the pass: a callable that runs it, its graph, and the report of the pass."""

    run: Callable
    graph_module: GraphModule
    report: Report


def argument(call, name: str):
    """The argument of an op's call in a graph, by its name in the schema."""
    names = [a.name for a in call.target._schema.arguments]
    return dict(zip(names, call.args, strict=False)).get(name)


def kinds_of(report) -> list[str]:
    """The kinds of the ops that a report tells of."""
    return [kind for kind, _ in report.replaced]


def as_tuple(outputs) -> tuple:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def step(function: Callable, tensors, trained: int | None = None) -> list[Tensor]:
    """Outputs, and the gradients of the first `trained` tensors, or of all of them."""
    leaves = [t.detach().clone() for t in tensors]
    asked = [t.requires_grad_() for t in leaves[:trained]]
    outputs = [y for y in as_tuple(function(*leaves)) if y is not None]
    used = [y for y in outputs if y.requires_grad]
    dys = [random(*y.shape, seed=9 + i).to(y) for i, y in enumerate(used)]
    grads = torch.autograd.grad(used, asked, dys, materialize_grads=True) if used else ()
    return [*(y.detach() for y in outputs), *grads]


def trained(module: nn.Module, x: Tensor) -> list[Tensor | None]:
    """The output of a module, and the gradients of its input and of its parameters."""
    x = x.detach().requires_grad_()  # keeps the strides
    y = module(x)
    leaves = [x, *(p for p in module.parameters() if p.requires_grad)]
    dy = random(*y.shape, seed=5).to(y)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy, allow_unused=True)]


def module_of(function: Callable) -> nn.Module:
    module = nn.Module()
    module.forward = function
    return module


def by_dynamo(module: Callable, *args: Tensor, **options) -> Replaced:
    """Run the pass on the graph that TorchDynamo gives to a torch.compile backend."""
    graph_and_report = []

    def backend(graph_module, _):
        graph_and_report[:] = [graph_module, replace_norms(graph_module, **options)]
        graph_module.graph.lint()
        return graph_module

    run = torch.compile(module, backend=backend, fullgraph=True)
    run(*args)
    return Replaced(run, *graph_and_report)


def by_export(module: nn.Module, *args: Tensor, **options) -> Replaced:
    """Run the pass on the graph of torch.export."""
    program = torch.export.export(module, args)
    report = replace_norms(program.graph_module, **options)
    program.graph_module.graph.lint()
    return Replaced(program.module(), program.graph_module, report)


def by_make_fx(module: nn.Module, *args: Tensor, **options) -> Replaced:
    """Run the pass on the graph of make_fx."""
    parameters = dict(module.named_parameters())
    graph_module = make_fx(lambda p, *a: functional_call(module, p, a))(parameters, *args)
    report = replace_norms(graph_module, **options)
    graph_module.graph.lint()
    return Replaced(lambda *a: graph_module(parameters, *a), graph_module, report)


TRACERS = {"dynamo": by_dynamo, "export": by_export, "make_fx": by_make_fx}


def by_hand(build: Callable[..., object], *args: Tensor) -> GraphModule:
    """A graph whose output is the result of build(call, *placeholders); call adds a node.

    Some nodes cannot be traced on a CPU, because PyTorch decomposes them there.
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


def calls(graph_module: GraphModule, target: object = None) -> list[Node]:
    """The nodes that call `target`, or the op of any norm."""
    wanted = NORMS if target is None else (target,)
    return [node for node in graph_module.graph.nodes if node.target in wanted]


def targets(graph_module: GraphModule) -> list[object]:
    """The functions and methods that a graph calls, in order."""
    ops = ("call_function", "call_method")
    return [node.target for node in graph_module.graph.nodes if node.op in ops]


def malform(graph: Graph, rng: Random) -> Node:
    """Change the arguments of one call at random. Returns the call.

    An argument is left out, comes again, has an unknown name, or has a value that is drawn. Python
    has no code for an operator with a missing operand.
    """
    nodes = [node for node in graph.nodes if node.op in ("call_function", "call_method")]
    node = rng.choice([n for n in nodes if getattr(n.target, "__module__", "") != "_operator"])
    values = (None, 0, -1, 1.5, True, [], [1.5], (8, 8), [True], "text")
    value = rng.choice((*values, next(iter(graph.nodes))))
    args, kwargs = list(node.args), dict(node.kwargs)
    first = node.op == "call_method"  # Python's code for a method starts with its tensor
    place = rng.randrange(first, len(args) + 1)
    match rng.choice(("replace", "drop", "insert", "name", "add")):
        case "replace":
            args[place : place + 1] = [value]
        case "drop":
            args[place : place + 1] = []
        case "insert":
            args.insert(place, value)
        case "name" if len(args) > first:
            kwargs[rng.choice(("bogus", "input", "self", "eps", "dim", "other"))] = args.pop()
        case _:
            kwargs[rng.choice(("bogus", *kwargs))] = value
    node.args, node.kwargs = tuple(args), kwargs
    return node
