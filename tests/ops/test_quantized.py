"""Norms with a quantised output: q has the bits of the quantised output of the plain norm.

What they refuse, and what serves in their place.
"""

import warnings
from dataclasses import replace
from random import Random

import pytest
import torch
from torch.library import opcheck

import tilenorm
from tests.support import layouts
from tests.support.calls import (
    EPS,
    FAMILY,
    JOINED,
    NEEDS_GPU,
    RMS,
    call,
    each,
    incoming_of,
    leaves_of,
    op_arguments,
    random,
    tensors_of,
    tensors_of_op,
)
from tests.support.executors import Inputs, Interpreter
from tests.support.guarded import guarded
from tests.support.passes import SeenFunctions, Subclass
from tests.support.pretended import by, pretended_gpu
from tests.support.quantized import HOWS, arguments, bits, check, label, swizzled
from tilenorm.launch import forced
from tilenorm.launch.config import Hints, SharedForward
from tilenorm.launch.plan import ForwardPlan, plan_forward
from tilenorm.launch.target import Target
from tilenorm.ops.passes import cutile
from tilenorm.ops.passes.quantize import QuantizedNorm, quantize
from tilenorm.spec import NormSpec, Quantization
from tilenorm.table import OPS, QUANTIZED_NORMS
from tilenorm.tools.explain import explain_spec, planned_device

SERVED = ("reference", "sm_90", "sm_100", "sm_80")
ON_A_GPU, BACKENDS = pytest.param("cuda", marks=NEEDS_GPU), {"cuda": "cutile"}
# On a GPU: tiles of several rows, tiles of one, tile loads, and rows that blocks share.
WIDE = [(n,) for n in (512, 2048, 4096, 5120, 8192, 10240, 16384, 32768, 65536)]
# Of these the compiler once added up tiles of a plain and of a quantised norm in two orders.
NARROW = (24, 40, 48, 64, 96, 112, 768, 776)
FORMS = {n: f for n, f in (FAMILY | JOINED).items() if f"{f.op}_quantized" in OPS}
EACH_QUANTIZED = each(FORMS)
EACH_HOW = pytest.mark.parametrize("how", HOWS, ids=label)
B, F = torch.bfloat16, torch.float32


def quantized(form, tensors, asked: dict, dims=1, **options) -> QuantizedNorm:
    """What the quantised function returns. asked: the arguments of the quantisation."""
    form = form._replace(op=f"{form.op}_quantized")
    return call(form, tensors, dims, **options, **asked)


def compared(form, how, tensors, dims=1, **options) -> None:
    """What the function returns is the quantisation of what the plain norm returns."""
    x = tensors["input"]
    asked, hidden = arguments(how, x.device), x.shape[-dims:].numel()
    y, *total = call(form, tensors, dims, **options)
    with guarded():
        found = quantized(form, tensors, asked, dims, **options)
    check(how, found, y, hidden, asked["scale"])
    assert (found.residual_out is None) == (not total)
    assert all(torch.equal(found.residual_out, t) for t in total)


@pytest.mark.long
@NEEDS_GPU
@EACH_QUANTIZED
@pytest.mark.parametrize("part", range(10))
def test_drawn_calls_on_a_gpu(form, part):
    """Each draw compiles kernels of its own: all of them in one case would take too long."""
    compare_drawn(form, "cuda", Random(f"{form} {part}"))


@EACH_QUANTIZED
@pytest.mark.parametrize("served", SERVED)
def test_drawn_calls(form, served):
    compare_drawn(form, served, Random(f"{form} {served}"))


def compare_drawn(form, served, rng) -> None:
    """Each quantisation once, with all else drawn."""
    device = "cuda" if served == "cuda" else "cpu"
    for how in HOWS:
        dtype = rng.choice((B, torch.float16, F))
        sizes = ((128,), (384,), (4, 64)) if how.group else ((1,), (7,), (36,), (640,), (4, 9))
        rows = (1,), (5,), (2, 3)
        if served == "cuda":
            sizes, rows = (*sizes, *WIDE), (*rows, (130,), (333,))
        size, heads = rng.choice(sizes), rng.choice((0, 0, 0, 3))
        shape = (*rng.choice(rows), *[heads] * bool(heads), *size)
        dims, affine = len(size), (heads, *size) if heads else None
        dtypes = {
            "dtype": dtype,
            "other": rng.choice((dtype, F)),
            "parameter": rng.choice((dtype, F)),
            "device": device,
        }
        tensors = tensors_of(form, *shape, dims=dims, parameter_shape=affine, **dtypes)
        if rng.random() < 0.5:
            tensors["input"] = layouts.draw(rng, shape, False).filled(tensors["input"])
        if "rms" in form.op and rng.random() < 0.5:
            del tensors["bias"]
        options = {"offset": rng.choice((0.0, 1.0)), "rounding": rng.choice(("late", "early"))}
        with by(served, device):
            compared(form, how, tensors, dims, **options, backend=BACKENDS.get(served))


@EACH_QUANTIZED
@pytest.mark.parametrize("hidden", NARROW)
@pytest.mark.parametrize("served", [ON_A_GPU])
def test_tiles_of_narrow_rows(form, hidden, served):
    """A tile of several rows is added up in the plain norm's order, whichever the compiler took for
    it before there was a prescribed one.
    """
    for dtype in (B, torch.float16, F):
        tensors = tensors_of(form, 3001, hidden, dtype=dtype, other=dtype, device=served)
        compared(form, HOWS[0], tensors, backend=BACKENDS[served])


