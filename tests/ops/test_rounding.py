"""rounding="early" gives the bits of Hugging Face's modules, "late" those of PyTorch's functions.

The formulas are those of LlamaRMSNorm, GemmaRMSNorm, Qwen3NextRMSNormGated and MambaRMSNormGated in
transformers 5.23.
"""

import inspect

import pytest
import torch
import torch.nn.functional as F

from .helpers import (
    EACH_DEVICE,
    EACH_FORM,
    EPS,
    FAMILY,
    GATED,
    LAYER,
    RMS,
    assert_step,
    call,
    expected_of,
    name_of,
    same,
    step,
    tensors_of,
)

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
GATE_FIRST = FAMILY["gated_rms_norm, gate first"]


def x_hat(hidden):
    variance = hidden.pow(2).mean(-1, keepdim=True)
    return hidden * torch.rsqrt(variance + EPS)


def llama(hidden, weight):
    return weight * x_hat(hidden.to(F32)).to(hidden.dtype)


def gemma(hidden, weight):
    return (x_hat(hidden.float()) * (1.0 + weight.float())).type_as(hidden)


def qwen3_next_gated(hidden, weight, gate):
    normed = weight * x_hat(hidden.to(F32)).to(hidden.dtype)
    return (normed * F.silu(gate.to(F32))).to(hidden.dtype)


def mamba_gated(hidden, weight, gate):
    product = hidden.to(F32) * F.silu(gate.to(F32))
    return weight * x_hat(product).to(hidden.dtype)


EARLY = {"rounding": "early"}
MODELS = {
    "Llama": (RMS, EARLY, llama),
    "Gemma": (RMS, {"offset": 1.0}, gemma),
    "Qwen3-Next, gated": (GATED, EARLY, qwen3_next_gated),
    "Mamba, gated": (GATE_FIRST, EARLY, mamba_gated),
    "F.rms_norm": (RMS, {}, lambda x, w: F.rms_norm(x, w.shape, w, EPS)),
}
CASES = [(m, d, d) for m in MODELS for d in (F32, BF16, F16)]
CASES += [(m, d, F32) for m in MODELS if m != "F.rms_norm" for d in (BF16, F16)]


def assert_bits(device, got, expected):
    """Of the CPU; on a GPU sums have another order, which may tip a rounding."""
    if device == "cpu":
        assert torch.equal(got, expected)
    else:
        # Rounded early, x̂ may differ by one unit, and its product by one more.
        unit = torch.finfo(got.dtype)
        limits = {"rtol": max(2 * unit.eps, 6e-7), "atol": 2 * unit.tiny * unit.eps}
        torch.testing.assert_close(got, expected, **limits)


@EACH_DEVICE
@pytest.mark.parametrize("model, dtype, parameter", CASES, ids=name_of)
def test_the_bits_of_a_model(device, model, dtype, parameter):
    form, options, formula = MODELS[model]
    tensors = tensors_of(form, 3, 32, 128, dtype=dtype, parameter=parameter, device=device)
    del tensors["bias"]
    arguments = (tensors[n] for n in ("input", "weight", "gate") if n in tensors)
    # A float32 weight makes Llama's output float32; tilenorm's has the input's dtype.
    expected = formula(*arguments).to(dtype)
    assert_bits(device, call(form, tensors, **options)[0], expected)


def by_groups(form, tensors, groups):
    """Every group a head."""
    tensors = {n: t.unflatten(-1, (groups, -1)) for n, t in tensors.items()}
    return call(form, tensors, **EARLY)[0].flatten(-2)


CLASSES = {
    "Llama": ("llama", "LlamaRMSNorm"),
    "Gemma": ("gemma", "GemmaRMSNorm"),
    "Qwen3-Next, gated": ("qwen3_next", "Qwen3NextRMSNormGated"),
    "Mamba, gated": ("mamba2", "MambaRMSNormGated"),
}


@pytest.mark.parametrize("model", CLASSES)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
def test_the_bits_of_transformers(model, dtype):
    folder, name = CLASSES[model]
    kind = getattr(pytest.importorskip(f"transformers.models.{folder}.modeling_{folder}"), name)
    grouped = "group_size" in inspect.signature(kind).parameters
    module = kind(128, **({"group_size": 32} if grouped else {}), eps=EPS).to(dtype)
    form, options, _ = MODELS[model]
    tensors = tensors_of(form, 3, 32, 128, dtype=dtype)
    del tensors["bias"]
    with torch.no_grad():
        module.weight.copy_(tensors["weight"])
        expected = module(tensors["input"], *([tensors["gate"]] if "gate" in tensors else []))
    got = by_groups(form, tensors, 4) if grouped else call(form, tensors, **options)[0]
    assert torch.equal(got, expected)


@EACH_DEVICE
@EACH_FORM
def test_in_float32_both_are_one(device, form):
    tensors = tensors_of(form, 7, 96, device=device)
    assert same(step(form, tensors, **EARLY), step(form, tensors, rounding="late"))


@EACH_DEVICE
@EACH_FORM
def test_the_gradients_are_those_of_the_exact_formula(device, form):
    tensors = tensors_of(form, 7, 96, dtype=BF16, device=device)
    expected = expected_of(form, tensors, offset=1.0)
    assert_step(step(form, tensors, offset=1.0, **EARLY), expected, tensors)


@EACH_DEVICE
@pytest.mark.parametrize("parameter", [BF16, F32], ids=name_of)
def test_early_with_offset_and_bias(device, parameter):
    tensors = tensors_of(LAYER, 7, 96, dtype=BF16, parameter=parameter, device=device)
    x, w, b = tensors.values()
    rounded = F.layer_norm(x.float(), (96,), eps=EPS).to(BF16)
    product = rounded.float() * (w.float() + 1.0)
    product = product.to(BF16).float() if parameter == BF16 else product
    got = call(LAYER, tensors, offset=1.0, **EARLY)[0]
    # The reference's mean is not PyTorch's to the last bit, so x̂ may round to its neighbour.
    torch.testing.assert_close(got, (product + b.float()).to(BF16), rtol=2**-6, atol=2**-6)
