"""rms_norm and layer_norm take what PyTorch's take, and give what they give; with rounding="early"
they give the bits of transformers' modules. Under torch.autocast the outputs of every function have
the dtypes that PyTorch's own functions would give them.
"""

import inspect

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

import tilenorm
from tests.support.calls import (
    ADD,
    CALLS,
    DTYPES,
    EACH_FORM,
    EPS,
    FAMILY,
    GATED,
    NEEDS_GPU,
    RMS,
    arguments_by_port,
    assert_step,
    by_pytorch,
    call,
    each,
    expected_of,
    name_of,
    op_call,
    random,
    same,
    step,
    tensors_of,
)
from tilenorm.ops.passes import reference
from tilenorm.spec import NormSpec

from .test_cuda_states import autocast

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
EACH_OP = pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])


def assert_same(got, expected):
    """To five units in the last place of float32: both round at every step, each in its own way."""
    options = {"rtol": 6e-7, "atol": 6e-7, "equal_nan": True, "check_device": False}
    torch.testing.assert_close(got, expected, **options)


FORMS = {
    "keywords": lambda f, x, w: f(input=x, normalized_shape=(24,), weight=w, eps=1e-5),
    "torch.Size": lambda f, x, w: f(x, x.shape[-1:], w),
    "numpy sizes": lambda f, x, w: f(x, (w.cpu().numpy().astype("int64").size,), w),
    "no weight": lambda f, x, w: f(x, (24,)),
    "eps 0": lambda f, x, w: f(x, (24,), w, eps=0.0),
    "eps an int": lambda f, x, w: f(x, (24,), w, eps=1),
    "eps a numpy number": lambda f, x, w: f(x, (24,), w, eps=np.float32(0.25)),
    "eps a tensor": lambda f, x, w: f(x, (24,), w, eps=torch.tensor(1e-3)),
    "eps a tensor of an int": lambda f, x, w: f(x, (24,), w, eps=torch.tensor(1)),
    "a size that is a tensor": lambda f, x, w: f(x, [torch.tensor(24)], w),
    "all dimensions": lambda f, x, w: f(x, (5, 24)),
}
FORMS_OF = {("rms_norm", name): form for name, form in FORMS.items()}
FORMS_OF |= {("layer_norm", name): form for name, form in FORMS.items()}
FORMS_OF |= {
    ("rms_norm", "positional"): lambda f, x, w: f(x, (24,), w, 1e-5),
    ("rms_norm", "eps None"): lambda f, x, w: f(x, (24,), w, None),
    ("layer_norm", "positional"): lambda f, x, w: f(x, (24,), w, w, 1e-3),
    ("layer_norm", "bias by keyword"): lambda f, x, w: f(x, (24,), weight=w, bias=w),
    ("layer_norm", "bias without weight"): lambda f, x, w: f(x, (24,), None, w),
    ("layer_norm", "two dimensions with bias"): lambda f, x, w: f(
        x.view(5, 4, 6), (4, 6), w.view(4, 6), w.view(4, 6)
    ),
}


