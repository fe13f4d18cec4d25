"""Graphs with one malformed node, drawn: what may be wrong with a call, and graphs to break."""

import operator
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from ..ops.helpers import EPS
from ..ops.helpers import random as numbers
from .graphs import ATEN, by_hand

N, ROWS = 8, 3
SHAPES = {"x": (ROWS, N), "dy": (ROWS, N), "weight": (N,), "bias": (N,)}
# More inputs of every graph: what a drawn argument may be. Their traced values are set below.
ODD = ("odd", "number", "bare", "symbol", "many")


def getitems(call, node, count):
    return [call(operator.getitem, node, i) for i in range(count)]


def fused_rms(call, x, dy, w, b):
    y, rstd = getitems(call, call(ATEN._fused_rms_norm.default, x, [N], w, EPS), 2)
    backward = ATEN._fused_rms_norm_backward.default
    return y, *getitems(call, call(backward, dy, x, [N], rstd, w, [True, True]), 2)


def fused_layer(call, x, dy, w, b):
    y, *stats = getitems(call, call(ATEN.native_layer_norm.default, x, [N], w, b, EPS), 3)
    backward = ATEN.native_layer_norm_backward.default
    return y, *getitems(call, call(backward, dy, x, [N], *stats, w, b, [True] * 3), 3)


def spelled_out_by_methods(call, x, dy, w, b):
    wide = call("float", x)
    mean = call("mean", call("pow", wide, 2), -1, keepdim=True)
    x_hat = call("mul", wide, call("rsqrt", call("add", mean, EPS)))
    return (call("mul", call("to", x_hat, torch.float32), w),)


def spelled_out_by_functions(call, x, dy, w, b):
    mean = call(torch.mean, call(operator.mul, x, x), dim=-1, keepdim=True)
    x_hat = call(operator.truediv, x, call(torch.sqrt, call(operator.add, mean, EPS)))
    return (call(operator.mul, call(operator.add, w, 1.0), x_hat),)


def spelled_out_in_aten(call, x, dy, w, b):
    wide = call(ATEN._to_copy.default, x, dtype=torch.float32)
    mean = call(ATEN.mean.dim, call(ATEN.pow.Tensor_Scalar, wide, 2), [-1], True)
    root = call(ATEN.pow.Tensor_Scalar, call(ATEN.add.Scalar, mean, EPS), -0.5)
    return (call(ATEN.mul.Tensor, call(ATEN.mul.Tensor, wide, root), w),)


def variance_by_methods(call, x, dy, w, b):
    centred = call("sub", x, call("mean", x, -1, True))
    root = call("sqrt", call("add", call("var", x, -1, unbiased=False, keepdim=True), EPS))
    return (call("add", call("mul", call("div", centred, root), w), b),)


def variance_and_mean(call, x, dy, w, b):
    variance, mean = getitems(call, call(torch.var_mean, x, -1, correction=0, keepdim=True), 2)
    root = call(operator.pow, call(operator.add, variance, EPS), -0.5)
    return (call(operator.mul, call(operator.sub, x, mean), root),)


def gated_in_aten(call, x, dy, w, b):
    length = call(ATEN.linalg_vector_norm.default, x, 2, [-1], True)
    mean = call(ATEN.div.Tensor, call(ATEN.pow.Tensor_Scalar, length, 2), N)
    root = call(ATEN.reciprocal.default, call(ATEN.sqrt.default, call(ATEN.add.Scalar, mean, EPS)))
    y = call(ATEN.mul.Tensor, call(ATEN.mul.Tensor, x, root), w)
    return (call(ATEN.mul.Tensor, y, call(ATEN.sigmoid.default, dy)),)


def of_unit_length(call, x, dy, w, b):
    return (call(operator.mul, call(F.normalize, x, dim=-1, eps=0.0), N**0.5),)


def by_length(call, x, dy, w, b):
    root = call(operator.truediv, call("norm", x, 2, dim=-1, keepdim=True), N**0.5)
    return (call(operator.truediv, x, root),)


