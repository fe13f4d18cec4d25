"""gated_rms_norm and gated_layer_norm: both orders, other dtypes, and gates that overflow."""

import pytest
import torch
import torch.nn.functional as F

from .helpers import (
    EACH_DEVICE,
    FAMILY,
    GATED,
    assert_step,
    call,
    expected_of,
    random,
    step,
    tensors_of,
)

FORMS = {name: form for name, form in FAMILY.items() if form.other == "gate"}
EACH_ORDER = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
pytestmark = EACH_DEVICE

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


@EACH_ORDER
@pytest.mark.parametrize(
    "dtype, other",
    [(BF16, F32), (F32, BF16), (torch.float16, F32), (F64, F32)],
    ids=str,
)
def test_a_gate_of_another_dtype(device, form, dtype, other):
    tensors = tensors_of(form, 7, 96, dtype=dtype, other=other, device=device)
    got = step(form, tensors)
    assert (got["output"].dtype, got["input"].dtype, got["gate"].dtype) == (dtype, dtype, other)
    assert_step(got, expected_of(form, tensors))


def test_the_norm_comes_first_unless_told(device):
    tensors = tensors_of(GATED, 7, 96, device=device)
    first = call(GATED, tensors, norm_before_gate=True)[0]
    assert torch.equal(call(GATED, tensors)[0], first)
    assert not torch.allclose(call(GATED, tensors, norm_before_gate=False)[0], first)


@EACH_ORDER
@pytest.mark.parametrize("scale", [0.0, 1e-3, 20.0, 200.0])
def test_gates_of_every_size(device, form, scale):
    """Beyond 88, exp(-z) overflows; silu(-200) is -0."""
    tensors = tensors_of(form, 7, 96, device=device)
    # Gate and mean square of one size: what is normalised stays far from eps.
    tensors["gate"] *= scale
    if form is not GATED:
        tensors["gate"][:, 0] = 1.0
    got, expected = step(form, tensors), expected_of(form, tensors)
    assert all(g.isfinite().all() for g in got.values())
    assert_step(got, expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_gates_that_are_not_finite_are_as_silu_has_them(device, dtype, value):
    tensors = tensors_of(GATED, 3, 24, dtype=dtype, device=device)
    tensors["gate"][1, 5] = value
    got = step(GATED, tensors)
    leaf = tensors["gate"].float().requires_grad_()
    silu = F.silu(leaf)
    (slope,) = torch.autograd.grad(silu.sum(), leaf)
    for name, peer in (("output", silu), ("gate", slope)):
        found = got[name][1, 5].float().item()
        assert same_kind(found, peer[1, 5].item() * sign_of(tensors)), name
    assert got["output"].isfinite().sum() >= 71, "it spread to other elements"


def sign_of(tensors) -> float:
    """Of what multiplies the gate in the output of row 1, column 5."""
    ungated = call(FAMILY["rms_norm"], {n: t for n, t in tensors.items() if n != "gate"})[0]
    return float(ungated[1, 5].sign())


def same_kind(a: float, b: float) -> bool:
    """Both NaN, or both the same infinity."""
    return (a != a and b != b) or a == b


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_a_gate_before_the_norm_spoils_its_row_alone(device, value):
    form = FAMILY["gated_rms_norm, gate first"]
    tensors = tensors_of(form, 3, 24, device=device)
    clean = call(form, tensors)[0]
    tensors["gate"][1, 5] = value
    y = call(form, tensors)[0]
    product = tensors["input"] * F.silu(tensors["gate"].cpu()).to(device)
    expected = call(FAMILY["rms_norm"], tensors_without_gate(tensors, product))[0]
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y[::2], clean[::2])


def tensors_without_gate(tensors, product):
    return {"input": product, "weight": tensors["weight"], "bias": tensors["bias"]}


def test_the_sigmoid_of_zeros_gives_half_the_norm(device):
    form = FAMILY["gated_rms_norm, sigmoid"]
    tensors = tensors_of(form, 3, 24, device=device) | {"gate": random(3, 24, device=device) * 0}
    plain = call(FAMILY["rms_norm"], {n: t for n, t in tensors.items() if n != "gate"})[0]
    assert torch.equal(call(form, tensors)[0], 0.5 * plain)


@EACH_ORDER
def test_input_and_gate_may_be_halves_of_one_projection(device, form):
    tensors = tensors_of(form, 7, 96, device=device)
    both = torch.cat([tensors["input"], tensors["gate"]], -1)
    x, z = both.chunk(2, -1)
    assert torch.equal(call(form, tensors | {"input": x, "gate": z})[0], call(form, tensors)[0])


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("order", ["", ", gate first"], ids=["norm first", "gate first"])
def test_a_gate_of_zeros_gives_the_bias_or_nothing(device, norm, order):
    form = FAMILY[f"gated_{norm}{order}"]
    tensors = tensors_of(form, 3, 24, device=device) | {"gate": random(3, 24, device=device) * 0}
    y = call(form, tensors)[0]
    expected = tensors["bias"].expand_as(y) if order else torch.zeros_like(y)
    assert torch.equal(y, expected)
