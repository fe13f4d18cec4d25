"""Blocks share rows too wide for one block."""

import pytest

from tests import cases
from tests.executors import Inputs
from tilenorm.launch.calls import every_gradient
from tilenorm.spec import NormSpec

from .helpers import assert_same_bits, check, each_spec, every_result

# Wider than the rows that cases.matrix gives the interpreter.
WIDEST = [
    NormSpec("layer", 65537, "bfloat16", "bfloat16", "bfloat16", residual="bfloat16"),
    NormSpec("rms", 262144, "bfloat16", "bfloat16"),
    NormSpec("layer", 262144, "float32", "float32"),
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


@each_spec(argvalues=ON_GPU)
@pytest.mark.parametrize("executor", ["gpu"], indirect=True)
def test_blocks_that_do_not_wait_have_the_same_bits(executor, spec):
    for rows in (1, 300):
        inputs = Inputs.random(spec, rows, executor.device)
        expected = every_result(executor, spec, inputs)
        assert_same_bits(every_result(executor, spec, inputs, exchange=False), expected)
