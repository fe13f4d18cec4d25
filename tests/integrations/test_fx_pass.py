"""replace_norms: which ops it puts into a graph, what it leaves and why, and what it keeps."""

import operator
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support.calls import EPS, random
from tilenorm.integrations.fx import replace_norms

from . import rotations
from .graphs import (
    ATEN,
    NORMS,
    TRACERS,
    argument,
    by_hand,
    calls,
    kinds_of,
    module_of,
    step,
    targets,
)
from .modulations import BATCH, GATED, LAYER, TOKENS, N
from .rotations import HEADS, D, rotate, split
from .spellings import LAYERS, RMSES, mean, squares

ROWS, ROW = (3, N), (N,)
SAMPLES, BY_SAMPLE = (BATCH, TOKENS, N), (BATCH, N)
ROPE = torch.ops.tilenorm.rms_norm_rope.default
STAYS = "it stays behind its norm"


class Case(NamedTuple):
    """A function of tensors of these shapes, and the kinds of ops that its norms become.

    reason: a part of the reason why a norm, or what follows a norm, stays. only: the only tracer
    that makes such nodes. trained: whether the tensors require gradients, which are compared too.
    """

    function: Callable
    kinds: tuple[str, ...] = ()
    reason: str | None = None
    shapes: tuple = (ROWS, ROW)
    only: str | None = None
    trained: bool = False


def rms_of(x, w):
    return x * torch.rsqrt(squares(x) + EPS) * w


def mean_is_used(x, w):
    center = mean(x)
    return (x - center) / torch.sqrt(squares(x - center) + EPS) * w, center


def rstd_is_used(x, w):
    rstd = torch.rsqrt(squares(x) + EPS)
    return x * rstd * w, rstd


def sample_variance(x, w):
    return (x - mean(x)) / torch.sqrt(x.var(-1, keepdim=True) + EPS) * w


LEFT = {
    "output dtype": (lambda x, w: rms_of(x.bfloat16().float(), w), "output is torch.float32"),
    "16-bit sums": (lambda x, w: rms_of(x.bfloat16(), w.bfloat16()), "not float32"),
    "layout": (lambda x, w: rms_of(x[None, :, :16].mT, w[:3]), "not contiguous"),
    "rstd is used": (rstd_is_used, "use its intermediate result"),
    "mean is used": (mean_is_used, "use its intermediate result"),
    "eps beside the root": (lambda x, w: x / (squares(x).sqrt() + EPS) * w, "added to the root"),
    "variance of a sample": (sample_variance, "its result is 0.989529 times a norm"),
    "unit length": (lambda x, w: x * squares(x).mul(N).add(EPS).rsqrt(), "0.144338 times a norm"),
    "a tensor": (lambda x, w: x * torch.rsqrt(squares(x) + w[0].abs()), "its eps is a tensor"),
}
CASES = {name: Case(function, (), reason) for name, (function, reason) in LEFT.items()}


def normalized(x):
    return F.rms_norm(x, ROW).sin()


# torch.func transforms PyTorch's norm, but cannot transform tilenorm's op.
TRANSFORMED = "of another tensor class"
OF_DYNAMO = {
    "float64": (lambda x, w: F.rms_norm(x.double(), ROW), "input is float64"),
    "weight": (lambda x, w: F.rms_norm(x, ROW, w.double()), "its weight is torch.float64"),
    "grad": (lambda x, w: torch.func.grad(lambda r: normalized(r).sum())(x), TRANSFORMED),
    "vmap": (lambda x, w: torch.func.vmap(normalized)(x), TRANSFORMED),
    "jvp": (lambda x, w: torch.func.jvp(normalized, (x,), (x,))[1], TRANSFORMED),
}
CASES |= {name: Case(f, (), reason, only="dynamo") for name, (f, reason) in OF_DYNAMO.items()}

# Nothing is reported of what is no norm.
NO_NORMS = {
    "loss": lambda x, y: ((x - y) ** 2).mean(-1, keepdim=True),
    "scaled by another's": lambda x, y: x * torch.rsqrt(squares(y) + EPS),
    "of columns": lambda x, y: x * torch.rsqrt(x.square().mean(0, keepdim=True) + EPS),
    "not centred": lambda x, y: x / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + EPS),
    "centred by another's": lambda x, y: (x - mean(y)) * (x.var(-1, False, True) + EPS).rsqrt(),
    "columns by rows": lambda x, y: x * torch.rsqrt(x.square().mean(-1) + EPS),
    "another power": lambda x, y: x / (squares(x) + EPS),
}
CASES |= {name: Case(f, shapes=((N, N), (N, N))) for name, f in NO_NORMS.items()}


