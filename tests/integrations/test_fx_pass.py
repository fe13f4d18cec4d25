"""replace_norms: which nodes it replaces and keeps, its report, and its errors."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from tilenorm.integrations.fx import replace_norms

from ..ops.helpers import EPS, random
from .graphs import ATEN, NORMS, by_dynamo, by_export, by_hand, by_make_fx, calls, targets

BF16, F32 = torch.bfloat16, torch.float32
N = 40


class Block(nn.Module):
    """An RMSNorm before a linear layer, a LayerNorm after it, and an RMSNorm of a sum."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.RMSNorm(N, eps=EPS), nn.LayerNorm(N)
        self.linear, self.last = nn.Linear(N, N), nn.RMSNorm(N, eps=EPS)

    def forward(self, x):
        x = x + self.after(self.linear(self.before(x)).relu())
        return self.last(x), x.relu()


def rms_norm_in_operations(x, weight):
    x_hat = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return x_hat * weight


@pytest.mark.parametrize("tracer", [by_dynamo, by_export, by_make_fx])
def test_replaces_every_norm_and_no_other_node(tracer, dynamo):
    module, x = Block(), random(3, N)
    names = []
    excluded = tracer(module, x, where=lambda node: names.append(node.name))
    assert excluded.report.left == tuple((name, "where() excludes it") for name in names)
    assert str(excluded.report).startswith("0 norms replaced, 3 not replaced")
    dynamo.reset()
    replaced = tracer(module, x)
    kinds = [kind for kind, _ in replaced.report.replaced]
    assert kinds == ["rms_norm", "layer_norm", "add_rms_norm"]
    assert len(calls(replaced.graph_module)) == 3
    norms = (*NORMS, operator.getitem)
    others = [t for t in targets(replaced.graph_module) if t not in norms]
    assert {F.linear, "relu"} <= {*others} or {ATEN.relu.default} <= {*others}
    original = iter(targets(excluded.graph_module))
    assert all(target in original for target in others)  # `in` consumes: the order is the same
    for got, expected in zip(replaced.run(x), module(x), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    "function", [rms_norm_in_operations, lambda x, w: F.layer_norm(x, (N,), w)]
)
def test_metadata_is_kept(function):
    graph_module = make_fx(function, tracing_mode="fake")(random(3, N), random(N))
    own = {"stack_trace": "here", "nn_module_stack": {"norm": "its"}, "custom": 1}
    for node in graph_module.graph.nodes:
        node.meta |= own
    output = graph_module.graph.output_node().args[0]
    name, meta = output.name, dict(output.meta)
    replace_norms(graph_module)
    (call,) = calls(graph_module)
    output = graph_module.graph.output_node().args[0]
    assert (output.name, output.meta) == (name, meta)
    assert own.items() <= call.meta.items()


def test_norm_inside_a_checkpoint(dynamo):
    def function(x, weight):
        return checkpoint(rms_norm_in_operations, x, weight, use_reentrant=False)

    x, weight = random(3, N).requires_grad_(), random(N)
    replaced = by_dynamo(function, x, weight)
    ((kind, name),) = replaced.report.replaced
    assert kind == "rms_norm"
    assert "." in name
    (dx,) = torch.autograd.grad(replaced.run(x, weight).sin().sum(), x)
    y = rms_norm_in_operations(x, weight)
    torch.testing.assert_close(dx, torch.autograd.grad(y.sin().sum(), x)[0])


def normalized(x):
    return F.rms_norm(x, (N,)).sin()


