"""Norms with a quantised output: q has the bits of the quantised output of the plain norm.

What they refuse, and what serves in their place.
"""

import warnings
from dataclasses import replace
from itertools import cycle
from random import Random

import pytest
import torch
from torch.library import opcheck

import tilenorm
from tests import layouts
from tests.executors import Inputs, Interpreter
from tests.guarded import guarded
from tests.quantized import HOWS, arguments, bits, check, label, swizzled
from tilenorm.launch import plan
from tilenorm.launch.config import Hints, SharedForward
from tilenorm.launch.plan import ForwardPlan
from tilenorm.launch.target import Target
from tilenorm.ops import cutile
from tilenorm.ops.quantize import QuantizedNorm, quantize
from tilenorm.spec import NormSpec, Quantization
from tilenorm.table import QUANTIZED_NORMS
from tilenorm.tools.explain import explain_spec, planned_device

from .helpers import EACH_DEVICE, EPS, op_arguments, random
from .pretended import by, pretended_gpu
from .test_overrides import Seen, Subclass

SERVED = ("reference", "sm_90", "sm_100", "sm_80")
EACH_OP = pytest.mark.parametrize("op", QUANTIZED_NORMS)
EACH_HOW = pytest.mark.parametrize("how", HOWS, ids=label)
ROW = HOWS[0]
B, F = torch.bfloat16, torch.float32


def tensors_of(op, *shape, dtype=B, parameter=None, device="cpu") -> tuple[tuple, dict]:
    """The tensors that have rows, and the parameters by name."""
    count = 2 if op.startswith("add") else 1
    rows = tuple(random(*shape, dtype=dtype, seed=i, device=device) for i in range(count))
    how = {"dtype": parameter or dtype, "device": device}
    named = enumerate(("weight", "bias"), 7)
    return rows, {name: random(shape[-1], seed=seed, **how) for seed, name in named}


def plain(op, rows, shape, **options):
    """(y, the sum) of the norm that is quantised."""
    found = getattr(tilenorm, op.removesuffix("_quantized"))(*rows, shape, **options)
    return found if isinstance(found, tuple) else (found, None)


def compared(op, how, rows, shape, **options) -> QuantizedNorm:
    """What the function returns, which is the quantisation of what the plain norm returns."""
    asked, hidden = arguments(how), torch.Size(shape).numel()
    y, total = plain(op, rows, shape, **options)
    with guarded():
        found = getattr(tilenorm, op)(*rows, shape, **options, **asked)
    check(how, found, y, hidden, asked["scale"])
    assert (found.residual_out is None) == (total is None)
    assert total is None or torch.equal(found.residual_out, total)
    return found


@EACH_OP
@pytest.mark.parametrize("served", SERVED)
def test_drawn_calls(op, served):
    rng = Random(f"{op} {served}")
    for how, dtype in zip(HOWS, cycle((B, torch.float16, F))):
        hidden = rng.choice((128, 384, 640)) if how.group else rng.choice((1, 7, 36, 640))
        shape = rng.choice(((1, hidden), (5, hidden), (2, 3, hidden)))
        parameter = rng.choice((dtype, F))
        rows, given = tensors_of(op, *shape, dtype=dtype, parameter=parameter)
        if rng.random() < 0.5:
            rows = (layouts.draw(rng, shape, False).filled(rows[0]), *rows[1:])
        offset, rounding = rng.choice((0.0, 1.0)), rng.choice(("late", "early"))
        with by(served):
            compared(op, how, rows, (hidden,), **given, eps=EPS, offset=offset, rounding=rounding)


@pytest.mark.parametrize("served", SERVED[:2])
def test_normalized_shapes_heads_and_two_residuals(served):
    x, other = random(3, 4, 64, dtype=B), random(3, 4, 64, dtype=B, seed=1)
    with by(served):
        for how in HOWS[2:4]:
            compared("rms_norm_quantized", how, (x,), (4, 64), weight=random(4, 64, dtype=B))
            rows = (x, (other, other.float()))
            compared("add_layer_norm_quantized", how, rows, (4, 64), eps=EPS)
        heads = random(4, 64, dtype=B, seed=2)
        compared("layer_norm_quantized", HOWS[5], (x,), (64,), weight=heads, bias=heads)


