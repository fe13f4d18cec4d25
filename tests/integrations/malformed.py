"""Graphs of norms with one malformed node: the graphs, and what may be wrong with a call."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node, Proxy
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_aggregate
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.fx.proxy import GraphAppendingTracer

from tilenorm.integrations.fx.nodes import bind

from ..ops.helpers import EPS, random
from . import chains
from .graphs import ATEN, by_hand
from .spellings import SPELLINGS, N

# More inputs of every graph: what a drawn argument may be. Their traced values are set below.
ODD = ("odd", "number", "bare", "symbol", "many")
ROWS = 3


class Source(NamedTuple):
    """function: a norm of tensors of these shapes. norms: how many it has."""

    function: Callable
    shapes: tuple[tuple[int, ...], ...]
    norms: int = 1

    @property
    def inputs(self) -> list[object]:
        tensors = [random(*shape, seed=i) for i, shape in enumerate(self.shapes)]
        odd = (torch.ones(2, 5), 1e-3, torch.ones(ROWS, N), 1e-3, (torch.ones(N),) * 2)
        return [*tensors, *odd]


def fused_rms(x, dy, w, b):
    y, rstd = items(ATEN._fused_rms_norm.default(x, [N], w, EPS), 2)
    backward = ATEN._fused_rms_norm_backward.default
    return y, *items(backward(dy, x, [N], rstd, w, [True, True]), 2)


def fused_layer(x, dy, w, b):
    y, *stats = items(ATEN.native_layer_norm.default(x, [N], w, b, EPS), 3)
    backward = ATEN.native_layer_norm_backward.default
    return y, *items(backward(dy, x, [N], *stats, w, b, [True] * 3), 3)


def items(results, count):
    return [results[i] for i in range(count)]


def called(function: Callable, x: Proxy, *args, **kwargs) -> Proxy:
    """A call of a function of Python's, which would not be called with these arguments itself."""
    return x.tracer.create_proxy("call_function", function, (x, *args), kwargs)


def quantized(chain: Callable) -> Callable:
    def function(x, w, s):
        how = (chains.N, "rms", 0.0, False, "late", "silu", 1.0, EPS, False)
        y = torch.ops.tilenorm.norm.default(x, None, None, w, None, *how)[0]
        return [t.float() for t in chain(y, s)]

    return function


PLAIN = {
    "aten.rms_norm": lambda x, dy, w, b: ATEN.rms_norm.default(x, [N], w, EPS),
    "aten.layer_norm": lambda x, dy, w, b: ATEN.layer_norm.default(x, [N], w, b),
    "torch.layer_norm": lambda x, dy, w, b: torch.layer_norm(x, (N,), w, b),
    "keywords": lambda x, dy, w, b: F.rms_norm(x, (N,), weight=w, eps=EPS),
    "of a sum": lambda x, dy, w, b: F.rms_norm(x + dy, (N,), w, EPS),
    "F.normalize": lambda x, dy, w, b: called(F.normalize, x, dim=-1, eps=0.0) * N**0.5,
    "torch.norm": lambda x, dy, w, b: x / (called(torch.norm, x, 2, -1, True) * N**-0.5),
    "offset": lambda x, dy, w, b: (w + 1.0) * (x / torch.sqrt(torch.mean(x * x, -1, True) + EPS)),
    "cast": lambda x, dy, w, b: SPELLINGS["rms, norm"].function(x.float(), w, b).to(torch.float32),
}
SHAPES = (ROWS, N), (ROWS, N), (N,), (N,)
SOURCES = {
    **{name: Source(function, SHAPES) for name, function in PLAIN.items()},
    "fused rms": Source(fused_rms, SHAPES, 2),
    "fused layer": Source(fused_layer, SHAPES, 2),
    **{
        name: Source(function, SHAPES if form.other else ((ROWS, N), (N,), (N,)))
        for name, (form, function, _) in SPELLINGS.items()
    },
}
CHAINS = {
    name: Source(quantized(chain), ((ROWS, chains.N), (chains.N,), (1,)))
    for name, chain in chains.CHAINS.items()
}
# Each as it is written, and those of spellings.py and chains.py in operations of aten's too.
NOT_AS_WRITTEN = ("rms, torch.norm", "rms without eps, normalize", "row_without_casts", "block")
GRAPHS = {n: (s, False) for n, s in (SOURCES | CHAINS).items() if n not in NOT_AS_WRITTEN}
GRAPHS |= {f"{n}, in aten": ((SOURCES | CHAINS)[n], True) for n in (*SPELLINGS, *CHAINS)}


