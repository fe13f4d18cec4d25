"""Values that tests/properties does not draw."""

from dataclasses import replace

import pytest
import torch

from tests.executors import Inputs
from tilenorm.spec import NormSpec
from tilenorm.table import OPTIONS

from .helpers import check


@pytest.mark.parametrize("hidden", [24, 37, 4104])
def test_float16_overflows_to_infinity(executor, hidden):
    spec = NormSpec("rms", hidden, "float16", "float16")
    inputs = Inputs.random(spec, 5, executor.device)
    inputs.weight[::2] = 6e4
    assert check(spec, inputs, executor.forward(spec, inputs))["y"].isinf().any()


@pytest.mark.parametrize("activation", OPTIONS["activation"].words)
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
