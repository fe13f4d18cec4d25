"""The outputs of every function: accurate, and the same bits with grad and without."""

import pytest
import torch

from .helpers import (
    DTYPES,
    EACH_CALL,
    EACH_DEVICE,
    FAMILY,
    GATED,
    LAYER,
    RMS,
    assert_within,
    call,
    expected_of,
    leaves_of,
    name_of,
    random,
    tensors_of,
)

pytestmark = EACH_DEVICE
BF16 = torch.bfloat16

PARAMETERS = {"none": (), "weight": ("weight",), "bias": ("bias",), "both": ("weight", "bias")}
# form, dtype, parameters, their dtype, offset: all of rms_norm's, and of the others one of a kind.
ACCURACY = [
    (name, dtype, parameters, None, offset)
    for name in FAMILY
    for dtype in DTYPES
    for parameters in PARAMETERS
    for offset in (0.0, 1.0, -0.5)
    if name == "rms_norm" or (parameters == "both" and not offset) or (dtype, offset) == (BF16, 1.0)
]
ACCURACY += [
    (name, BF16, "both", torch.float32, offset) for name in FAMILY for offset in (0.0, 1.0)
]


def without(tensors, parameters):
    kept = PARAMETERS[parameters]
    return {n: t for n, t in tensors.items() if n in kept or n not in ("weight", "bias")}


@pytest.mark.parametrize("name, dtype, parameters, parameter, offset", ACCURACY, ids=name_of)
def test_accuracy(device, name, dtype, parameters, parameter, offset):
    form = FAMILY[name]
    tensors = tensors_of(form, 7, 96, dtype=dtype, parameter=parameter, device=device)
    tensors = without(tensors, parameters)
    outputs = call(form, tensors, offset=offset)
    assert outputs[0].dtype == dtype
    expected = expected_of(form, tensors, offset=offset)
    for name, y in zip(("output", "sum"), outputs, strict=False):
        assert_within(name, y, *expected[name])


@pytest.mark.parametrize("form", [RMS, LAYER], ids=["rms", "layer"])
@pytest.mark.parametrize("stride", [0, 2])
def test_weight_and_bias_may_be_strided(device, form, stride):
    tensors = tensors_of(form, 5, 24, device=device)
    view = random(48, device=device, seed=1).as_strided((24,), (stride,))
    got = call(form, tensors | {"weight": view, "bias": view})
    expected = call(form, tensors | {"weight": view.clone(), "bias": view.clone()})
    assert torch.equal(got[0], expected[0])


@EACH_CALL
@pytest.mark.parametrize("n", [1, 3, 24, 1000])
def test_with_and_without_grad_the_same_bits(device, form, n):
    tensors = tensors_of(form, 5, n, dtype=torch.bfloat16, device=device)
    leaves = leaves_of(tensors)
    with torch.no_grad():
        plain = call(form, leaves)
    assert not any(y.requires_grad for y in plain)
    with torch.inference_mode():
        inferred = call(form, tensors)
    for a, b, c in zip(plain, call(form, leaves), inferred, strict=True):
        assert b.requires_grad and c.is_inference()
        assert torch.equal(a, b) and torch.equal(a, c)


def test_the_norm_comes_before_the_gate_unless_told(device):
    tensors = tensors_of(GATED, 7, 96, device=device)
    first = call(GATED, tensors, norm_before_gate=True)[0]
    assert torch.equal(call(GATED, tensors)[0], first)
    assert not torch.allclose(call(GATED, tensors, norm_before_gate=False)[0], first)
