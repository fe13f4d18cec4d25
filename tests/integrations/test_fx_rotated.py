"""The FX pass on norms of queries and keys with the rotary embedding behind them."""

from random import Random

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import tilenorm
from tilenorm.integrations.fx import replace_norms

from ..ops.helpers import name_of, random, slow
from .graphs import TRACERS, by_dynamo, by_make_fx, calls
from .rotations import BATCH, HEADS, NORMS, TOKENS, D, drawn, rotate, split
from .spellings import module_of
from .stepwise import counted
from .test_fx_modulated import assert_no_less_accurate, kinds_of

BF16, F32 = torch.bfloat16, torch.float32
ROPE = torch.ops.tilenorm.rms_norm_rope.default
BACKWARD = torch.ops.tilenorm.rms_norm_rope_backward.default
TWO = ["rms_norm_rope"] * 2


def step(function, tensors):
    """Outputs, and the gradients of all but the tables."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors[:3]]
    outputs = function(*leaves, *tensors[3:])
    incoming = [random(*y.shape, dtype=y.dtype, seed=9 + i) for i, y in enumerate(outputs)]
    grads = torch.autograd.grad(outputs, leaves, incoming, materialize_grads=True)
    return [*(y.detach() for y in outputs), *grads]


@pytest.mark.parametrize("examples", [20, pytest.param(120, marks=pytest.mark.slow)])
def test_drawn_spellings_are_one_op(examples):
    """With the same bits and strides, or, where the graph rounds elsewhere, a smaller error."""
    rng = Random(examples)
    for _ in range(examples):
        name, function, tensors, exact = drawn(rng)
        strict = by_make_fx(module_of(function), *tensors, rotation=True)
        once = by_make_fx(module_of(function), *tensors, rotation=True, rounds_once=True)
        assert kinds_of(once.report) == TWO, f"{name}: {once.report}"
        assert len(calls(once.graph_module, ROPE)) == 1 and not once.report.left
        assert kinds_of(strict.report) == (TWO if exact else ["rms_norm"] * 2), name
        assert len(strict.report.left) == (0 if exact else 2)
        expected = function(*tensors)
        for got, like in zip(strict.run(*tensors), expected, strict=True):
            assert got.dtype == like.dtype and got.stride() == like.stride(), name
            if got.dtype == F32:
                torch.testing.assert_close(got, like)
            else:
                assert torch.equal(got, like), name
        exactly = step(function, [t.double() for t in tensors])
        pairs = step(once.run, tensors), step(function, tensors)
        assert_no_less_accurate(*pairs, exactly, name)


def model(name: str, dtype: torch.dtype):
    pytest.importorskip("transformers")
    from .model_rows import arguments, built

    module = built(name).to(dtype)
    return module, arguments(module, name)


@pytest.mark.parametrize(
    "name, dtype",
    [("qwen3", BF16), ("gemma3_text", BF16), ("olmo2", F32)]
    + slow(("qwen3", F32), ("gemma3_text", F32), ("olmo2", BF16)),
    ids=name_of,
)
def test_models_of_transformers(name, dtype, dynamo):
    """Both layers. In 16 bits, Qwen 3 alone rounds as tilenorm's op can."""
    module, given = model(name, dtype)
    exact = dtype == F32 or name == "qwen3"
    for once in (False, True):
        graphs = []

        def backend(graph_module, _, graphs=graphs, once=once):
            report = replace_norms(graph_module, rotation=True, rounds_once=once)
            graph_module.graph.lint()
            graphs.append((graph_module, report))
            return graph_module

        dynamo.reset()
        with torch.no_grad():
            got = torch.compile(module, backend=backend)(**given)[0]
            expected = module(**given)[0]
        count = 2 if exact or once else 0
        assert sum(len(calls(graph_module, ROPE)) for graph_module, _ in graphs) == count
        reasons = [why for _, report in graphs for _, why in report.left]
        assert len(reasons) == (0 if count else 4)
        assert all("it rounds to 16 bits where tilenorm's op does not" in why for why in reasons)
        if dtype == BF16 and not once:
            assert torch.equal(got, expected)
        else:
            atol = (2**-5 if dtype == BF16 else 1e-5) * expected.abs().max().item()
            torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def test_compile_takes_rotations_where_it_is_asked_to(stepwise, dynamo):
    """Without that, it leaves norms of heads to Inductor, and tells so."""
    module, given = model("qwen3", BF16)
    run = tilenorm.compile(module)
    run(**given)
    heads = [why for _, why in run.tilenorm_report.left]
    assert heads.count("Inductor fuses a norm of 16 elements with its neighbours") == 4
    dynamo.reset()
    run = tilenorm.compile(module, rotation=True)
    y = run(**given)[0]
    y.sum().backward()
    assert kinds_of(run.tilenorm_report) == [*TWO, *TWO]
    assert counted(stepwise.forward[-1].graph, ROPE) == 2
    assert counted(stepwise.backward[-1].graph, BACKWARD) == 2
    grads = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    module(**given)[0].sum().backward()
    for name, p in module.named_parameters():
        if p.grad is not None:
            atol = 2**-4 * p.grad.abs().max().item()
            torch.testing.assert_close(grads[name], p.grad, rtol=2**-4, atol=atol)
    with pytest.raises(TypeError, match="argument 'rotation' takes a bool, got int"):
        tilenorm.compile(nn.Module(), rotation=1)