@pytest.mark.parametrize("op, form", FORMS_OF)
def test_forms(device, op, form):
    x, w = random(5, 24, device=device), random(24, device=device, seed=1)
    expected = FORMS_OF[op, form](getattr(F, op), x.cpu(), w.cpu())
    got = FORMS_OF[op, form](getattr(tilenorm, op), x, w)
    assert got.device == x.device
    assert_same(got, expected)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_eps_none_is_what_pytorch_means(device, dtype, scale):
    # At 1e-4 the mean square is 1e-8: another eps, the dtype's own say, changes the first digit.
    x = (random(4, 64, dtype=torch.float64) * scale).to(dtype).to(device)
    got, peer = tilenorm.rms_norm(x, (64,)), F.rms_norm(x, (64,))
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    assert_step({"output": got}, expected_of(RMS, {"input": x}, eps=eps), ["output"])
    torch.testing.assert_close(got, peer, rtol=4 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype, other", [(BF16, F32), (F32, F64), (F64, F32)], ids=str)
def test_eps_none_of_a_sum_is_that_of_the_dtype_computed_in(device, dtype, other):
    # The mean square is 1e-9, below float32's eps and far above float64's.
    tensors = tensors_of(ADD, 7, 96, dtype=dtype, other=other, device=device)
    tensors |= {n: tensors[n] * 2e-5 for n in ("input", "residual")}
    eps = torch.finfo(F64 if F64 in (dtype, other) else F32).eps
    assert torch.equal(call(ADD, tensors, eps=None)[0], call(ADD, tensors, eps=eps)[0])


@pytest.mark.parametrize("n", [1, 64, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_the_variance_is_from_centred_values(device, dtype, n):
    """In the reference's formula. tests/kernels/test_accuracy.py has the kernels."""
    x = (random(8, n, dtype=torch.float64) + 1000.0).to(dtype).to(device)
    exact, most = F.layer_norm(x.double(), (n,)), 4e-6 if dtype == torch.float32 else 2e-2
    spec = NormSpec("layer", n, str(dtype).removeprefix("torch."))
    y = reference.formula(spec, {"x": x}, 1e-5)["y"]
    assert y.dtype == dtype and (y.double() - exact).abs().max() < most
    assert n > 1 or not y.any()
    if device == "cpu" and dtype == torch.float32:
        assert torch.equal(tilenorm.layer_norm(x, (n,)), F.layer_norm(x, (n,)))


GATE_FIRST = FAMILY["gated_rms_norm, gate first"]


EARLY = {"rounding": "early"}
# Of each model: the form and its options, and the class of transformers, by its file.
MODELS = {
    "Llama": (RMS, EARLY, "llama", "LlamaRMSNorm"),
    "Gemma": (RMS, {"offset": 1.0}, "gemma", "GemmaRMSNorm"),
    "Qwen3-Next, gated": (GATED, EARLY, "qwen3_next", "Qwen3NextRMSNormGated"),
    "Mamba, gated": (GATE_FIRST, EARLY, "mamba2", "MambaRMSNormGated"),
}
ROUNDED = [(d, d) for d in (F32, BF16, F16)] + [(d, F32) for d in (BF16, F16)]


def assert_bits(got, expected):
    """Of the CPU; on a GPU sums have another order, which may tip a rounding."""
    if not got.is_cuda:
        assert torch.equal(got, expected)
    else:
        # Rounded early, x̂ may differ by one unit, and its product by one more.
        unit = torch.finfo(got.dtype)
        limits = {"rtol": max(2 * unit.eps, 6e-7), "atol": 2 * unit.tiny * unit.eps}
        torch.testing.assert_close(got, expected, **limits)


def by_groups(form, tensors, groups):
    """Every group a head."""
    tensors = {n: t.unflatten(-1, (groups, -1)) for n, t in tensors.items()}
    return call(form, tensors, **EARLY)[0].flatten(-2)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype, parameter", ROUNDED, ids=name_of)
def test_the_bits_of_transformers(device, model, dtype, parameter):
    form, options, folder, name = MODELS[model]
    kind = getattr(pytest.importorskip(f"transformers.models.{folder}.modeling_{folder}"), name)
    grouped = "group_size" in inspect.signature(kind).parameters
    module = kind(128, **({"group_size": 32} if grouped else {}), eps=EPS).to(device, parameter)
    tensors = tensors_of(form, 3, 32, 128, dtype=dtype, parameter=parameter, device=device)
    del tensors["bias"]
    with torch.no_grad():
        module.weight.copy_(tensors["weight"])
        expected = module(tensors["input"], *([tensors["gate"]] if "gate" in tensors else []))
    got = by_groups(form, tensors, 4) if grouped else call(form, tensors, **options)[0]
    # A float32 weight makes Llama's output float32; tilenorm's has the input's dtype.
    assert_bits(got, expected.to(dtype))


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=name_of)
def test_the_bits_of_pytorchs_function(device, dtype):
    tensors = tensors_of(RMS, 3, 32, 128, dtype=dtype, device=device)
    del tensors["bias"]
    x, w = tensors.values()
    assert_bits(call(RMS, tensors)[0], F.rms_norm(x, w.shape, w, EPS))


@pytest.mark.parametrize("parameter", [BF16, F32], ids=name_of)
def test_a_product_is_rounded_early_with_a_weight_of_the_inputs_dtype(parameter):
    x, (w, b) = random(32, 64, dtype=BF16), random(2, 64, dtype=parameter, seed=1)
    y = F.layer_norm(x.float(), (64,), eps=EPS).to(BF16) * w.to(F32)
    y = (y.to(parameter).to(F32) + b.to(F32)).to(BF16)
    assert torch.equal(tilenorm.layer_norm(x, (64,), w, b, EPS, rounding="early"), y)


@EACH_FORM
def test_in_float32_both_are_one(device, form):
    tensors = tensors_of(form, 7, 96, device=device)
    assert same(step(form, tensors, **EARLY), step(form, tensors, rounding="late"))


@each(CALLS)
@pytest.mark.parametrize("parameter", [None, F32], ids=["parameters alike", "parameters float32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_dtypes_under_autocast(kind, form, dtype, parameter):
    with torch.autocast("cpu", BF16) if kind == "cpu" else autocast(F16), FakeTensorMode():
        tensors = tensors_of(form, 5, 40, dtype=dtype, parameter=parameter)
        tensors = {n: torch.empty_like(t, device=kind) for n, t in tensors.items()}
        without_bias = {n: t for n, t in tensors.items() if n != "bias"}
        got, expected = call(form, tensors), by_pytorch(form, without_bias)
        assert [y.dtype for y in got] == [y.dtype for y in expected]
        assert [y.shape for y in got] == [y.shape for y in expected]
        by_op = op_call(form.op, arguments_by_port(tensors), 40, **form.options)
        assert [y.dtype for y in [*by_op.values()][: len(got)]] == [y.dtype for y in got]


def test_the_cpu_is_not_concerned_by_autocast_for_cuda():
    with autocast(F16), FakeTensorMode():
        x = torch.empty(5, 40, dtype=BF16)
        assert tilenorm.rms_norm(x, (40,)).dtype == F.rms_norm(x, (40,)).dtype == BF16


@NEEDS_GPU
def test_on_a_gpu_a_region_without_autocast_keeps_the_dtype():
    x = torch.randn(5, 64, device="cuda", dtype=BF16)
    with torch.autocast("cuda", BF16), torch.autocast("cuda", enabled=False):
        assert tilenorm.rms_norm(x, (64,)).dtype == BF16