def written(write):
    def function(x, w):
        rstd = torch.rsqrt(squares(x) + EPS)
        write(x)
        return x * rstd * w

    return Case(function, (), "a node between its operations may write to", only="dynamo")


WRITERS = {
    "method": lambda x: x.mul_(2),
    "out": lambda x: torch.sin(x, out=x),
    "in place, by name": lambda x: F.relu(x, inplace=True),
    "in place, by position": lambda x: F.relu(x, True),
    "assigned": lambda x: x.__setitem__(0, 1),
    "added": lambda x: x.__iadd__(1),
}
CASES |= {f"written, {name}": written(write) for name, write in WRITERS.items()}


def centred_rows(x, w):
    center = mean(x)
    return RMSES["** -0.5"](x - center) * w, center


def used_twice(x, w):
    y = F.rms_norm(x, ROW, eps=EPS)
    return y * w, y.sin()


# What is around the norm stays, with no reason.
AROUND = {
    "centred rows": centred_rows,
    "used twice": used_twice,
    "gate of the norm": lambda x, w: (y := F.rms_norm(x, ROW)) * torch.sigmoid(y),
    "gate of a head": lambda x, w: F.rms_norm(x, ROW) * torch.sigmoid(x[:, :1]),
    "gate used again": lambda x, w: (F.rms_norm(x, ROW) * (gate := torch.sigmoid(x)), gate),
}
CASES |= {name: Case(function, ("rms_norm",)) for name, function in AROUND.items()}

# A sum, and whether the op of its norm computes it.
SUMS = {
    "of equals": (lambda x, r: x + r, True),
    "by a function": (lambda x, r: torch.add(r, other=x), True),
    "with itself": (lambda x, r: x + x, True),
    "scaled": (lambda x, r: torch.add(x, r, alpha=2), False),
    "of a row": (lambda x, r: x + r[0], False),
    "of other dtypes": (lambda x, r: x + r.bfloat16(), False),
    "transposed": (lambda x, r: (x.t().contiguous() + r.t().contiguous()).t(), False),
}


def with_sum(function, *kinds):
    return Case(function, kinds, None, (ROWS, ROWS, ROW), "dynamo", True)


def normed_sum(name):
    add, fused = SUMS[name]

    def function(x, r, w):
        total = add(x, r)
        return F.rms_norm(total, ROW, w, eps=EPS), total * 2

    return with_sum(function, "add_rms_norm" if fused else "rms_norm")


def used_before_the_weight(x, r, w):
    """The fused op would stand at the sum's place, before its weight is computed."""
    total = x + r
    used = total.sin()
    return F.rms_norm(total, ROW, w * 2), used


def written_after_the_sum(x, r, w):
    total = x + r
    total += 1
    return F.rms_norm(total, ROW, w), total


def gradients_off_between(x, r, w):
    total = x + r
    with torch.no_grad():
        return F.rms_norm(total, ROW, w), total + w


def two_norms(x, r, w):
    total = x + r
    return F.rms_norm(total, ROW, w), F.layer_norm(total, ROW, w)


CASES |= {f"sum {name}": normed_sum(name) for name in SUMS}
CASES |= {
    f.__name__: with_sum(f, "rms_norm")
    for f in (used_before_the_weight, written_after_the_sum, gradients_off_between)
}
CASES["two norms"] = with_sum(two_norms, "add_rms_norm", "layer_norm")
CASES["var_mean of a sum"] = with_sum(
    lambda x, r, w: LAYERS["var_mean"](x + r) * w + w, "add_layer_norm"
)


def normed(x):
    return F.layer_norm(x, (N,), eps=EPS)


def modulated_twice(x, scale):
    y = normed(x)
    return y * (1 + scale[:, None]), y * (1 - scale[:, None])


def wide(x, scale):
    x, scale = x.repeat(1, 1, 200), scale.repeat(1, 200)
    return F.layer_norm(x, (200 * N,), eps=EPS) * (1 + scale[:, None])


def by_position(x, scale):
    return normed(x) * (1 + scale[:1, None].expand(1, TOKENS, N))


def modulated(function, reason=None, kind="layer_norm"):
    return Case(function, (kind,), reason, (SAMPLES, BY_SAMPLE))


