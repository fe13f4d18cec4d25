"""replace_norms never raises for a node that it does not understand, and says why it left it."""

import copy
import operator
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support.calls import EPS, GATED, random, tensors_of
from tilenorm.integrations.fx import replace_norms

from .graphs import ATEN, by_hand, malform
from .rotations import rotate
from .spellings import RMSES, SPELLINGS, N, every_spelling


def fused(call, x, dy, w):
    """Forward and backward pass of a norm in aten's ops."""
    y, rstd = (call(operator.getitem, f, i) for f in [fused_forward(call, x, w)] for i in (0, 1))
    backward = call(ATEN._fused_rms_norm_backward.default, dy, x, [N], rstd, w, [True, True])
    return y, *(call(operator.getitem, backward, i) for i in (0, 1))


def fused_forward(call, x, w):
    return call(ATEN._fused_rms_norm.default, x, [N], w, EPS)


def modulated(x, by_group, w):
    by_group = by_group[:, None]
    y = F.layer_norm(x, (N,), w) * (1 + by_group) + by_group
    return F.layer_norm(x + by_group * y, (N,)) * (1 + by_group)


def rotated(x, w, table):
    q, k = (RMSES["/ sqrt"](t).transpose(1, 2) * w for t in (x, x * 2))
    return rotate(q, table, table), rotate(k, table, table)


@pytest.fixture(scope="module")
def graphs() -> dict[str, tuple[GraphModule, int]]:
    """Graphs of norms, and how many norms each has."""
    tensors = tensors_of(GATED, 3, N).values()
    rows, others = (random(3, N), random(3, N, seed=1), random(N)), len(SPELLINGS)
    return {
        "torch": (torch._dynamo.export(every_spelling)(*tensors).graph_module, others),
        "aten": (make_fx(every_spelling)(*tensors), others),
        "fused": (by_hand(fused, *rows), 2),
        "modulated": (make_fx(modulated)(random(2, 3, N), random(2, N), random(N)), 2),
        "rotated": (make_fx(rotated)(random(2, 3, 2, N), random(N), random(1, 1, 3, N)), 2),
    }


@pytest.mark.parametrize("examples", [6, pytest.param(24, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["torch", "aten", "fused", "modulated", "rotated"])
def test_drawn_malformed_calls(name, examples, graphs):
    """The other norms of the graph are replaced. A malformed call of a norm has a reason."""
    rng, (whole, norms) = Random(examples), graphs[name]
    for _ in range(examples):
        graph_module = copy.deepcopy(whole)
        node = malform(graph_module.graph, rng)
        report = replace_norms(graph_module, rotation=True)
        graph_module.graph.lint()
        label = f"{node.name}, {node.format_node()}: {report}"
        assert len(report.replaced) >= norms - 2, label
        spoiled = "bogus" in node.kwargs and "norm" in str(node.target)
        assert report.left or not spoiled, label


def test_no_metadata(graphs):
    rng = Random(0)
    for whole, norms in graphs.values():
        for _ in range(4):
            graph_module = copy.deepcopy(whole)
            rng.choice(list(graph_module.graph.nodes)).meta.clear()
            replace_norms(graph_module, rotation=True)
            graph_module.graph.lint()
        graph_module = copy.deepcopy(whole)
        for node in graph_module.graph.nodes:
            node.meta.clear()
        report = replace_norms(graph_module)
        assert not report.replaced and len(report.left) == norms
        assert all("metadata" in reason for _, reason in report.left)


def test_rows_of_a_number_that_depends_on_data():
    def function(x, weight):
        rows = x[x[:, 0] > 0]
        y = F.rms_norm(rows, (N,), weight)
        return y, F.layer_norm(rows + rows, (N,))

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        graph_module = torch._dynamo.export(function)(random(5, N), random(N)).graph_module
    report = replace_norms(graph_module)
    graph_module.graph.lint()
    assert len(report.replaced) + len(report.left) == 2
