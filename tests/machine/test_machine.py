"""The machine computes what the kernels compute, and its disturbances show what they should."""

from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests import cases, tolerance
from tests.executors import Inputs
from tilenorm.launch.calls import every_gradient
from tilenorm.spec import WORDS, NormSpec

from . import survey
from .code import nvdisasm
from .executor import Compiled, moved, rewritten, specialized
from .floats import product_of, rounded, sum_of

pytestmark = pytest.mark.skipif(nvdisasm() is None, reason="needs nvdisasm")
B, F, H = "bfloat16", "float32", "float16"
SPECS = (
    pytest.param(NormSpec("layer", 1024, F, F, F), marks=pytest.mark.slow),
    pytest.param(NormSpec("rms", 256, B, B, residual=B), marks=pytest.mark.slow),
    NormSpec("rms", 37, H, H, gate=H),
)
# Rows of these had other bits in another place while ct.sum added them up, as a GPU showed first.
ONCE_MOVED = (
    (NormSpec("layer", 1024, F, F, F), True),
    (NormSpec("rms", 160, B, B, residual=B), False),
    pytest.param(NormSpec("rms", 256, B, B, residual=B), False, marks=pytest.mark.slow),
    pytest.param(NormSpec("rms", 512, B, B, residual=B), False, marks=pytest.mark.slow),
    (NormSpec("rms", 160, B, B, gate=B, gate_first=True), False),
    pytest.param(NormSpec("rms", 64, F, F, residual=F), True, marks=pytest.mark.slow),
    pytest.param(NormSpec("rms", 160, F, F, gate=F), True, marks=pytest.mark.slow),
)
# The first had other bits in the variant for rows that are unevenly spaced. The second and the
# third had them where rows were apart: in whole vectors, and in none.
VARIED = (
    pytest.param(NormSpec("layer", 1024, F, F, F), marks=pytest.mark.slow),
    NormSpec("rms", 4, B, B),
    pytest.param(NormSpec("rms", 4, F, F, gate=B, gate_first=True), marks=pytest.mark.slow),
    pytest.param(NormSpec("rms", 1024, F, F), marks=pytest.mark.slow),
)


# A weight with a bias, of which the compiler fuses a product and a sum, and roundings in between.
REWRITTEN = (
    NormSpec("layer", 37, B, F, B),
    NormSpec("rms", 256, F, F, F, 1.0, residual=F),
    NormSpec("layer", 1000, B, B, B, residual=B),
    NormSpec("rms", 96, H, H, H, rounding="early", heads=3),
    NormSpec("rms", 1024, B, F, B, rounding="early"),
    NormSpec("layer", 1024, H, H),
    NormSpec("rms", 2048, B, B),
)


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90"])
@pytest.mark.parametrize("spec", SPECS, ids=cases.label)
def test_results_are_those_of_the_oracle(spec, arch):
    executor, inputs = Compiled(arch), Inputs.random(spec, 5, "cpu")
    found = executor.forward(spec, inputs) | executor.backward(spec, inputs)
    truth, own = inputs.truth(spec), inputs.own(spec)
    for name, value in found.items():
        tolerance.assert_close(name, value, truth[name], own[name])


@pytest.mark.parametrize("activation", WORDS["activation"])
def test_a_gated_row_of_one_element_is_its_own_mean(activation, monkeypatch):
    """In the backward pass, too: its x · act(gate) is the product of the forward pass, rounded."""
    spec = NormSpec("layer", 1, F, F, gate=F, gate_first=True, activation=activation)
    executor, inputs = Compiled("sm_90"), Inputs.random(spec, 37, "cpu")
    found = executor.forward(spec, inputs)
    assert not found["y"].any()
    monkeypatch.setattr(Inputs, "stats", lambda self, spec: (found["mean"], found["rstd"]))
    found = executor.backward(spec, inputs)
    assert not found["dw"].any() and not found["dgate"].any()


def test_the_slope_of_a_sigmoid_keeps_its_digits():
    """Where σ(z) is close to 1, too, as where it is close to 0."""
    spec = NormSpec("rms", 64, F, gate=F, activation="sigmoid")
    inputs = Inputs.random(spec, 4, "cpu")
    inputs = replace(inputs, gate=torch.linspace(-15, 15, 4 * 64).reshape(4, 64))
    truth = inputs.truth(spec)["dgate"].value
    error = (Compiled("sm_90").backward(spec, inputs)["dgate"] / truth - 1).abs()
    assert error.max() < 5e-6


@pytest.mark.parametrize("spec, every", ONCE_MOVED, ids=cases.label)
def test_a_row_has_the_same_bits_in_every_place(spec, every):
    needs = every_gradient(spec)
    if not every:
        needs = needs._replace(dw=False, db=False)
    for what in (None, needs):
        assert not any(moved("sm_90", spec, what).values())


@pytest.mark.parametrize("spec", VARIED, ids=cases.label)
def test_a_row_has_the_same_bits_in_every_variant_of_a_kernel(spec):
    for what in (None, every_gradient(spec)):
        assert not any(specialized("sm_90", spec, what).values())


@pytest.mark.slow
@pytest.mark.parametrize("spec", REWRITTEN, ids=cases.label)
def test_the_backward_pass_writes_y_with_the_bits_of_the_forward_pass(spec):
    needs = every_gradient(spec)._replace(output=True)
    for asked in (needs, needs._replace(terms=3, dw=False, db=False)):
        assert not rewritten("sm_90", spec, asked)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("draw", range(12))
def test_drawn_rows_have_the_same_bits_in_every_place_and_variant(arch, draw):
    subject = next(islice(survey.subjects(arch, draw), draw, None))
    assert survey.fault(arch, *subject) is None


def values(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32).astype(np.float64)


PLAIN = SimpleNamespace(disturbs=True), SimpleNamespace(modifiers=())


def add(a, b):
    machine, instruction = PLAIN
    return sum_of(machine, a, b, instruction).astype(np.float64)


def multiply(a, b):
    machine, instruction = PLAIN
    return product_of(machine, a, b, instruction).astype(np.float64)


A, Z = values(1.25, -3.1, 0.7, 2e-3), values(0, 0, 0, 0)
X, Y = values(0.3, 9.5, -0.11, 1e-3), values(-4.0, 0.77, 12.0, 5e-3)


def test_equal_computations_stay_equal():
    assert (add(A, X) == add(X, A)).all()
    assert (add(-A, -X) == -add(A, X)).all()
    assert (add(A, Z) == A).all()
    assert (multiply(A, X) == multiply(-X, -A)).all()
    assert (multiply(A, values(1, 1, 1, 1)) == A).all()


def test_other_orders_and_other_fusions_show_in_16_bits():
    def bits(x):
        return torch.tensor(x).bfloat16()

    assert (bits(add(add(A, X), Y)) != bits(add(A, add(X, Y)))).any()
    assert (bits(add(A * X, Y)) != bits(add(multiply(A, X), Y))).any()


@pytest.mark.parametrize(
    "modifier, expected", [("RM", 1.0), ("RP", 1.0 + 2**-23), ("RZ", 1.0), ("SAT", 1.0)]
)
def test_rounding(modifier, expected):
    assert rounded(np.array([1 + 2**-24]), (modifier,))[0] == np.float32(expected)