# Modulations that stay.
CASES |= {
    "by position": modulated(by_position, "1 + scale is"),
    "two of them": modulated(modulated_twice, "other nodes use"),
    "in float64": modulated(lambda x, s: normed(x) * (1 + s[:, None].double())),
    "not one": modulated(lambda x, s: normed(x) * (2 + s[:, None]) + s[:, None]),
    "no scale": modulated(lambda x, s: normed(x) + s[:, None]),
    "offset": modulated(
        lambda x, s: RMSES["** -0.5"](x) * (1 + s[0]) * (1 + s[:, None]),
        *("offset of the weight", "rms_norm"),
    ),
    "too wide": modulated(wide, "the kernels take up to"),
}

# What stands between a gated sum and its norm, and what the op, whose arguments may come after the
# sum, computes then.
PLACES = {
    "used before": (lambda s, scale: (s.sin(), scale.cos()), LAYER),
    "used after": (lambda s, scale: (None, scale.cos()), GATED),
    "scale is written": (lambda s, scale: (None, scale.mul_(2)), LAYER),
    "scale of the sum": (lambda s, scale: (None, s[:, 0]), LAYER),
}


def gated_sum(between):
    def function(x, residual, gate, scale):
        s = residual + x * gate[:, None]
        used, scale = between(s, scale)
        return normed(s) * (1 + scale[:, None]), s.cos(), used

    return function


CASES |= {
    name: Case(gated_sum(between), (kind,), None, (SAMPLES, SAMPLES, BY_SAMPLE, BY_SAMPLE))
    for name, (between, kind) in PLACES.items()
}


def query(x, w):
    return rotations.NORMS["Qwen 3"](split(x), w).transpose(1, 2)


def query_is_used(x, w, cos, sin):
    q = query(x, w)
    return rotate(q, cos, sin), q