@EACH_HOW
@pytest.mark.parametrize("served", SERVED[:2])
def test_special_rows(how, served):
    """Zeros, numbers too small for a factor, NaN, infinity, and what saturates."""
    x = torch.ones(7, 128, dtype=F)
    weight = torch.ones(128)
    x[1], x[2, 5], x[3] = 0.0, torch.nan, 1e-38
    weight[3], weight[100] = torch.inf, 1e30
    with by(served):
        for w in (None, weight):
            compared("rms_norm_quantized", how, (x,), (128,), weight=w, eps=1e-6)
            compared("rms_norm_quantized", how, (x[:2] * 1e-20,), (128,), weight=w, eps=1.0)
            compared("rms_norm_quantized", how, (x[:0],), (128,), weight=w)


def test_the_codes_of_all_numbers():
    """Every bfloat16, which is a row of its own: 1 / factor is the number's magnitude / most."""
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(B).reshape(-1, 128)
    for how in HOWS:
        spec = NormSpec("rms", 128, "bfloat16", quantized=how)
        given = arguments(how)["scale"]
        q, scale, amax = quantize(spec, every, given)
        found = QuantizedNorm(q, scale if given is None else given, every, amax)
        found = found._replace(output=every if how.output else None)
        check(how, found, every, 128, given)


def test_swizzled_scales_are_those_of_cublas():
    how = Quantization("mx", layout="swizzled")
    rows = random(130, 160, dtype=B) * torch.logspace(-9, 9, 130)[:, None]
    plainly = replace_layout(rows, how._replace(layout="row"))
    with pretended_gpu():
        found = replace_layout(rows, how)
    assert torch.equal(bits(found), swizzled(bits(plainly).reshape(130, 5)))


def replace_layout(rows, how):
    return tilenorm.rms_norm_quantized(rows.to(B), (160,), eps=1e3, **arguments(how)).scale


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("how", [HOWS[1], HOWS[2], HOWS[7]], ids=label)
def test_blocks_that_share_a_row(how, exchange):
    """Rows of two chunks, whose largest magnitude may be in the other chunk."""
    executor, config = Interpreter("sm_90"), SharedForward(Hints(), (256, 128), packed=True)
    run, given = executor.run(exchange=exchange), arguments(how)["scale"]
    for norm, save in (("rms", True), ("layer", False)):
        spec = NormSpec(norm, 640, "bfloat16", "bfloat16", "bfloat16", residual="bfloat16")
        inputs = Inputs.random(spec, 2, "cpu")
        plan = ForwardPlan(spec, executor.target, config, save)
        y = cutile.bind_forward(plan, run)(inputs.tensors(spec), EPS)[0]
        asked = replace(spec, quantized=how)
        bound = cutile.bind_forward(replace(plan, spec=asked), run)
        found = bound(replace(inputs, scale=given).tensors(asked), EPS)
        check(how, QuantizedNorm.of(found, given, None), y, 640, given)


@EACH_DEVICE
@pytest.mark.parametrize("residuals", [1, 2])
@EACH_OP
def test_gradients_are_those_of_the_plain_norm(op, residuals, device):
    """And second derivatives. residuals: of a norm of a sum."""
    results = []
    for function in (op, op.removesuffix("_quantized")):
        (x, *others), given = tensors_of(op, 300, 2048, device=device)
        more = random(300, 2048, dtype=B, seed=9, device=device)
        others += [more] * (residuals - 1) * len(others)
        leaves = [t.requires_grad_() for t in (x, *others, *given.values())]
        rows = (x, tuple(others)) if others else (x,)
        asked = arguments(HOWS[2]) if function == op else {}
        found = getattr(tilenorm, function)(*rows, (2048,), **given, eps=EPS, **asked)
        if function == op:
            assert not (found.q.requires_grad or found.scale.requires_grad)
            assert not found.amax.requires_grad
            found = (found.output, found.residual_out)
        outputs = [t for t in (found if isinstance(found, tuple) else (found,)) if t is not None]
        incoming = [random(*t.shape, dtype=t.dtype, seed=20, device=device) for t in outputs]
        grads = torch.autograd.grad(outputs, leaves, incoming, create_graph=True)
        second = torch.autograd.grad(grads[0].square().sum(), leaves, allow_unused=True)
        results.append([*outputs, *grads, *(t for t in second if t is not None)])
    assert len(results[0]) == len(results[1]) and all(map(torch.equal, *results))


def test_a_gradient_needs_the_output():
    x = random(3, 128).requires_grad_()
    with pytest.raises(RuntimeError, match="pass return_output=True"):
        tilenorm.rms_norm_quantized(x, (128,), scaling="row")
    with torch.no_grad():
        tilenorm.rms_norm_quantized(x, (128,), scaling="row")


