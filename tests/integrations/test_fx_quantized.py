"""Norms and the chains that quantise them become one op, with the same codes and scales."""

import random as draw

import pytest
import torch
import torch.nn.functional as F

import tilenorm
from tilenorm.integrations.fx import replace_norms
from tilenorm.table import QUANTIZED_NORMS

from ..ops.helpers import EPS, random
from .chains import (
    BF16,
    CHAINS,
    F16,
    F32,
    LEFT,
    NORMS,
    N,
    Quantized,
    assert_same,
    block,
    inputs,
    row,
    static,
)
from .graphs import TRACERS, argument, by_dynamo, calls, targets

QUANTIZED = {getattr(torch.ops.tilenorm, name).default for name in QUANTIZED_NORMS}


def quantized_calls(graph_module):
    return [node for node in graph_module.graph.nodes if node.target in QUANTIZED]


@pytest.fixture(autouse=True)
def nothing_compiled():
    """TorchDynamo compiles one function a few times at most."""
    torch._dynamo.reset()


def replaced(tracer, module, given):
    """The graph after the pass, whose results are those of the chain on tilenorm's y."""
    run, graph_module, report = TRACERS[tracer](module, *given)
    expected = Quantized(module.chain, module.norm, tilenorm, module.more)(*given)
    assert_same(run(*given), expected)
    return graph_module, report


# Each chain by each tracer; the quick run has one tracer for each.
SPELLINGS = [
    pytest.param(chain, tracer, marks=() if (i + j) % 3 == 0 else pytest.mark.slow)
    for i, chain in enumerate(CHAINS)
    for j, tracer in enumerate(TRACERS)
]


@pytest.mark.parametrize(("chain", "tracer"), SPELLINGS)
def test_spellings(chain, tracer):
    rng, chain = draw.Random(f"{chain} {tracer}"), CHAINS[chain]
    norm, dtype = rng.choice(list(NORMS)), rng.choice((BF16, F16, F32))
    given = inputs(*rng.choice(((5,), (1,), (2, 3))), dtype=dtype)
    graph_module, report = replaced(tracer, Quantized(chain, norm), given)
    assert [kind for kind, _ in report.replaced] == [f"{norm}_quantized"]
    assert not report.left and not calls(graph_module)
    (call,) = quantized_calls(graph_module)
    assert not argument(call, "return_output")
    assert argument(call, "power_of_2") == ("power_of_2" in chain.__name__)
    # The chain is gone.
    names = set(map(str, targets(graph_module)))
    assert not any(word in name for name in names for word in ("amax", "clamp", "abs", "mul"))


@pytest.mark.parametrize("tracer", TRACERS)
def test_output_where_other_nodes_read_y(tracer):
    for chain, dtype in ((row, BF16), (block, F32), (static, F16)):
        module = Quantized(chain, "add_rms_norm", more=lambda y: (y, y.t().amax(0)))
        graph_module, report = replaced(tracer, module, inputs(5, dtype=dtype))
        (call,) = quantized_calls(graph_module)
        assert argument(call, "return_output") and not report.left


def test_the_sum_and_the_statistics_are_results():
    def norm(x, r, w):
        given = (x, r, w, None, None, None, None, N, 0.0, "late", 1.0, EPS, True)
        y, total, mean, rstd = torch.ops.tilenorm.add_layer_norm(*given)
        return *row(y, None), total, mean, rstd

    graph_module = torch.fx.experimental.proxy_tensor.make_fx(norm)(*(given := inputs(2, 3)[:3]))
    expected = norm(*given)
    report = replace_norms(graph_module)
    assert [kind for kind, _ in report.replaced] == ["add_layer_norm_quantized"]
    assert not calls(graph_module)
    assert_same(graph_module(*given), expected)


def test_spelled_out_norm():
    def function(x, w):
        wide = x.float()
        y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        return row(w * y.to(x.dtype), None)

    x, _, w, _ = inputs(5)
    run, _, report = by_dynamo(function, x, w)
    assert [kind for kind, _ in report.replaced] == ["rms_norm_quantized"]
    y = tilenorm.rms_norm(x, (N,), w, EPS, rounding="early")
    assert_same(run(x, w), row(y, None))


@pytest.mark.parametrize("name", LEFT)
def test_left_with_the_reason(name):
    chain, reason = LEFT[name]
    graph_module, report = replaced("dynamo", Quantized(chain), inputs(5))
    assert [kind for kind, _ in report.replaced] == ["rms_norm"]
    assert len(calls(graph_module)) == 1
    ((_, why),) = report.left
    assert reason in why


def test_a_chain_that_passes_a_gradient_on_is_left():
    x, r, w, s = inputs(5)
    given = (x.requires_grad_(), r, w, s)
    _, graph_module, report = by_dynamo(Quantized(row), *given)
    assert len(calls(graph_module)) == 1 and "passes a gradient on" in report.left[0][1]
    # Without a gradient through the codes it becomes an op, and y has its gradient.
    torch._dynamo.reset()
    module = Quantized(lambda y, s: row(y.detach(), s), more=lambda y: (y,))
    run, graph_module, report = by_dynamo(module, *given)
    assert len(quantized_calls(graph_module)) == 1 and not report.left
    dy = random(5, N, dtype=BF16, seed=4)
    (dx,) = torch.autograd.grad(run(*given)[-1], x, dy)
    (expected,) = torch.autograd.grad(tilenorm.rms_norm(x, (N,), w, EPS), x, dy)
    assert torch.equal(dx, expected)


def test_a_second_chain_of_a_norm_is_left():
    module = Quantized(lambda y, s: (*row(y, s), *static(y, s)))
    _, report = replaced("make_fx", module, inputs(5))
    assert [kind for kind, _ in report.replaced] == ["rms_norm_quantized"]
    ((_, reason),) = report.left
    assert "quantised already" in reason


@pytest.mark.parametrize("chain", [block, static])
def test_compile_with_one_graph_for_every_batch(chain):
    run = tilenorm.compile(Quantized(chain), fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 4, 7):
        given = inputs(2, rows)
        with torch._dynamo.config.patch(error_on_recompile=rows != 3):
            assert_same(run(*given), Quantized(chain, "rms_norm", tilenorm)(*given))
    kinds = {kind for kind, _ in run.tilenorm_report.replaced}
    assert kinds == {"rms_norm_quantized"} and not run.tilenorm_report.left


class Cast(torch.autograd.Function):
    """The graph of TorchDynamo holds it as one node."""

    @staticmethod
    def forward(ctx, y):
        q, scale = row(y, None)
        return q.float() * scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient.to(BF16)


def test_chain_that_the_joint_graph_alone_shows(stepwise):
    """The op returns what the backward pass reads, and the gradients keep their bits."""

    def function(x, r, w):
        return Cast.apply(F.rms_norm(x + r, (512,), w, EPS))

    given = [random(*s, dtype=BF16, seed=i) for i, s in enumerate(((4, 512), (4, 512), (512,)))]
    given = [tensor.requires_grad_() for tensor in given]
    dy = random(4, 512, seed=4)
    run = tilenorm.compile(function, fullgraph=True)
    found = run(*given)
    x, r, w = given
    expected = Cast.apply(tilenorm.add_rms_norm(x, r, (512,), w, EPS)[0])
    assert torch.equal(found, expected)
    assert [kind for kind, _ in run.tilenorm_report.folded] == ["add_rms_norm_quantized"]
    assert not run.tilenorm_report.unfolded
    gradients = (torch.autograd.grad(result, given, dy) for result in (found, expected))
    assert all(map(torch.equal, *gradients))