def query(x, w):
    return NORMS["Qwen 3"](split(x), w).transpose(1, 2)


def used(x, w, cos, sin):
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


OTHERS = {
    "alone": (lambda x, w, cos, sin: rotate(query(x, w), cos, sin), TWO[:1], None),
    "used": (used, ["rms_norm"], "other nodes use its intermediate results"),
    "partly": (partly, ["rms_norm"], None),
    "in pairs": (in_pairs, ["rms_norm"], None),
    "back": (turned_back, ["rms_norm"], None),
    "by head": (
        lambda x, w, cos, sin: rotate(query(x, w), cos.expand(BATCH, HEADS, TOKENS, D), sin),
        *(["rms_norm"], "its cos and sin are"),
    ),
    "two tables": (
        lambda x, w, cos, sin: (
            rotate(query(x, w), cos, sin),
            rotate(query(x * 2, w), cos * 2, sin),
        ),
        *(TWO, None),
    ),
    "another weight": (
        lambda x, w, cos, sin: (
            rotate(query(x, w), cos, sin),
            rotate(NORMS["no weight"](split(x), None).transpose(1, 2), cos, sin),
        ),
        *(TWO, None),
    ),
    "weights by head": (
        lambda x, w, cos, sin: rotate(query(x, w.expand(HEADS, D)), cos, sin),
        *(["rms_norm"], "by heads"),
    ),
}


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("name", OTHERS)
def test_other_rotations(name, tracer, dynamo):
    function, kinds, reason = OTHERS[name]
    tensors = random(BATCH, TOKENS, HEADS * D), random(D, seed=1)
    tensors += tuple(random(1, 1, TOKENS, D, seed=seed) for seed in (2, 3))
    replaced = TRACERS[tracer](module_of(function), *tensors, rotation=True)
    assert kinds_of(replaced.report) == kinds
    reasons = [why for _, why in replaced.report.left]
    assert len(reasons) == (reason is not None) and all(reason in why for why in reasons)
    assert len(calls(replaced.graph_module, ROPE)) == sum("rope" in kind for kind in kinds)
    torch.testing.assert_close(replaced.run(*tensors), function(*tensors))


def test_tables_that_need_a_gradient(dynamo):
    tensors = random(BATCH, TOKENS, HEADS * D), random(D, seed=1)
    tensors += tuple(random(1, 1, TOKENS, D, seed=seed).requires_grad_() for seed in (2, 3))
    replaced = by_dynamo(OTHERS["alone"][0], *tensors, rotation=True)
    assert kinds_of(replaced.report) == ["rms_norm"]
    ((_, reason),) = replaced.report.left
    assert "needs a gradient" in reason


def test_one_graph_for_every_batch(dynamo):
    def function(x, w, cos, sin):
        q = NORMS["OLMo 2"](x, w).view(*x.shape[:2], -1, D).transpose(1, 2)
        return rotate(q, cos[:, None], sin[:, None])

    run, sizes, count = None, ((2, 5), (3, 4), (1, 9)), []
    for batch, tokens in sizes:
        tensors = random(batch, tokens, HEADS * D), random(HEADS * D, seed=1)
        tensors += tuple(random(1, tokens, D, seed=seed) for seed in (2, 3))
        if run is None:
            for t in (*tensors[:1], *tensors[2:]):
                torch._dynamo.mark_dynamic(t, 1)
            torch._dynamo.mark_dynamic(tensors[0], 0)
            run = by_dynamo(function, *tensors, rotation=True)
            count.append(len(calls(run.graph_module, ROPE)))
        torch.testing.assert_close(run.run(*tensors), function(*tensors))
    assert count == [1]


def test_a_joint_graph_keeps_its_norms():
    def joint(x, w, cos, sin, dy):
        y = rotate(query(x, w), cos, sin)
        return y, *torch.autograd.grad(y, (x, w), dy)

    tensors = [random(BATCH, TOKENS, HEADS * D), random(D, seed=1)]
    tensors += [random(1, 1, TOKENS, D, seed=seed) for seed in (2, 3)]
    leaves = [t.requires_grad_(i < 2) for i, t in enumerate(tensors)]
    dy = random(BATCH, HEADS, TOKENS, D, seed=4)
    graph_module = make_fx(joint)(*leaves, dy)
    replace_norms(graph_module, rotation=True)
    graph_module.graph.lint()
    torch.testing.assert_close(graph_module(*leaves, dy), joint(*leaves, dy))
