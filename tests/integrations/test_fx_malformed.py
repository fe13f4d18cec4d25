"""replace_norms never raises for a node that it does not understand, and says why it left it."""

import operator
from random import Random

import pytest
import torch
import torch.nn.functional as F

from tilenorm.integrations.fx import replace_norms

from ..ops.helpers import random
from .graphs import ATEN, by_hand
from .malformed import (
    CHAINS,
    GRAPHS,
    METADATA,
    accepts,
    calls_of,
    changes,
    graph_of,
    result_of,
)
from .spellings import N

pytestmark = [
    pytest.mark.filterwarnings("ignore::SyntaxWarning"),  # of the code of malformed calls
    pytest.mark.any_torch,
]
NORMS = ("rms_norm", "layer_norm")


def hold(name: str, rng: Random) -> None:
    """Malform one call of a graph. The pass gives a reason, or the results of the graph stay."""
    graph_module, odd = graph_of(name)
    node, source = rng.choice(calls_of(graph_module)), GRAPHS[name][0]
    change = rng.choice(list(changes(node, odd)))
    node.args, node.kwargs = change.args, change.kwargs
    label = f"{name}, {node.name}: {node.format_node()}"
    try:
        graph_module.recompile()
    except (SyntaxError, IndexError):
        return  # no Python code calls a function in this way
    accepted = accepts(graph_module, node, source.inputs, odd)
    before = result_of(graph_module, source.inputs) if accepted else TypeError()
    report = replace_norms(graph_module)
    graph_module.graph.lint()
    left = node.name in "\n".join(map(": ".join, report.left))
    if not accepted:
        of_norm = any(norm in str(node.target) for norm in NORMS)
        of_chain = name.partition(",")[0] in CHAINS
        read = of_norm or (change.spoils and node.target is not operator.getitem and not of_chain)
        assert report.left or not read, f"{label}: no reason in {report}"
    elif not left and not isinstance(before, Exception):
        after = result_of(graph_module, source.inputs)
        assert not isinstance(after, Exception), f"{label} raises {after!r}"
        torch.testing.assert_close(after, before, equal_nan=True, msg=lambda m: f"{label}: {m}")


@pytest.mark.parametrize("examples", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_drawn_malformed_calls(examples):
    rng = Random(examples)
    for name in GRAPHS:
        for _ in range(examples):
            hold(name, rng)


def test_graphs_without_a_malformed_call_are_replaced():
    for name, (source, _) in GRAPHS.items():
        graph_module, _ = graph_of(name)
        report = replace_norms(graph_module)
        graph_module.graph.lint()
        assert len(report.replaced) == source.norms and not report.left, f"{name}: {report}"


def test_metadata_of_another_tensor_or_none():
    rng = Random(0)
    for name, (source, _) in GRAPHS.items():
        for number in range(4):
            graph_module, odd = graph_of(name)
            node = rng.choice(list(graph_module.graph.nodes))
            node.meta.clear()
            if number:
                node.meta["val"] = rng.choice(METADATA)
            report = replace_norms(graph_module)
            graph_module.graph.lint()
            described = isinstance(node.meta.get("val"), torch.Tensor)
            if (
                name.partition(",")[0] in CHAINS
                or described
                or node in odd.values()
                or node.op == "output"
                or "_mean" in node.name
            ):
                continue  # the norm may be no norm any more
            assert len(report.replaced) + len(report.left) >= source.norms, (
                f"{name}, {node.name}: {report}"
            )


def test_no_metadata_at_all():
    for name, (source, _) in GRAPHS.items():
        graph_module, _ = graph_of(name)
        for node in graph_module.graph.nodes:
            node.meta.clear()
        report = replace_norms(graph_module)
        assert not report.replaced
        if name.partition(",")[0] not in CHAINS:  # a graph with a norm of tilenorm's needs no norm
            assert len(report.left) == source.norms
            assert all("metadata" in reason for _, reason in report.left)


def test_backward_of_another_signature():
    """torchtitan's tests build the node in this way."""
    graph_module, _ = graph_of("fused rms")
    (node,) = [n for n in calls_of(graph_module) if "backward" in n.name]
    x, dy, weight = list(graph_module.graph.nodes)[:3]
    node.args = (dy, weight, x, [N], 1e-5)
    report = replace_norms(graph_module)
    graph_module.graph.lint()
    assert [kind for kind, _ in report.replaced] == ["rms_norm"]
    (left,) = report.left
    assert left == (
        node.name,
        f"{node.name}: argument 'normalized_shape' of aten::_fused_rms_norm_backward takes"
        " List[int], got arg0",
    )


def test_a_target_that_is_no_overload_is_left():
    graph_module = by_hand(
        lambda call, x: call(ATEN.layer_norm.default, call(ATEN.rsqrt, x), [N]), random(3, N)
    )
    assert len(replace_norms(graph_module).replaced) == 1


def test_rows_of_a_number_that_depends_on_data():
    def function(x, weight):
        rows = x[x[:, 0] > 0]
        y = F.rms_norm(rows, (N,), weight)
        return y, F.layer_norm(rows + rows, (N,))

    x, weight = random(5, N), random(N)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        graph_module = torch._dynamo.export(function)(x, weight).graph_module
    report = replace_norms(graph_module)
    graph_module.graph.lint()
    assert len(report.replaced) + len(report.left) == 2
