"""The pass that quantises norms raises for no malformed call, and keeps the results of graphs."""

import operator
import random as draw
from itertools import product

import pytest
import torch
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from tilenorm.integrations.fx.nodes import Left, bind
from tilenorm.integrations.fx.quantized import quantize_norms

from ..ops.helpers import EPS, random
from .chains import E4M3, F32, F64, N, assert_same
from .graphs import ATEN, NORM, by_hand, calls
from .malformed import METADATA, calls_of, mutations


def row_graph(call, y, s):
    wide = call(ATEN._to_copy.default, y, dtype=F64)
    peak = call(ATEN.clamp.default, call(ATEN.amax.default, call("abs", wide), [-1], True), 1e-12)
    inverse = call(ATEN.mul.Tensor, call(ATEN.reciprocal.default, peak), 448.0)
    factor = call(ATEN._to_copy.default, inverse, dtype=F32)
    power = call(torch.exp2, call(ATEN.floor.default, call(ATEN.log2.default, factor)))
    product = call(ATEN.mul.Tensor, call("float", y), power)
    q = call("to", call(torch.clamp, product, -448.0, max=448.0), E4M3)
    return call("float", q), call("reciprocal", call("view", power, -1))


def static_graph(call, y, s):
    product = call(ATEN.mul.Tensor, y, call(ATEN.reciprocal.default, s))
    clamped = call(ATEN.clamp_min.default, call(ATEN.clamp_max.default, product, 448.0), -448.0)
    return (call("float", call(ATEN._to_copy.default, clamped, dtype=E4M3)),)


GRAPHS = {"row": row_graph, "static": static_graph}
HOW = (N, "rms", 0.0, False, "late", "silu", 1.0, EPS, False)
ODD = ("odd", "number", "bare", "symbol", "many")


def graph_of(name):
    """A chain of a call of tilenorm::norm, and inputs that a mutation may put anywhere."""

    def build(call, x, w, s, *others):
        y = call(torch.ops.tilenorm.norm.default, x, None, None, w, None, *HOW)
        return GRAPHS[name](call, call(operator.getitem, y, 0), s)

    given = (random(3, N), random(N), torch.tensor([0.5]))
    others = (torch.ones(2, 5), torch.ones(()), torch.ones(3, N), torch.ones(1), torch.ones(3, 1))
    graph_module = by_hand(build, *given, *others)
    nodes = dict(zip(("x", "w", "s", *ODD), graph_module.graph.nodes, strict=False))
    nodes["bare"].meta.clear()
    return graph_module, nodes, (*given, *others)


def results_of(graph_module, given):
    try:
        return torch.fx.Interpreter(graph_module).run(*given)
    except Exception as error:
        return error


def assert_mutation(name, place, number):
    """The pass raises for no changed call, and the results of the graph stay."""
    graph_module, nodes, given = graph_of(name)
    node = calls_of(graph_module)[place]
    mutation = list(mutations(node))[number]
    mutation.apply(node, nodes)
    label = f"{name}, {node.name}: {mutation.name}: {node.format_node()}"
    try:
        graph_module.recompile()
    except (SyntaxError, IndexError):
        return
    # PyTorch crashes for some calls that do not fit their schemas.
    accepted = is_bound(node) and is_traced(graph_module, nodes, given)
    before = results_of(graph_module, given) if accepted else TypeError()
    quantize_norms(graph_module.graph)
    graph_module.graph.lint()
    if not isinstance(before, Exception):
        after = results_of(graph_module, given)
        assert not isinstance(after, Exception), f"{label} raises {after!r}"
        for a, b in zip(after, before, strict=True):
            if isinstance(b, torch.Tensor):
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=label)


def is_bound(node):
    try:
        return node.target is operator.getitem or bool(bind(node))
    except Left:
        return False


def is_traced(graph_module, nodes, given):
    """Whether PyTorch traces a graph. Tracing writes the metadata of its nodes."""
    try:
        FakeTensorProp(graph_module).propagate(*given)
    except Exception:
        return False
    finally:
        nodes["bare"].meta.clear()
    return True


@pytest.mark.parametrize("name", GRAPHS)
def test_graph_without_a_mutation_is_replaced(name):
    graph_module, _, given = graph_of(name)
    expected = graph_module(*given)
    quantized, left = quantize_norms(graph_module.graph)
    graph_module.recompile()
    assert [kind for kind, *_ in quantized] == ["rms_norm_quantized"] and not left
    assert not calls(graph_module, NORM)
    assert_same(graph_module(*given), expected)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("examples", [25, pytest.param(300, marks=pytest.mark.slow)])
def test_drawn_malformed_calls(name, examples):
    chain = list(enumerate(calls_of(graph_of(name)[0])))
    cases = [(place, i) for place, node in chain for i, _ in enumerate(mutations(node))]
    for case in draw.Random(examples).sample(cases, examples):
        assert_mutation(name, *case)


@pytest.mark.parametrize("name", GRAPHS)
def test_malformed_metadata(name):
    places = range(len(graph_of(name)[0].graph.nodes))
    for place, change in draw.Random(1).sample(list(product(places, METADATA.values())), 30):
        graph_module, _, _ = graph_of(name)
        change(list(graph_module.graph.nodes)[place].meta)
        quantize_norms(graph_module.graph)
        graph_module.graph.lint()