TRANSFORMS = {
    "grad": lambda x: torch.func.grad(lambda row: normalized(row).sum())(x),
    "vmap": lambda x: torch.func.vmap(normalized)(x),
    "jvp": lambda x: torch.func.jvp(normalized, (x,), (x,))[1],
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_norm_inside_a_functorch_transform_is_not_replaced(name, dynamo):
    """torch.func transforms PyTorch's norm, but cannot transform tilenorm's op."""
    replaced = by_dynamo(TRANSFORMS[name], random(3, N))
    ((_, reason),) = replaced.report.left
    assert "of another tensor class" in reason


def rstd_used(x, weight):
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return x * rstd * weight, rstd


NOT_REPLACED = {
    "float64": (lambda x, w: F.rms_norm(x.double(), (N,)), "input is float64"),
    "output dtype": (
        lambda x, w: rms_norm_in_operations(x.bfloat16().float(), w),
        "output is torch.float32",
    ),
    "16-bit sums": (lambda x, w: rms_norm_in_operations(x.bfloat16(), w.bfloat16()), "not float32"),
    "layout": (lambda x, w: rms_norm_in_operations(x.t().contiguous().t(), w), "not contiguous"),
    "rstd is used": (rstd_used, "use its intermediate result"),
    "weight": (lambda x, w: F.rms_norm(x, (N,), w.double()), "its weight is torch.float64"),
}


@pytest.mark.parametrize("name", NOT_REPLACED)
def test_report_gives_the_reason_for_a_norm_that_is_not_replaced(name, dynamo):
    function, expected_reason = NOT_REPLACED[name]
    x, weight = random(3, N), random(N)
    replaced = by_dynamo(function, x, weight)
    assert not calls(replaced.graph_module)
    ((node, reason),) = replaced.report.left
    assert expected_reason in reason
    assert node in [n.name for n in replaced.graph_module.graph.nodes]
    assert f"{node} is not replaced: {reason}" in str(replaced.report)


def symbolic_width():
    return make_fx(rms_norm_in_operations, tracing_mode="symbolic")(random(3, N), random(N))


def whole_tuple():
    op = ATEN.native_layer_norm.default
    return by_hand(lambda call, x: call(op, x, [N], None, None, EPS), random(3, N))


GRAPHS = {
    "is symbolic": symbolic_width,
    "no shape and dtype in its metadata": lambda: symbolic_trace(lambda x: F.layer_norm(x, (N,))),
    "uses the tuple of its results": whole_tuple,
}


@pytest.mark.parametrize("expected_reason", GRAPHS)
def test_reason_for_a_norm_of_a_graph_that_dynamo_does_not_make(expected_reason):
    ((_, reason),) = replace_norms(GRAPHS[expected_reason]()).left
    assert expected_reason in reason


SUMS = {
    "of equals": (lambda x, r: x + r, True),
    "by a function": (lambda x, r: torch.add(r, other=x), True),
    "with itself": (lambda x, r: x + x, True),
    "scaled": (lambda x, r: torch.add(x, r, alpha=2), False),
    "of a row": (lambda x, r: x + r[0], False),
    "of other dtypes": (lambda x, r: x + r.bfloat16(), False),
    "transposed": (lambda x, r: (x.t().contiguous() + r.t().contiguous()).t(), False),
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_sum_is_fused_with_its_norm(name, norm, dynamo):
    add, fused = SUMS[name]

    def function(x, residual, weight):
        total = add(x, residual)
        return getattr(F, norm)(total, (N,), weight, eps=EPS), total * 2

    tensors = random(3, N), random(3, N, seed=1), random(N, seed=2)
    replaced = by_dynamo(function, *tensors)
    ((kind, _),) = replaced.report.replaced
    assert kind == (f"add_{norm}" if fused else norm)
    leaves = [[t.clone().requires_grad_() for t in tensors] for _ in range(2)]
    results = [run(*inputs) for run, inputs in zip((replaced.run, function), leaves, strict=True)]
    for outputs in results:
        sum(y.sin().sum() for y in outputs).backward()
    torch.testing.assert_close(results[0], results[1])
    for a, b in zip(*leaves, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def two_norms(total, weight):
    return F.rms_norm(total, (N,), weight), F.layer_norm(total, (N,), weight)


def weight_after_the_sum(total, weight):
    """The fused op would stand at the sum's place, before its weight is computed."""
    used = total.sin()
    return F.rms_norm(total, (N,), weight * 2), used


def written_after_the_sum(total, weight):
    total += 1
    return F.rms_norm(total, (N,), weight), total


def gradients_off_between(total, weight):
    with torch.no_grad():
        return F.rms_norm(total, (N,), weight), total


AFTER = {
    two_norms: ["add_rms_norm", "layer_norm"],
    weight_after_the_sum: ["rms_norm"],
    written_after_the_sum: ["rms_norm"],
    gradients_off_between: ["rms_norm"],
}


@pytest.mark.parametrize("function", AFTER)
def test_what_follows_a_sum_may_prevent_fusion(function, dynamo):
    def whole(x, residual, weight):
        return function(x + residual, weight)

    tensors = random(3, N).requires_grad_(), random(3, N, seed=1), random(N)
    replaced = by_dynamo(whole, *tensors)
    assert [kind for kind, _ in replaced.report.replaced] == AFTER[function]
    got, expected = replaced.run(*tensors), whole(*tensors)
    torch.testing.assert_close(got, expected)
    assert [t.requires_grad for t in got] == [t.requires_grad for t in expected]


WRITERS = {
    "method": lambda x: x.mul_(2),
    "out": lambda x: torch.sin(x, out=x),
    "in place, by name": lambda x: F.relu(x, inplace=True),
    "in place, by position": lambda x: F.relu(x, True),
    "assigned": lambda x: x.__setitem__(0, 1),
    "added": lambda x: x.__iadd__(1),
}


@pytest.mark.parametrize("name", WRITERS)
def test_write_between_the_norms_nodes_prevents_replacement(name, dynamo):
    def function(x, weight):
        rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        WRITERS[name](x)
        return x * rstd * weight

    x, weight = random(3, N), random(N)
    replaced = by_dynamo(function, x.clone(), weight)
    ((_, reason),) = replaced.report.left
    assert reason == "a node between its operations may write to a tensor"
    assert torch.equal(replaced.run(x.clone(), weight), function(x.clone(), weight))
