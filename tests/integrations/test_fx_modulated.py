"""The FX pass on norms that are scaled and shifted by group, as diffusers writes them."""

from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx

import tilenorm
from tilenorm.integrations.fx import replace_norms

from ..ops.helpers import EPS, name_of, random
from .graphs import TRACERS, by_dynamo, by_make_fx
from .modulations import BATCH, GATED, LAYER, MODELS, TOKENS, N, drawn, model_and_inputs
from .spellings import module_of
from .stepwise import counted

BF16, F32 = torch.bfloat16, torch.float32
OPS = [getattr(torch.ops.tilenorm, f"modulated_{norm}_norm").default for norm in ("rms", "layer")]
BACKWARD = torch.ops.tilenorm.modulated_norm_backward.default


def kinds_of(report) -> list[str]:
    return [kind for kind, _ in report.replaced]


def step(function, tensors) -> list[torch.Tensor]:
    """Outputs and gradients."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    incoming = [random(*y.shape, dtype=y.dtype, seed=9 + i) for i, y in enumerate(outputs)]
    grads = torch.autograd.grad(outputs, leaves, incoming, materialize_grads=True)
    return [*(y.detach() for y in outputs), *grads]


def assert_no_less_accurate(got, eager, exact, label):
    """Of each tensor, in the mean of squares, and with a unit in the last place for the largest."""
    for i, (a, b, c) in enumerate(zip(got, eager, exact, strict=True)):
        errors = [(t.double() - c).square().mean().sqrt().item() for t in (a, b)]
        size = c.square().mean().sqrt().item()
        assert errors[0] <= 1.1 * errors[1] + 2**-22 * size, f"{label}: result {i}: {errors}"
        unit = 2 * torch.finfo(a.dtype).eps * c.abs().max().item()
        assert (a.double() - c).abs().max().item() <= unit + 2 * (b - c).abs().max().item()


@pytest.mark.parametrize("examples", [20, pytest.param(120, marks=pytest.mark.slow)])
def test_drawn_spellings_are_one_op_that_is_no_less_accurate(examples):
    rng, kinds = Random(examples), set()
    for _ in range(examples):
        name, op, function, tensors = drawn(rng)
        replaced = by_make_fx(module_of(function), *tensors, rounds_once=True)
        assert kinds_of(replaced.report) == [op], f"{name}: {replaced.report}"
        assert not replaced.report.left
        kinds.add(op)
        exact = step(function, [t.double() for t in tensors])
        got, eager = step(replaced.run, tensors), step(function, tensors)
        assert [t.dtype for t in got] == [t.dtype for t in eager]
        assert_no_less_accurate(got, eager, exact, name)
        strict = by_make_fx(module_of(function), *tensors)
        for a, b in zip(strict.run(*tensors), function(*tensors), strict=True):
            unit = 4 * torch.finfo(F32).eps if a.dtype == F32 else 0
            close = torch.isclose(a, b, rtol=unit, atol=unit * 8)
            # The product with the gate, and sums in float32, are not rounded: a tie may fall
            # to the other side.
            assert close.double().mean() > 0.99, f"{name}: {strict.report}"
    assert len(kinds) == 6


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
@pytest.mark.parametrize("name", MODELS)
def test_blocks_as_diffusers_spells_them(name, dtype, tracer, dynamo):
    module, x, emb = model_and_inputs(name, dtype)
    replaced = TRACERS[tracer](module, x, emb, rounds_once=True)
    expected, kinds = MODELS[name][1], kinds_of(replaced.report)
    if name == "Wan" and dtype == F32:  # its casts to float32 are no longer around its sums
        plain = [[k.split(" with")[0].removeprefix("add_") for k in s] for s in (kinds, expected)]
        assert plain[0] == plain[1]
    else:
        assert [k.removeprefix("add_") for k in kinds] == expected
    assert not replaced.report.left
    with torch.no_grad():
        got, expected = replaced.run(x, emb), module(x, emb)
    tolerance = 1e-5 if dtype == F32 else 2**-5
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize("name", ["DiT", "Wan"])
def test_compiled_blocks(name, backend, stepwise):
    """Inductor's own code rounds once too. Other backends round as eager code does."""
    module, x, emb = model_and_inputs(name, BF16)
    x.requires_grad_()
    run = tilenorm.compile(module, where=lambda node: True, backend=backend, fullgraph=True)
    y = run(x, emb)
    dy, leaves = random(*y.shape, dtype=BF16, seed=4), (x, *module.parameters())
    grads = torch.autograd.grad(y, leaves, dy)
    report = run.tilenorm_report
    expected = MODELS[name][1]
    if backend == "inductor":
        assert kinds_of(report) == expected and not report.left
        assert sum(counted(stepwise.forward[0].graph, op) for op in OPS) == sum(
            "modulated" in kind for kind in expected
        )
        assert counted(stepwise.backward[0].graph, BACKWARD) == sum(
            "modulated" in kind for kind in expected
        )
    else:
        left = {"DiT": 5, "Wan": 1}[name]
        assert [reason for _, reason in report.left] == [ROUNDED] * left
        assert len(report.replaced) == len(expected)
    for got, grad in zip(grads, torch.autograd.grad(module(x, emb), leaves, dy), strict=True):
        torch.testing.assert_close(got, grad, rtol=2**-4, atol=2**-4 * grad.abs().max().item())


