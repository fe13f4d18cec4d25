"""The FX pass on norms that are scaled and shifted by group, as diffusers writes them."""

from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import tilenorm
from tests.support.calls import random, slow

from .graphs import TRACERS, by_dynamo, by_make_fx, kinds_of, module_of, step
from .modulations import BATCH, GATED, TOKENS, N, drawn, gated
from .stepwise import counted

BF16, F32 = torch.bfloat16, torch.float32
OP = torch.ops.tilenorm.modulated_layer_norm.default
BACKWARD = torch.ops.tilenorm.modulated_norm_backward.default
ROUNDED = "it stays behind its norm: each of its operations rounds to 16 bits"


def assert_no_less_accurate(got, eager, exact, label):
    """Of each tensor, in the mean of squares, and with a unit in the last place for the largest."""
    for i, (a, b, c) in enumerate(zip(got, eager, exact, strict=True)):
        errors = [(t.double() - c).square().mean().sqrt().item() for t in (a, b)]
        size = c.square().mean().sqrt().item()
        assert errors[0] <= 1.1 * errors[1] + 2**-22 * size, f"{label}: result {i}: {errors}"
        unit = 2 * torch.finfo(a.dtype).eps * c.abs().max().item()
        assert (a.double() - c).abs().max().item() <= unit + 2 * (b - c).abs().max().item()


@pytest.mark.parametrize("seed, examples", [(20, 20), *slow((120, 60))])
def test_drawn_spellings_are_one_op_that_is_no_less_accurate(seed, examples, dynamo):
    rng, tracers, kinds = Random(seed), Random(0), set()
    for _ in range(examples):
        name, op, function, tensors = drawn(rng)
        trace = TRACERS[tracers.choice((*["make_fx"] * 5, *TRACERS))]
        dynamo.reset()
        replaced = trace(module_of(function), *tensors, rounds_once=True)
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


COMPILERS = {
    "inductor": {},
    "inductor, emulating": {"options": {"emulate_precision_casts": True}},
    "aot_eager": {"backend": "aot_eager"},
}


@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiled(compiler, stepwise):
    """Inductor's own code rounds once too, if it is not told to round as eager code does."""
    tensors = [random(BATCH, TOKENS, N, dtype=BF16, seed=i) for i in range(2)]
    tensors += [random(BATCH, N, dtype=BF16, seed=i) for i in (2, 3)]
    run = tilenorm.compile(gated, where=lambda node: True, fullgraph=True, **COMPILERS[compiler])
    got, expected = step(run, tensors), step(gated, tensors)
    report = run.tilenorm_report
    if compiler == "inductor":
        assert kinds_of(report) == [GATED] and not report.left
        assert counted(stepwise.forward[0].graph, OP) == 1
        assert counted(stepwise.backward[0].graph, BACKWARD) == 1
    else:
        assert kinds_of(report) == ["add_layer_norm"]
        assert [reason.startswith(ROUNDED) for _, reason in report.left] == [True]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-4, atol=2**-4 * b.abs().max().item())


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


# Placements of two terms, and the op of the norm of their sum.
TERMS = [(Shard(1), Shard(1), "layer_norm"), (Partial(), Partial(), "layer_norm")]
TERMS += [(Shard(0), Shard(0), "add_layer_norm"), (Shard(0), Partial(), "add_layer_norm")]


@pytest.mark.parametrize("first, second, kind", TERMS, ids=str)
def test_an_op_that_would_move_a_sum_leaves_it(first, second, kind, one_process_mesh, dynamo):
    """What follows the sum was traced for the placement that the sum has."""

    def function(x, residual):
        s = x + residual
        return F.layer_norm(s, (N,)), s * 1

    terms = [DTensor.from_local(random(4, N), one_process_mesh, [p]) for p in (first, second)]
    replaced = by_dynamo(function, *terms)
    assert kinds_of(replaced.report) == [kind] and not replaced.report.left
    for got, expected in zip(replaced.run(*terms), function(*terms), strict=True):
        assert got.placements == expected.placements
        torch.testing.assert_close(got.full_tensor(), expected.full_tensor())
