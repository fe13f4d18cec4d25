"""The FX pass on norms of queries and keys with the rotary embedding behind them."""

from random import Random

import pytest
import torch
import torch.nn.functional as F

import tilenorm

from . import model_rows
from .graphs import by_dynamo, by_make_fx, calls, kinds_of, module_of, step
from .model_rows import arguments, built
from .rotations import drawn, rotate, split
from .stepwise import counted
from .test_fx_modulated import assert_no_less_accurate

BF16, F32 = torch.bfloat16, torch.float32
ROPE = torch.ops.tilenorm.rms_norm_rope.default
BACKWARD = torch.ops.tilenorm.rms_norm_rope_backward.default
TWO = ["rms_norm_rope"] * 2


@pytest.mark.parametrize("examples", [12, pytest.param(48, marks=pytest.mark.slow)])
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
        exactly = step(function, [t.double() for t in tensors], 3)
        pairs = step(once.run, tensors, 3), step(function, tensors, 3)
        assert_no_less_accurate(*pairs, exactly, name)


def test_norms_of_pytorch_in_16_bits_are_taken_where_the_op_may_round_once():
    """TorchDynamo keeps F.rms_norm as one call, which rounds behind its weight."""
    q, k = (torch.randn(2, 5, heads * 16, dtype=BF16) for heads in (4, 2))
    weight, tables = torch.randn(16, dtype=BF16), torch.randn(2, 1, 1, 5, 16, dtype=BF16)

    def function(q, k, weight, tables):
        heads = [F.rms_norm(split(x), (16,), weight).transpose(1, 2) for x in (q, k)]
        return tuple(rotate(x, *tables) for x in heads)

    for once, kinds in ((True, TWO), (False, ["rms_norm"] * 2)):
        replaced = by_dynamo(function, q, k, weight, tables, rotation=True, rounds_once=once)
        assert kinds_of(replaced.report) == kinds


@pytest.mark.slow
def test_compile_takes_rotations_where_it_is_asked_to(stepwise, dynamo):
    """Without that, it leaves norms of heads to Inductor, and tells so."""
    name = "qwen3"
    module = built(name).to(BF16)
    run = tilenorm.compile(module)
    run(**arguments(module, name))
    assert not run.tilenorm_report.replaced
    assert all("Inductor fuses a norm of" in why for _, why in run.tilenorm_report.left)
    dynamo.reset()
    run = tilenorm.compile(module, rotation=True)
    got, expected = model_rows.step(module, name, run), model_rows.step(module, name)
    assert kinds_of(run.tilenorm_report) == TWO
    assert counted(stepwise.forward[-1].graph, ROPE) == 1  # of queries and keys together
    assert counted(stepwise.backward[-1].graph, BACKWARD) == 1
    for n, result in expected.items():
        atol = 2**-4 * result.abs().max().item()
        torch.testing.assert_close(got[n], result, rtol=2**-4, atol=atol)
