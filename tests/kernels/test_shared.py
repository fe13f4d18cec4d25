"""Blocks share rows too wide for one block, and exchange or compute each other's partial sums."""

import pytest
import torch

from tests import cases
from tests.executors import Inputs, Interpreter
from tilenorm.launch.calls import every_gradient
from tilenorm.launch.plan import plan_backward, plan_forward
from tilenorm.spec import NormSpec

from .helpers import assert_same_bits, check, each_spec, every_result

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


@each_spec(argvalues=WIDEST)
@pytest.mark.parametrize("executor", cases.INTERPRETERS, indirect=True)
def test_many_blocks_share_a_row(executor, spec):
    inputs = Inputs.random(spec, 1, executor.device)
    needs = every_gradient(spec)._replace(dw=False, db=False)
    found = executor.forward(spec, inputs) | executor.backward(spec, inputs, needs)
    check(spec, inputs, found)


def results(executor, spec, inputs, **how) -> dict[str, torch.Tensor]:
    assert plan_forward(spec, executor.target, True).chunks > 1
    assert plan_backward(spec, executor.target, every_gradient(spec)).chunks > 1
    return every_result(executor, spec, inputs, **how)


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
