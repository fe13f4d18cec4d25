"""Large and tiny magnitudes, zeros, NaN and infinities give the results of PyTorch."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests import cases
from tests.executors import Inputs
from tests.tolerance import assert_close
from tilenorm.spec import WORDS, NormSpec

SIZES = (24, 37, 4104)
WEIGHTED = [NormSpec("rms", n, dtype, dtype) for n in SIZES for dtype in cases.DTYPES]
# In float32 x² must not overflow and must not become zero.
LARGE = {"float16": 1.5e4, "bfloat16": 1e17, "float32": 1e17}
TINY = {"float16": 1e-6, "bfloat16": 1e-17, "float32": 1e-17}

each_spec = pytest.mark.parametrize("spec", WEIGHTED, ids=cases.label)


def check(executor, spec, inputs, names) -> dict[str, Tensor]:
    truth, own = inputs.truth(spec), inputs.own(spec)
    found = executor.forward(spec, inputs)
    if not {"y", "rstd"}.issuperset(names):
        found |= executor.backward(spec, inputs)
    for name in names:
        assert_close(name, found[name], truth[name], own[name])
    return found


@each_spec
@pytest.mark.parametrize("scales", [LARGE, TINY], ids=["large", "tiny"])
@pytest.mark.parametrize("eps", [1e-6, 0.0])
def test_magnitudes(executor, spec, scales, eps):
    inputs = Inputs.random(spec, 5, executor.device)
    x = (inputs.x.float().clamp(-3, 3) * scales[spec.dtype]).to(inputs.x.dtype)
    # With a tiny x and eps = 0, dx would overflow float16, so dy is tiny too.
    dy = inputs.dy * (TINY["float16"] if scales is TINY and spec.dtype == "float16" else 1)
    check(executor, spec, replace(inputs, x=x, dy=dy, eps=eps), ("y", "rstd", "dx", "dw"))


@each_spec
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_one_special_element_in_x(executor, spec, value):
    inputs = Inputs.random(spec, 5, executor.device)
    inputs.x[2, 7] = value
    found = check(executor, spec, inputs, ("y", "rstd", "dx", "dw"))
    # A special element makes its own row NaN or zero. Infinity makes the other elements zero.
    assert found["y"].isnan().any(1).tolist() == [False, False, True, False, False]
    nans = int(found["dw"].isnan().sum())
    assert nans == (spec.hidden if math.isnan(value) else 1)


@each_spec
def test_one_nan_in_dy(executor, spec):
    inputs = Inputs.random(spec, 5, executor.device)
    inputs.dy[2, 7] = torch.nan
    check(executor, spec, inputs, ("dx", "dw"))


@each_spec
def test_a_row_of_zeros(executor, spec):
    inputs = Inputs.random(spec, 5, executor.device)
    inputs.x[2] = 0
    found = check(executor, spec, inputs, ("y", "rstd", "dx", "dw"))
    assert (found["y"][2] == 0).all()


@each_spec
def test_a_row_of_zeros_without_eps_is_nan(executor, spec):
    inputs = replace(Inputs.random(spec, 5, executor.device), eps=0.0)
    inputs.x[2] = 0
    found = check(executor, spec, inputs, ("y", "rstd"))
    assert found["y"].isnan().any(1).tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("hidden", SIZES)
def test_float16_overflows_to_infinity(executor, hidden):
    spec = NormSpec("rms", hidden, "float16", "float16")
    inputs = Inputs.random(spec, 5, executor.device)
    inputs.weight[::2] = 6e4
    found = check(executor, spec, inputs, ("y",))
    assert found["y"].isinf().any()


@pytest.mark.parametrize("activation", WORDS["activation"])
def test_a_gated_row_of_one_element_is_its_own_mean(executor, activation, monkeypatch):
    """In the backward pass, too: its x · act(gate) is the product of the forward pass, rounded."""
    gated = {"gate": "float32", "gate_first": True, "activation": activation}
    spec = NormSpec("layer", 1, "float32", "float32", **gated)
    inputs = Inputs.random(spec, 37, executor.device)
    found = executor.forward(spec, inputs)
    assert not found["y"].any()
    monkeypatch.setattr(Inputs, "stats", lambda self, spec: (found["mean"], found["rstd"]))
    found = executor.backward(spec, inputs)
    assert not found["dw"].any() and not found["dgate"].any()


def test_the_slope_of_a_sigmoid_keeps_its_digits(executor):
    """Where σ(z) is close to 1, too, as where it is close to 0."""
    spec = NormSpec("rms", 64, "float32", gate="float32", activation="sigmoid")
    gate = torch.linspace(-15, 15, 4 * 64, device=executor.device).reshape(4, 64)
    inputs = replace(Inputs.random(spec, 4, executor.device), gate=gate)
    truth = inputs.truth(spec)["dgate"].value.to(executor.device)
    error = (executor.backward(spec, inputs)["dgate"] / truth - 1).abs()
    assert error.max() < 5e-6