@EACH_HOW
@pytest.mark.parametrize("served", [*SERVED[:2], ON_A_GPU])
def test_special_rows(how, served):
    """Zeros, numbers too small for a factor, NaN, infinity, and what saturates."""
    device = "cuda" if served == "cuda" else "cpu"
    x, weight = torch.ones(7, 128, device=device), torch.ones(128, device=device)
    x[1], x[2, 5], x[3] = 0.0, torch.nan, 1e-38
    weight[3], weight[100] = torch.inf, 1e30
    with by(served, device):
        for affine in ({}, {"weight": weight}):
            for rows, eps in ((x, EPS), (x[:2] * 1e-20, 1.0), (x[:0], EPS)):
                given = {"input": rows, **affine}
                compared(RMS, how, given, eps=eps, backend=BACKENDS.get(served))


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
        with forced(config):
            plan = plan_forward(spec, executor.target, save)
        y = cutile.bind_forward(plan, run)(inputs.tensors(spec), EPS)[0]
        asked = replace(spec, quantized=how)
        bound = cutile.bind_forward(replace(plan, spec=asked), run)
        found = bound(replace(inputs, scale=given).tensors(asked), EPS)
        check(how, QuantizedNorm.of(asked.op, found, given), y, 640, given)


@EACH_QUANTIZED
def test_gradients_are_those_of_the_plain_norm(form, device):
    """And second derivatives."""
    tensors, results = tensors_of(form, 300, 2048, dtype=B, device=device), []
    for function in (quantized, call):
        leaves = leaves_of(tensors)
        if function is call:
            outputs = call(form, leaves)
        else:
            found = quantized(form, leaves, arguments(HOWS[2]))
            assert not any(t.requires_grad for t in (found.q, found.scale, found.amax))
            outputs = [t for t in (found.output, found.residual_out) if t is not None]
        of, incoming = [*leaves.values()], incoming_of(tensors)
        grads = torch.autograd.grad(outputs, of, incoming, create_graph=True)
        second = torch.autograd.grad(grads[0].square().sum(), of, allow_unused=True)
        results.append([*outputs, *grads, *(t for t in second if t is not None)])
    assert len(results[0]) == len(results[1]) and all(map(torch.equal, *results))


def test_a_gradient_needs_the_output():
    x = random(3, 128).requires_grad_()
    with pytest.raises(RuntimeError, match="pass return_output=True"):
        tilenorm.rms_norm_quantized(x, (128,), scaling="row")
    with torch.no_grad():
        tilenorm.rms_norm_quantized(x, (128,), scaling="row")


@EACH_HOW
def test_opcheck(how):
    """Of two scalings also with symbolic sizes."""
    for name in QUANTIZED_NORMS[:3]:
        op, asked = getattr(torch.ops.tilenorm, name).default, arguments(how)
        given = tensors_of_op(name, B, (5, 1), 128) | {"given_scale": asked.pop("scale")}
        given.pop("addend", None)
        tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
        tests += ["test_aot_dispatch_dynamic"] * (how in (HOWS[2], HOWS[6]))
        opcheck(op, op_arguments(name, given, 128, False, **asked), test_utils=tests)


X = torch.ones(3, 128)


def test_transforms_are_refused():
    with pytest.raises(NotImplementedError, match="quantise what tilenorm"):
        torch.vmap(lambda x: tilenorm.rms_norm_quantized(x, (128,), scaling="row").q)(X[None])


def test_a_cast_follows_the_plain_norm():
    """Its kernels give y, whose bits q has. No warning says so, but `explain` does."""
    tensors = tensors_of(FAMILY["rms_norm"], 3, 128, dtype=B)
    with pretended_gpu("sm_80"), warnings.catch_warnings():
        warnings.simplefilter("error")
        for how in (HOWS[0], HOWS[2]):
            compared(FAMILY["rms_norm"], how, tensors, backend="cutile")
    spec = NormSpec.of("rms_norm_quantized", 128, "bfloat16", quantized=HOWS[0])
    found = explain_spec(spec, 100, planned_device("sm_80"))
    assert found.chosen == "cutile"
    assert "sm_80: cuTile has no 8-bit floats before sm_90" in found.forward_source
    assert [step.kernel for step in found.forward] == ["row_forward"]


def test_segments_that_cut_groups():
    config, target = SharedForward(Hints(), (64,)), Target.of("sm_90")
    spec = NormSpec("rms", 256, "bfloat16", quantized=HOWS[2])
    apart = ForwardPlan(spec, target, config, True)
    assert "cuts groups of 128 elements" in apart.casts_apart
    with forced(config):
        assert plan_forward(spec, target, True).spec == spec.unquantized
    assert replace(apart, spec=replace(spec, quantized=HOWS[5])).casts_apart is None


def test_a_mode_sees_the_call():
    given = X.as_subclass(Subclass), X, (128,)
    assert type(tilenorm.add_rms_norm_quantized(*given, eps=1.0, scaling="block").q) is Subclass
    with SeenFunctions() as seen:
        tilenorm.rms_norm_quantized(X, (128,), scaling="row")
    assert seen.calls[0][0] is torch.ops.tilenorm.rms_norm_quantized