GRAPHS = {
    "aten.rms_norm": lambda call, x, dy, w, b: (call(ATEN.rms_norm.default, x, [N], w, EPS),),
    "aten.layer_norm": lambda call, x, dy, w, b: (call(ATEN.layer_norm.default, x, [N], w, b),),
    "F.rms_norm": lambda call, x, dy, w, b: (call(F.rms_norm, x, (N,), weight=w, eps=EPS),),
    "F.layer_norm": lambda call, x, dy, w, b: (call(F.layer_norm, x, (N,), w, b),),
    "torch.layer_norm": lambda call, x, dy, w, b: (call(torch.layer_norm, x, (N,), w, b),),
    "of a sum": lambda call, x, dy, w, b: (
        call(F.rms_norm, call(operator.add, x, dy), (N,), w, EPS),
    ),
    "fused rms": fused_rms,
    "fused layer": fused_layer,
    "methods": spelled_out_by_methods,
    "functions": spelled_out_by_functions,
    "aten": spelled_out_in_aten,
    "variance by methods": variance_by_methods,
    "variance and mean": variance_and_mean,
    "gated, in aten": gated_in_aten,
    "F.normalize": of_unit_length,
    "norm": by_length,
    "weight, bias and gate after F.layer_norm": lambda call, x, dy, w, b: (
        call(
            operator.mul,
            call(operator.add, call(operator.mul, call(F.layer_norm, x, (N,)), w), b),
            call(F.silu, dy),
        ),
    ),
}


def inputs() -> list[object]:
    tensors = [numbers(*shape, seed=i) for i, shape in enumerate(SHAPES.values())]
    return [*tensors, torch.ones(2, 5), 1e-3, torch.ones(ROWS, N), 1e-3, (torch.ones(N),) * 2]


def graph_of(name: str) -> GraphModule:
    """A graph whose norms replace_norms replaces."""
    graph_module = by_hand(
        lambda call, *given: GRAPHS[name](call, *given[: len(SHAPES)]), *inputs()
    )
    _set_odd_values(graph_module)
    return graph_module


def _set_odd_values(graph_module: GraphModule) -> None:
    nodes = dict(zip((*SHAPES, *ODD), graph_module.graph.nodes, strict=False))
    nodes["bare"].meta.clear()
    nodes["symbol"].meta["val"] = ShapeEnv().create_unbacked_symfloat()


class Mutation(NamedTuple):
    """A change of one node. spoils: whether no overload of any op takes the changed call."""

    name: str
    apply: Callable[[Node, dict[str, Node]], None]
    spoils: bool = False


def calls_of(graph_module: GraphModule) -> list[Node]:
    return [n for n in graph_module.graph.nodes if n.op in ("call_function", "call_method")]


def _values() -> dict[str, tuple[Callable[[dict[str, Node]], object], bool]]:
    """What an argument is replaced by, and whether no argument of any op is that."""
    plain = {"None": None, "0": 0, "-1": -1, "9": 9, "1.5": 1.5, "True": True, "1e400": 10**400}
    plain |= {"[]": [], "[1.5]": [1.5], "(8, 8)": (8, 8), "[True]": [True]}
    values = {name: ((lambda _, v=value: v), False) for name, value in plain.items()}
    for name in ODD:
        values[name] = ((lambda nodes, n=name: nodes[n]), False)
    values["a list of nodes"] = (lambda nodes: [nodes["odd"]]), False
    values["text"] = (lambda _: "text"), True
    values["a class"] = (lambda _: dict), True
    return values


def mutations(node: Node) -> Iterator[Mutation]:
    """All changes of a call of this form."""
    for i in range(len(node.args)):
        yield Mutation(f"without argument {i}", lambda n, _, i=i: _set(n, i))
        yield Mutation(
            f"argument {i} by a wrong name", lambda n, _, i=i: _named(n, i, "wrong"), True
        )
        for name in ("input", "self", "eps", "weight", "dim", "other"):
            yield Mutation(
                f"argument {i} as {name}", lambda n, _, i=i, name=name: _named(n, i, name)
            )
        # Without its link to another node, a call is no longer a part of a norm.
        linked = isinstance(node.args[i], Node)
        for name, (value, spoils) in _values().items():
            name = f"{name} for argument {i}"
            change = lambda n, x, i=i, v=value: _set(n, i, v(x))  # noqa: E731
            yield Mutation(name, change, spoils and not linked)
        for j in range(i):
            yield Mutation(f"arguments {j} and {i} in turn", lambda n, _, i=i, j=j: _swap(n, i, j))
    for key in node.kwargs:
        yield Mutation(f"without {key}", lambda n, _, k=key: _keywords(n, k))
        for name, (value, spoils) in _values().items():
            yield Mutation(
                f"{name} for {key}", lambda n, x, k=key, v=value: _keywords(n, k, v(x)), spoils
            )
    for name, (value, _) in _values().items():
        yield Mutation(f"{name} more", lambda n, x, v=value: _set(n, len(n.args), v(x)))
        yield Mutation(f"bogus={name}", lambda n, x, v=value: _keywords(n, "bogus", v(x)), True)
        yield Mutation(f"eps={name}", lambda n, x, v=value: _keywords(n, "eps", v(x)))
    yield Mutation("no arguments", lambda n, _: _replace(n, (), {}))