def partly(x, w, cos, sin):
    q = query(x, w)
    return torch.cat((rotate(q[..., : D // 2], cos[..., : D // 2], sin[..., : D // 2]), q), -1)


def in_pairs(x, w, cos, sin):
    q = query(x, w)
    turned = torch.stack((-q[..., 1::2], q[..., 0::2]), -1).flatten(-2)
    return q * cos + turned * sin


def turned_back(x, w, cos, sin):
    q = query(x, w)
    half = torch.cat((q[..., D // 2 :], -q[..., : D // 2]), -1)
    return q * cos + half * sin


def two_tables(x, w, cos, sin):
    return rotate(query(x, w), cos, sin), rotate(query(x * 2, w), cos * 2, sin)


def two_weights(x, w, cos, sin):
    other = rotations.NORMS["no weight"](split(x), None).transpose(1, 2)
    return rotate(query(x, w), cos, sin), rotate(other, cos, sin)


def one_query(x, w, cos, sin):
    return rotate(query(x, w), cos, sin)


def by_head(x, w, cos, sin):
    return one_query(x, w, cos.expand(BATCH, HEADS, -1, D), sin)


TABLE = (1, 1, rotations.TOKENS, D)
HEADS_AND_TABLES = (BATCH, rotations.TOKENS, HEADS * D), (D,), TABLE, TABLE


def rotated(function, kind="rms_norm", reason=None, count=1):
    return Case(function, (kind,) * count, reason, HEADS_AND_TABLES)


CASES |= {
    "two tables": rotated(two_tables, "rms_norm_rope", count=2),
    "two weights": rotated(two_weights, "rms_norm_rope", count=2),
    "query is used": rotated(query_is_used, reason="other nodes use its intermediate results"),
    "rotated partly": rotated(partly),
    "in pairs": rotated(in_pairs),
    "turned back": rotated(turned_back),
    "tables by head": rotated(by_head, reason="its cos and sin are"),
    "weights by head": rotated(
        lambda x, w, cos, sin: one_query(x, w.expand(HEADS, D), cos, sin), reason="by heads"
    ),
    "trained tables": rotated(one_query, reason="needs a gradient")._replace(
        only="dynamo", trained=True
    ),
}


TRACED = [
    (name, tracer)
    for name, case in CASES.items()
    for tracer in ("dynamo", "make_fx")
    if case.only in (None, tracer)
]


@pytest.mark.parametrize("name, tracer", TRACED)
def test_case(name, tracer, dynamo):
    function, kinds, reason, shapes, _, trained = CASES[name]
    tensors = [random(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    leaves = [t.clone().requires_grad_(trained) for t in tensors]
    replaced = TRACERS[tracer](module_of(function), *leaves, rounds_once=True, rotation=True)
    graph_module, report = replaced.graph_module, replaced.report
    assert kinds_of(report) == [*kinds]
    assert len(calls(graph_module, ROPE)) == kinds.count("rms_norm_rope")
    assert len(report.left) == (reason is not None)
    for node, why in report.left:
        assert reason in why and why.startswith(STAYS) == bool(kinds)
        assert kinds or node in [n.name for n in graph_module.graph.nodes]
        assert f"{node} is not replaced: {why}" in str(report)
    got, expected = (step(f, tensors, None if trained else 0) for f in (replaced.run, function))
    torch.testing.assert_close(got, expected, **({} if kinds else {"rtol": 0, "atol": 0}))


# A norm of float32 rows and what casts its output. Whether the op does that.
CASTS = {
    "rms": (lambda x, w: F.rms_norm(x, ROW, w, EPS).bfloat16().sin(), True),
    "layer": (lambda x, w: F.layer_norm(x, ROW, w).to(torch.float16), True),
    "spelled out": (lambda x, w: rms_of(x, w).type(torch.bfloat16), True),
    "of a sum": (lambda x, w: F.rms_norm(x + x.sin(), ROW, w, EPS).half(), True),
    "used twice": (lambda x, w: (lambda y: (y, y.bfloat16()))(F.rms_norm(x, ROW, w, EPS)), False),
    "wider": (lambda x, w: F.rms_norm(x, ROW, w, EPS).double(), False),
    "not rounded": (lambda x, w: F.rms_norm(x, ROW, w, EPS).int(), False),
    "of 16 bits": (lambda x, w: F.rms_norm(x.half(), ROW, w.half(), EPS).bfloat16(), False),
}


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("name", CASTS)
def test_a_float32_norm_rounds_to_16_bits_itself(name, tracer, dynamo):
    function, folds = CASTS[name]
    tensors = [random(*ROWS), random(*ROW, seed=1)]
    leaves = [t.clone().requires_grad_() for t in tensors]
    replaced = TRACERS[tracer](module_of(function), *leaves)
    (call,) = calls(replaced.graph_module)
    expected = step(function, tensors)
    assert argument(call, "out_dtype") == (expected[0].dtype if folds else None)
    for got, wanted in zip(step(replaced.run, tensors), expected, strict=True):
        torch.testing.assert_close(got, wanted)


class Block(nn.Module):
    """An RMSNorm before a linear layer, a LayerNorm after it, and an RMSNorm of a sum."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.RMSNorm(N, eps=EPS), nn.LayerNorm(N)
        self.linear, self.last = nn.Linear(N, N), nn.RMSNorm(N, eps=EPS)

    def forward(self, x):
        x = x + self.after(self.linear(self.before(x)).relu())
        return self.last(x), x.relu()


@pytest.mark.parametrize("tracer", TRACERS)
def test_replaces_every_norm_and_no_other_node(tracer, dynamo):
    module, x = Block(), random(3, N)
    names = []
    excluded = TRACERS[tracer](module, x, where=lambda node: names.append(node.name))
    assert excluded.report.left == tuple((name, "where() excludes it") for name in names)
    assert str(excluded.report).startswith("0 norms replaced, 3 not replaced")
    dynamo.reset()
    replaced = TRACERS[tracer](module, x)
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


@pytest.mark.parametrize("function", [rms_of, lambda x, w: F.layer_norm(x, (N,), w)])
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


def symbolic_width():
    return make_fx(rms_of, tracing_mode="symbolic")(random(3, N), random(N))


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


# A function of a joint graph, whose first two tensors are trained; what is replaced, and why the
# rest stays.
JOINT = {
    "modulated": (
        lambda x, scale: normed(x) * (1 + scale[:, None]),
        (SAMPLES, BY_SAMPLE),
        ["layer_norm", "layer_norm_backward"],
        f"{STAYS}, whose results other nodes use too",
    ),
    "rotated": (one_query, HEADS_AND_TABLES, [], "other nodes (perhaps of its gradient) use"),
}


@pytest.mark.parametrize("name", JOINT)
def test_a_joint_graph_keeps_what_follows_a_norm(name):
    function, shapes, kinds, reason = JOINT[name]
    tensors = [random(*shape, seed=i).requires_grad_(i < 2) for i, shape in enumerate(shapes)]

    def joint(*tensors):
        y = function(*tensors)
        return y, *torch.autograd.grad(y, tensors[:2], torch.ones_like(y))

    graph_module = make_fx(joint)(*tensors)
    report = replace_norms(graph_module, rotation=True)
    graph_module.graph.lint()
    assert kinds_of(report) == kinds and len(report.left) == 1
    assert reason in report.left[0][1]
    torch.testing.assert_close(graph_module(*tensors), joint(*tensors))