@cache
def in_aten(source: Source) -> GraphModule:
    return make_fx(lambda *tensors: source.function(*tensors))(*source.inputs[: len(source.shapes)])


def graph_of(name: str) -> tuple[GraphModule, dict[str, Node]]:
    """A graph whose norms replace_norms replaces, and its odd inputs."""
    source, traced = GRAPHS[name]

    def build(_, *nodes):
        graph, given = nodes[0].graph, nodes[: len(source.shapes)]
        if traced:
            old = in_aten(source).graph
            inputs = zip(old.find_nodes(op="placeholder"), given, strict=True)
            return graph.graph_copy(old, dict(inputs))
        tracer = GraphAppendingTracer(graph)
        proxies = [Proxy(node, tracer) for node in given]
        return map_aggregate(source.function(*proxies), lambda p: getattr(p, "node", p))

    graph_module = by_hand(build, *source.inputs)
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    odd = dict(zip(ODD, placeholders[len(source.shapes) :], strict=True))
    set_odd_values(odd)
    return graph_module, odd


def set_odd_values(odd: dict[str, Node]) -> None:
    odd["bare"].meta.clear()
    odd["symbol"].meta["val"] = ShapeEnv().create_unbacked_symfloat()


def calls_of(graph_module: GraphModule) -> list[Node]:
    return [n for n in graph_module.graph.nodes if n.op in ("call_function", "call_method")]


class Change(NamedTuple):
    """New arguments of a call. spoils: whether no overload of any op takes them."""

    args: tuple
    kwargs: dict
    spoils: bool = False


def changes(node: Node, odd: dict[str, Node]) -> Iterator[Change]:
    """All changes of a call of this form."""
    args, kwargs = node.args, node.kwargs
    plain = (None, 0, -1, 9, 1.5, True, 10**400, [], [1.5], (8, 8), [True], [odd["odd"]])
    values = [*((value, False) for value in (*plain, *odd.values())), ("text", True), (dict, True)]
    for i, argument in enumerate(args):
        before, after = args[:i], args[i + 1 :]
        yield Change(before + after, kwargs)
        for key in ("wrong", "input", "self", "eps", "weight", "dim", "other"):
            yield Change(before + after, {**kwargs, key: argument}, key == "wrong")
        for value, spoils in values:
            # Without its link to another node, a call is no longer a part of a norm.
            yield Change(
                (*before, value, *after), kwargs, spoils and not isinstance(argument, Node)
            )
        for j in range(i):
            swapped = list(args)
            swapped[i], swapped[j] = args[j], args[i]
            yield Change(tuple(swapped), kwargs)
    for key in kwargs:
        yield Change(args, {k: v for k, v in kwargs.items() if k != key})
        for value, spoils in values:
            yield Change(args, kwargs | {key: value}, spoils)
    for value, _ in values:
        yield Change((*args, value), kwargs)
        yield Change(args, {**kwargs, "bogus": value}, True)
        yield Change(args, {**kwargs, "eps": value})
    yield Change((), {})


def accepts(graph_module: GraphModule, node: Node, inputs: list, odd: dict[str, Node]) -> bool:
    """Whether PyTorch traces a graph, of which one call may not fit its op.

    Tracing writes the metadata of the graph's nodes. PyTorch crashes for some calls of an op that
    do not fit its schema.
    """
    try:
        if isinstance(node.target, torch._ops.OpOverload):
            bind(node)
        FakeTensorProp(graph_module).propagate(*inputs)
    except Exception:
        return False
    finally:
        set_odd_values(odd)
    return True


def result_of(graph_module: GraphModule, inputs: list) -> tuple[Tensor, ...] | Exception:
    """What a graph computes, or the exception that it raises."""
    try:
        return torch.fx.Interpreter(graph_module).run(*inputs)
    except Exception as error:
        return error


# Values of another node.
METADATA = (
    *(1.5, "text", None, (None, None), torch.ones(ROWS, N).t(), torch.ones(ROWS, N).to_sparse()),
    *(torch.ones(shape) for shape in ((), (N,), (0, N), (2, ROWS, N), (ROWS, 1), (5, 7))),
    *(torch.ones(ROWS, N, dtype=dtype) for dtype in (torch.bfloat16, torch.int64)),
    torch.ones(ROWS, N, device="meta"),
)