def _replace(node: Node, args: tuple, kwargs: dict) -> None:
    node.args, node.kwargs = args, kwargs


def _set(node: Node, i: int, *value: object) -> None:
    _replace(node, (*node.args[:i], *value, *node.args[i + 1 :]), node.kwargs)


def _named(node: Node, i: int, name: str) -> None:
    args = (*node.args[:i], *node.args[i + 1 :])
    _replace(node, args, {**node.kwargs, name: node.args[i]})


def _swap(node: Node, i: int, j: int) -> None:
    args = list(node.args)
    args[i], args[j] = args[j], args[i]
    _replace(node, tuple(args), node.kwargs)


def _keywords(node: Node, key: str, *value: object) -> None:
    kept = {k: v for k, v in node.kwargs.items() if k != key}
    _replace(node, node.args, kept | dict.fromkeys([key] * len(value), *value))


METADATA = {
    "none": lambda meta: meta.clear(),
    "a number": lambda meta: meta.update(val=1.5),
    "text": lambda meta: meta.update(val="text"),
    "a tuple": lambda meta: meta.update(val=(meta.get("val"), None)),
    "None": lambda meta: meta.update(val=None),
}


# Values that are not those of any node of the graphs.
OTHER_VALUES = (
    *(torch.ones(shape) for shape in ((), (N,), (0, N), (2, ROWS, N), (ROWS, 1), (5, 7))),
    *(torch.ones(ROWS, N, dtype=dtype) for dtype in (torch.bfloat16, torch.int64)),
    torch.ones(N, ROWS).t(),
    torch.ones(ROWS, N, device="meta"),
    torch.ones(ROWS, N).to_sparse(),
)


class Case(NamedTuple):
    graph: str
    place: int  # of the node among the calls of the graph
    mutation: int  # its place among the node's mutations


def every_case() -> list[Case]:
    return [
        Case(name, place, number)
        for name in GRAPHS
        for place, node in enumerate(calls_of(graph_of(name)))
        for number, _ in enumerate(mutations(node))
    ]


def drawn_cases(count: int, seed: int) -> list[Case]:
    return random.Random(seed).sample(every_case(), count)


class Broken(NamedTuple):
    """accepted: whether PyTorch accepts the graph. Its metadata are then those of the mutation."""

    graph_module: GraphModule
    node: Node
    mutation: Mutation
    accepted: bool


def broken(case: Case) -> Broken | None:
    """The graph of a case; None if the mutated graph has no Python code."""
    graph_module = graph_of(case.graph)
    node = calls_of(graph_module)[case.place]
    mutation = list(mutations(node))[case.mutation]
    mutation.apply(node, dict(zip((*SHAPES, *ODD), graph_module.graph.nodes, strict=False)))
    try:
        graph_module.recompile()
    except (SyntaxError, IndexError):
        return None
    return Broken(graph_module, node, mutation, accepts(graph_module))


def accepts(graph_module: GraphModule) -> bool:
    """Whether PyTorch can trace a graph. Tracing writes the metadata of its nodes."""
    try:
        FakeTensorProp(graph_module).propagate(*inputs())
    except Exception:
        return False
    finally:
        _set_odd_values(graph_module)
    return True


def result_of(graph_module: GraphModule) -> tuple[Tensor, ...] | Exception:
    """What a graph computes, or the exception that it raises."""
    try:
        return torch.fx.Interpreter(graph_module).run(*inputs())
    except Exception as error:
        return error
