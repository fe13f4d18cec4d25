"""rounding="early" gives the bits of transformers' modules, "late" those of PyTorch's functions."""

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


EARLY = {"rounding": "early"}
# Of each model: the form and its options, and the class of transformers, by its file.
MODELS = {
    "Llama": (RMS, EARLY, "llama", "LlamaRMSNorm"),
    "Gemma": (RMS, {"offset": 1.0}, "gemma", "GemmaRMSNorm"),
    "Qwen3-Next, gated": (GATED, EARLY, "qwen3_next", "Qwen3NextRMSNormGated"),
    "Mamba, gated": (GATE_FIRST, EARLY, "mamba2", "MambaRMSNormGated"),
}
DTYPES = [(d, d) for d in (F32, BF16, F16)] + [(d, F32) for d in (BF16, F16)]


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


@EACH_DEVICE
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype, parameter", DTYPES, ids=name_of)
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


@EACH_DEVICE
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=name_of)
def test_the_bits_of_pytorchs_function(device, dtype):
    tensors = tensors_of(RMS, 3, 32, 128, dtype=dtype, device=device)
    del tensors["bias"]
    x, w = tensors.values()
    assert_bits(call(RMS, tensors)[0], F.rms_norm(x, w.shape, w, EPS))


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