def test_inductor_that_emulates_casts_keeps_the_roundings(stepwise):
    module, x, emb = model_and_inputs("DiT", BF16)
    options = {"emulate_precision_casts": True}
    run = tilenorm.compile(module, where=lambda node: True, options=options)
    run(x, emb)
    assert {reason for _, reason in run.tilenorm_report.left} == {ROUNDED}


STAYS = "it stays behind its norm"
ROUNDED = f"{STAYS}: each of its operations rounds to 16 bits, and tilenorm's op rounds once"


def normed(x):
    return F.layer_norm(x, (N,), eps=EPS)


def twice(x, scale):
    y = normed(x)
    return y * (1 + scale[:, None]), y * (1 - scale[:, None])


LEFT = {
    "by position": (
        lambda x, s: normed(x) * (1 + s[:1, None].expand(1, TOKENS, N)),
        "1 + scale is",
    ),
    "two of them": (twice, "other nodes use"),
    "float64": (lambda x, s: normed(x) * (1 + s[:, None].double()), None),
    "not one": (lambda x, s: normed(x) * (2 + s[:, None]) + s[:, None], None),
    "no scale": (lambda x, s: normed(x) + s[:, None], None),
    "offset": (
        lambda x, s: (
            x * torch.rsqrt(x.square().mean(-1, True) + EPS) * (1 + s[0]) * (1 + s[:, None])
        ),
        "offset of the weight",
    ),
}


@pytest.mark.parametrize("tracer", ["dynamo", "make_fx"])
@pytest.mark.parametrize("name", LEFT)
def test_modulations_that_stay(name, tracer, dynamo):
    """The norm alone is replaced."""
    function, reason = LEFT[name]
    x, scale = random(BATCH, TOKENS, N), random(BATCH, N, seed=1)
    replaced = TRACERS[tracer](module_of(function), x, scale, rounds_once=True)
    (kind,) = kinds_of(replaced.report)
    assert "modulated" not in kind
    reasons = [why for _, why in replaced.report.left]
    assert len(reasons) == (reason is not None) and all(reason in why for why in reasons)
    torch.testing.assert_close(replaced.run(x, scale), function(x, scale))


def wide(x, scale):
    x, scale = x.repeat(1, 1, 200), scale.repeat(1, 200)
    return F.layer_norm(x, (200 * N,), eps=EPS) * (1 + scale[:, None])


def test_a_row_that_is_too_long_for_the_kernels():
    replaced = by_make_fx(module_of(wide), random(BATCH, TOKENS, N), random(BATCH, N))
    assert kinds_of(replaced.report) == ["layer_norm"]
    ((_, reason),) = replaced.report.left
    assert reason.startswith(STAYS) and "the kernels take up to" in reason


