"""Blocks share rows too wide for one block, and exchange or compute each other's partial sums."""

from functools import partial

import pytest
import torch

from tests import cases
from tests.executors import Inputs, Interpreter
from tests.tolerance import assert_close
from tilenorm.launch.calls import Needs, every_gradient
from tilenorm.launch.plan import plan_backward, plan_forward
from tilenorm.spec import NormSpec

over = partial(pytest.mark.parametrize, "executor, spec", indirect=["executor"], ids=cases.label)
each_spec = partial(pytest.mark.parametrize, "spec", ids=cases.label)

# For wider rows the interpreter's column sum takes seconds, and works as for narrower rows.
SUMMED = 20480
# On sm_80, which has no table, blocks share rows of this spec in both directions.
SHORT = NormSpec("rms", 4104, "bfloat16", "bfloat16", "bfloat16", 1.0)
# Wider than the rows that cases.matrix gives the interpreter.
WIDEST = [
    NormSpec("layer", 65537, "bfloat16", "bfloat16", "bfloat16", residual="bfloat16"),
    NormSpec("rms", 262144, "bfloat16", "bfloat16"),
    NormSpec("layer", 262144, "float32", "float32"),
]
# These specs cover one and two partial sums for each chunk, packed and not, whole vectors and not,
# and every optional input. The last chunk has 1, 4 or 8 columns.
EXCHANGED = [
    NormSpec("rms", 16392, "bfloat16", "bfloat16"),
    NormSpec("rms", 16385, "float32", residual="bfloat16", heads=2, weight="float32"),
    NormSpec("layer", 16392, "float16", "float16", "float16", residual="float16"),
    NormSpec("layer", 16388, "float32", "float32", "float32", 1.0),
    NormSpec("rms", 16392, "bfloat16", "bfloat16", gate="bfloat16"),
    NormSpec("rms", 16385, "bfloat16", "float32", gate="float32", gate_first=True),
]
ON_GPU = [
    NormSpec(hidden=n, dtype=dtype, weight=dtype, **fields)
    for n, dtype in (
        (20480, "float32"),
        (40000, "bfloat16"),
        (65536, "float16"),
        (131072, "bfloat16"),
        (65537, "float32"),
        (262144, "bfloat16"),
    )
    for fields in (
        {"norm": "rms"},
        {"norm": "layer", "bias": dtype, "residual": dtype},
        {"norm": "rms", "gate": dtype},
        {"norm": "rms", "gate": dtype, "gate_first": True},
    )
]


def check(inputs, spec, results):
    truth, own = inputs.truth(spec), inputs.own(spec)
    for name, found in results.items():
        assert_close(name, found, truth[name], own[name])


@over(argvalues=cases.matrix("forward", shared=True))
def test_forward_in_every_regime(executor, spec):
    inputs = Inputs.random(spec, 3, executor.device)
    check(inputs, spec, executor.forward(spec, inputs))


@over(argvalues=cases.matrix("backward", shared=True))
def test_backward_in_every_regime(executor, spec):
    sums = executor.name == "gpu" or spec.hidden <= SUMMED
    needs = every_gradient(spec)
    if not sums:
        needs = needs._replace(dw=False, db=False)
    # Some sets of blocks take two rows or more. If there are many sets, 13 rows save time.
    rows = min(13, executor.rows_beyond_grid(spec, "backward"))
    inputs = Inputs.random(spec, rows, executor.device)
    check(inputs, spec, executor.backward(spec, inputs, needs))


@each_spec(argvalues=WIDEST)
@pytest.mark.parametrize("executor", cases.INTERPRETERS, indirect=True)
def test_many_blocks_share_a_row(executor, spec):
    inputs = Inputs.random(spec, 1, executor.device)
    needs = every_gradient(spec)._replace(dw=False, db=False)
    check(inputs, spec, executor.forward(spec, inputs))
    check(inputs, spec, executor.backward(spec, inputs, needs))


# The tests of whole rows try every variant; here some variants of each dtype are enough.
@each_spec(argvalues=cases.every_variant(4104)[::8] + cases.every_variant(4107)[4::8])
@pytest.mark.parametrize("executor", ["interpreter_sm_80", "gpu"], indirect=True)
def test_every_variant(executor, spec):
    inputs = Inputs.random(spec, 2, executor.device)
    check(inputs, spec, executor.forward(spec, inputs) | executor.backward(spec, inputs))


@pytest.mark.parametrize("rows", [1, 2, 13])
@pytest.mark.parametrize("executor", ["interpreter_sm_80", "gpu"], indirect=True)
def test_any_number_of_rows(executor, rows):
    inputs = Inputs.random(SHORT, rows, executor.device)
    grads = executor.backward(SHORT, inputs)
    assert set(grads) == {"dx", "dw", "db"}
    check(inputs, SHORT, grads)


def results(executor, spec, inputs, **how) -> dict[str, torch.Tensor]:
    assert plan_forward(spec, executor.target, True).chunks > 1
    assert plan_backward(spec, executor.target, every_gradient(spec)).chunks > 1
    return executor.forward(spec, inputs, **how) | executor.backward(spec, inputs, **how)


def assert_same_bits(found, expected):
    assert set(found) == set(expected)
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


@each_spec(argvalues=EXCHANGED)
@pytest.mark.parametrize("order", [None, "reverse", 1], ids=["ascending", "reversed", "shuffled"])
def test_computed_and_exchanged_partial_sums_have_the_same_bits(spec, order):
    # Without exchange the first block of a row computes all partial sums, and the last finds all.
    executor = Interpreter("sm_80")
    inputs = Inputs.random(spec, 2, executor.device)
    expected = results(executor, spec, inputs)
    assert_same_bits(results(executor, spec, inputs, exchange=False, order=order), expected)


@each_spec(argvalues=ON_GPU)
@pytest.mark.parametrize("executor", ["gpu"], indirect=True)
def test_blocks_that_do_not_wait_have_the_same_bits(executor, spec):
    for rows in (1, 300):
        inputs = Inputs.random(spec, rows, executor.device)
        expected = results(executor, spec, inputs)
        assert_same_bits(results(executor, spec, inputs, exchange=False), expected)


@each_spec(argvalues=[NormSpec("rms", 40000, dtype, "float32") for dtype in cases.DTYPES])
@pytest.mark.parametrize("executor", ["interpreter_sm_90", "gpu"], indirect=True)
def test_output_does_not_depend_on_saving(executor, spec):
    assert plan_forward(spec, executor.target, True).chunks > 1
    inputs = Inputs.random(spec, 2, executor.device)
    saved = executor.forward(spec, inputs)
    found = executor.forward(spec, inputs, SAVE=False)
    assert found["rstd"].isnan().all()
    assert torch.equal(found["y"], saved["y"])


@pytest.mark.parametrize("needs", [Needs(True, False, False), Needs(False, True, True)], ids=str)
def test_gradients_do_not_depend_on_other_needed_gradients(needs):
    executor = Interpreter("sm_80")
    assert plan_backward(SHORT, executor.target, needs).chunks > 1
    inputs = Inputs.random(SHORT, 5, executor.device)
    every = executor.backward(SHORT, inputs)
    for name, grad in executor.backward(SHORT, inputs, needs).items():
        assert torch.equal(grad, every[name]), name
