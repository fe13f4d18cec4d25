"""The FX pass on norms of queries and keys with the rotary embedding behind them."""

from random import Random

import pytest
import torch

import tilenorm

from ..ops.helpers import name_of, slow
from .graphs import by_make_fx, calls, kinds_of, module_of, step
from .rotations import drawn
from .stepwise import counted
from .test_fx_modulated import assert_no_less_accurate

BF16, F32 = torch.bfloat16, torch.float32
ROPE = torch.ops.tilenorm.rms_norm_rope.default
BACKWARD = torch.ops.tilenorm.rms_norm_rope_backward.default
TWO = ["rms_norm_rope"] * 2


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
        exactly = step(function, [t.double() for t in tensors], 3)
        pairs = step(once.run, tensors, 3), step(function, tensors, 3)
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
def test_models_of_transformers(name, dtype, stepwise, dynamo):
    """Both layers. In 16 bits, Qwen 3 alone rounds as tilenorm's op can; with Inductor all do."""
    module, given = model(name, dtype)
    for backend in ("eager", "inductor"):
        dynamo.reset()
        how = {"where": lambda node: True, "rotation": True, "backend": backend}
        run = tilenorm.compile(module, **how)
        with torch.no_grad():
            got, expected = run(**given)[0], module(**given)[0]
        fused = dtype == F32 or name == "qwen3" or backend == "inductor"
        assert kinds_of(run.tilenorm_report).count("rms_norm_rope") == 4 * fused
        reasons = [why for _, why in run.tilenorm_report.left]
        assert len(reasons) == (0 if fused else 4)
        assert all("it rounds to 16 bits where tilenorm's op does not" in why for why in reasons)
        if dtype == BF16 and backend == "eager":
            assert torch.equal(got, expected)
        else:
            atol = (2**-5 if dtype == BF16 else 1e-5) * expected.abs().max().item()
            torch.testing.assert_close(got, expected, rtol=0, atol=atol)
    assert counted(stepwise.forward[-1].graph, ROPE) == 2  # of queries and keys together


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
