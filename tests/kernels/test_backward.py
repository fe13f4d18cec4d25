"""The backward pass: norm_backward and the column sum."""

from dataclasses import replace

import pytest
import torch

from tests import cases
from tests.executors import Inputs, Interpreter
from tilenorm.launch.calls import Needs, every_gradient
from tilenorm.launch.plan import plan_backward
from tilenorm.spec import NormSpec

from .helpers import check, over

# For wider rows the interpreter's column sum takes seconds, and works as for narrower rows.
SUMMED = 20480
# On sm_80, which has no table, blocks share rows of this spec in both directions.
SHORT = NormSpec("rms", 4104, "bfloat16", "bfloat16", "bfloat16", 1.0)
NEEDED = [
    NormSpec(hidden=n, **fields)
    for n in (24, 37)
    for fields in (
        {"norm": "rms", "dtype": "float32", "weight": "float32", "bias": "float32"},
        {"norm": "layer", "dtype": "bfloat16", "weight": "bfloat16", "residual": "float32"},
        {"norm": "rms", "dtype": "float32", "weight": "float32", "bias": "float32", "heads": 3}
        | {"gate": "float32"},
        {"norm": "rms", "dtype": "bfloat16", "weight": "float32", "gate": "bfloat16"}
        | {"gate_first": True},
    )
]


@over(argvalues=cases.matrix("backward", shared=False))
def test_every_regime(executor, spec):
    inputs = Inputs.random(spec, executor.rows_beyond_grid(spec, "backward"), executor.device)
    check(spec, inputs, executor.backward(spec, inputs))


@over(argvalues=cases.matrix("backward", shared=True))
def test_every_regime_of_shared_rows(executor, spec):
    needs = every_gradient(spec)
    if executor.name != "gpu" and spec.hidden > SUMMED:
        needs = needs._replace(dw=False, db=False)
    # Some sets of blocks take two rows or more. If there are many sets, 13 rows save time.
    rows = min(13, executor.rows_beyond_grid(spec, "backward"))
    inputs = Inputs.random(spec, rows, executor.device)
    check(spec, inputs, executor.backward(spec, inputs, needs))


@pytest.mark.parametrize(
    "spec, needs",
    [
        pytest.param(spec, needs, id=f"{cases.label(spec)}-{needs.label}")
        for spec in NEEDED
        for needs in cases.some_needs(spec)
    ],
)
def test_gradients_do_not_depend_on_other_needed_gradients(executor, spec, needs):
    inputs = Inputs.random(spec, 13, executor.device)
    inputs = inputs if needs.dsum else replace(inputs, dsum=None)
    grads = check(spec, inputs, executor.backward(spec, inputs, needs))
    assert set(grads) == {name for name in cases.GRADIENTS if getattr(needs, name)}
    every = executor.backward(spec, inputs, every_gradient(spec)._replace(dsum=needs.dsum))
    if spec.gate and executor.name == "gpu":
        return  # the other gradients decide which multiplications the compiler fuses
    for name, grad in grads.items():
        assert torch.equal(grad, every[name]), name


@pytest.mark.parametrize("needs", [Needs(True, False, False), Needs(False, True, True)], ids=str)
def test_gradients_of_shared_rows_do_not_depend_on_other_needed_gradients(needs):
    executor = Interpreter("sm_80")
    assert plan_backward(SHORT, executor.target, needs).chunks > 1
    inputs = Inputs.random(SHORT, 5, executor.device)
    every = executor.backward(SHORT, inputs)
    for name, grad in executor.backward(SHORT, inputs, needs).items():
        assert torch.equal(grad, every[name]), name