# What stands between a gated sum and its norm, and what the op computes then.
SUMS = {
    "used before": (lambda s, scale: (s.sin(), scale.cos()), LAYER),
    "used after": (lambda s, scale: (None, scale.cos()), GATED),
    "written": (lambda s, scale: (None, scale.mul_(2)), LAYER),
    "scale of the sum": (lambda s, scale: (None, s[:, 0]), LAYER),
}


@pytest.mark.parametrize("name", SUMS)
def test_where_the_op_of_a_sum_stands(name, dynamo):
    """Its arguments may come after the sum, if nothing needs the sum before."""
    between, kind = SUMS[name]

    def function(x, residual, gate, scale):
        s = residual + x * gate[:, None]
        used, scale = between(s, scale)
        return normed(s) * (1 + scale[:, None]), s.cos(), used

    tensors = [random(BATCH, TOKENS, N, seed=i) for i in range(2)]
    tensors += [random(BATCH, N, seed=i) for i in (2, 3)]
    copies = [[t.clone() for t in tensors] for _ in range(2)]
    replaced = by_dynamo(function, *[t.clone() for t in tensors])
    assert kinds_of(replaced.report) == [kind]
    torch.testing.assert_close(replaced.run(*copies[0]), function(*copies[1]))


def test_a_joint_graph_keeps_the_modulation_with_its_reason():
    """The norm and its gradient are replaced."""

    def joint(x, scale, dy):
        y = normed(x) * (1 + scale[:, None])
        return y, *torch.autograd.grad(y, (x, scale), dy)

    tensors = random(BATCH, TOKENS, N), random(BATCH, N, seed=1), random(BATCH, TOKENS, N, seed=2)
    leaves = [t.requires_grad_(i < 2) for i, t in enumerate(tensors)]
    graph_module = make_fx(joint)(*leaves)
    report = replace_norms(graph_module)
    assert kinds_of(report) == ["layer_norm", "layer_norm_backward"]
    assert [why for _, why in report.left] == [f"{STAYS}, whose results other nodes use too"]
    torch.testing.assert_close(graph_module(*leaves), joint(*leaves))


def test_one_graph_for_every_batch(dynamo):
    module, x, emb = model_and_inputs("DiT", F32)
    run = tilenorm.compile(module, backend="eager", fullgraph=True, dynamic=True)
    for batch, tokens in ((2, 6), (3, 5), (5, 9)):
        x, emb = random(batch, tokens, N), random(batch, N, seed=1)
        with dynamo.config.patch(error_on_recompile=batch != 2):
            torch.testing.assert_close(run(x, emb), module(x, emb), rtol=1e-5, atol=1e-5)
    assert kinds_of(run.tilenorm_report) == MODELS["DiT"][1]


def test_the_option_takes_a_bool():
    graph_module = make_fx(normed)(random(3, N))
    with pytest.raises(TypeError, match="argument 'rounds_once' takes a bool, got int"):
        replace_norms(graph_module, rounds_once=1)


def gated(x, residual, gate, scale):
    s = residual + gate[:, None] * x
    return normed(s) * (1 + scale[:, None]), s


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_dtensors(placement, one_process_mesh, dynamo):
    """Those by sample are cut with the samples."""
    of_sample = Replicate() if placement == Shard(1) else placement
    plain = [random(BATCH, TOKENS, N, seed=i) for i in range(2)]
    plain += [random(BATCH, N, seed=i) for i in (2, 3)]
    places = [placement] * 2 + [of_sample] * 2
    pairs = zip(plain, places, strict=True)
    leaves = [distribute_tensor(t, one_process_mesh, [p]).requires_grad_() for t, p in pairs]
    run = tilenorm.compile(gated, backend="aot_eager")
    found = [f(*leaves) for f in (run, gated)]
    assert kinds_of(run.tilenorm_report) == [GATED]
    assert [y.placements for y in found[0]] == [(placement,)] * 2
    losses = [sum(y.sin().sum() for y in outputs) for outputs in found]
    grads = [torch.autograd.grad(loss, leaves) for loss in losses]
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got.full_tensor(), expected.full_tensor())