def arguments_of(op, how):
    """The arguments of the op that has a function's name."""
    rows, given = tensors_of(op, 5, 128)
    given |= dict(zip(("input", "residual"), rows, strict=False))
    asked = arguments(how)
    return op_arguments(op, given | {"given_scale": asked.pop("scale")}, 128, False, **asked)


@EACH_HOW
def test_opcheck(how):
    for name in QUANTIZED_NORMS[1:3]:
        op = getattr(torch.ops.tilenorm, name).default
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        opcheck(op, arguments_of(name, how), test_utils=tests)


def test_compiled_without_a_break_for_any_number_of_rows():
    results = torch.compile(quantized_twice, fullgraph=True, backend="aot_eager", dynamic=True)
    torch._dynamo.reset()
    for rows in (5, 6, 130):
        x = random(rows, 128, dtype=B)
        for got, expected in zip(results(x), quantized_twice(x), strict=True):
            assert got.stride() == expected.stride()
            assert torch.equal(bits(got), bits(expected))
    x = random(4, 128, dtype=B).requires_grad_()
    results(x)[-1].sum().backward()
    got, x.grad = x.grad, None
    quantized_twice(x)[-1].sum().backward()
    assert torch.equal(got, x.grad)


def quantized_twice(x):
    found = tilenorm.rms_norm_quantized(x, (128,), **arguments(HOWS[2]))
    q, scale, *_ = tilenorm.layer_norm_quantized(x.detach(), (128,), **arguments(HOWS[6]))
    return found.q, found.scale, q, scale, found.output


X = torch.ones(3, 128)


def test_transforms_are_refused():
    with pytest.raises(NotImplementedError, match="quantise what tilenorm"):
        torch.vmap(lambda x: tilenorm.rms_norm_quantized(x, (128,), scaling="row").q)(X[None])


@pytest.mark.parametrize(
    "arch, op, hidden, reason",
    [
        ("sm_80", "rms_norm", 128, "sm_80: cuTile has no 8-bit floats before sm_90"),
        ("sm_90", "add_layer_norm", 10240, "would add up these rows in another order"),
    ],
)
def test_a_cast_follows_the_plain_norm(arch, op, hidden, reason):
    """Its kernels give y, whose bits q has. No warning says so, but `explain` does."""
    rows = [random(3, hidden, dtype=torch.bfloat16, seed=i) for i in range(1 + ("add" in op))]
    given = {"eps": 1e-6, "backend": "cutile"}
    with pretended_gpu(arch), warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = getattr(tilenorm, op)(*rows, (hidden,), **given)
        y, total = plain if len(rows) > 1 else (plain, None)
        for how in (HOWS[0], HOWS[2]):
            asked = arguments(how)
            found = getattr(tilenorm, f"{op}_quantized")(*rows, (hidden,), **given, **asked)
            check(how, found, y, hidden, asked["scale"])
            assert total is None or torch.equal(found.residual_out, total)
    spec = NormSpec.of(f"{op}_quantized", hidden, "bfloat16", quantized=HOWS[0])
    found = explain_spec(spec, 100, planned_device(arch))
    assert found.chosen == "cutile" and reason in found.forward_source
    assert [step.kernel for step in found.forward] == ["row_forward"]


def test_segments_that_cut_groups(monkeypatch):
    config, target = SharedForward(Hints(), (64,)), Target.of("sm_90")
    monkeypatch.setattr(plan.heuristics, "chosen", lambda *_: config)
    spec = NormSpec("rms", 256, "bfloat16", quantized=HOWS[2])
    apart = ForwardPlan(spec, target, config, True)
    assert "cuts groups of 128 elements" in apart.casts_apart
    assert plan.plan_forward.__wrapped__(spec, target, True).spec == spec.unquantized
    assert replace(apart, spec=replace(spec, quantized=HOWS[5])).casts_apart is None


def test_a_mode_sees_the_call():
    given = X.as_subclass(Subclass), X, (128,)
    assert type(tilenorm.add_rms_norm_quantized(*given, eps=1.0, scaling="block").q) is Subclass
    with Seen() as seen:
        tilenorm.rms_norm_quantized(X, (128,), scaling="row")
    assert seen.calls[0][0] is torch.ops.tilenorm.rms_norm_quantized
