"""replace_norms never raises for a node that it does not understand, and says why it left it."""

import operator
from itertools import product
from random import Random

import pytest
import torch
import torch.nn.functional as F

from tilenorm.integrations.fx import replace_norms

from ..ops.helpers import random
from .graphs import ATEN, by_hand
from .malformed import (
    GRAPHS,
    METADATA,
    OTHER_VALUES,
    Case,
    N,
    accepts,
    broken,
    calls_of,
    drawn_cases,
    graph_of,
    result_of,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::SyntaxWarning"),  # of the code of malformed calls
    pytest.mark.any_torch,
]
SEED, DRAWN, SLOW_DRAWN = 21, 100, 1200
NORMS = ("rms_norm", "layer_norm")


def assert_case(case: Case) -> None:
    found = broken(case)
    if found is None:
        return
    graph_module, node, mutation, accepted = found
    label = f"{case.graph}, {node.name}: {mutation.name}: {node.format_node()}"
    before = result_of(graph_module)
    report = replace_norms(graph_module)
    graph_module.graph.lint()
    left = node.name in "\n".join(map(": ".join, report.left))
    of_norm = any(name in str(node.target) for name in NORMS)
    if not accepted:
        assert not accepts(graph_module), f"{label} is not refused any more"
        read = of_norm or (mutation.spoils and node.target is not operator.getitem)
        assert left or not read, f"{label}: no reason in {report}"
    elif not left and not isinstance(before, Exception):
        after = result_of(graph_module)
        assert not isinstance(after, Exception), f"{label} raises {after!r}"
        for a, b in zip(after, before, strict=True):
            if isinstance(b, torch.Tensor):  # not so after a getitem from another argument
                torch.testing.assert_close(a, b, equal_nan=True, msg=lambda m: f"{label}: {m}")


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_without_a_mutation_are_replaced(name):
    graph_module = graph_of(name)
    report = replace_norms(graph_module)
    graph_module.graph.lint()
    assert len(report.replaced) == (2 if "fused" in name else 1)
    assert not report.left


def test_drawn_malformed_calls():
    for case in drawn_cases(DRAWN, SEED):
        assert_case(case)


@pytest.mark.slow
def test_many_drawn_malformed_calls():
    for case in drawn_cases(SLOW_DRAWN, SEED + 1):
        assert_case(case)


@pytest.mark.parametrize("name", GRAPHS)
def test_malformed_metadata(name):
    norms = 2 if "fused" in name else 1
    cases = list(product(range(len(graph_of(name).graph.nodes)), METADATA.values()))
    for place, change in Random(SEED).sample(cases, 15):
        graph_module = graph_of(name)
        node = list(graph_module.graph.nodes)[place]
        if node.name in ("bare", "output"):
            continue
        change(node.meta)
        report = replace_norms(graph_module)
        graph_module.graph.lint()
        assert len(report.replaced) + len(report.left) >= norms, f"{node.name}: {report}"


@pytest.mark.parametrize("name", GRAPHS)
def test_metadata_of_another_tensor(name):
    cases = list(product(range(len(graph_of(name).graph.nodes)), OTHER_VALUES))
    for place, value in Random(SEED).sample(cases, 20):
        graph_module = graph_of(name)
        list(graph_module.graph.nodes)[place].meta["val"] = value
        replace_norms(graph_module)
        graph_module.graph.lint()


@pytest.mark.parametrize("name", GRAPHS)
def test_no_metadata_at_all(name):
    graph_module = graph_of(name)
    for node in graph_module.graph.nodes:
        node.meta.clear()
    report = replace_norms(graph_module)
    assert not report.replaced
    assert all("metadata" in reason for _, reason in report.left)
    assert len(report.left) == (2 if "fused" in name else 1)


def test_backward_of_another_signature():
    """torchtitan's tests build the node in this way."""
    graph_module = graph_of("fused rms")
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
