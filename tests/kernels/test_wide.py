"""The wide kernels: rows in chunks, partial sums in a workspace."""

from functools import partial

import pytest
import torch

from tests import cases
from tests.executors import Inputs, Interpreter
from tests.tolerance import assert_close
from tilenorm.launch.calls import Needs, every_gradient
from tilenorm.launch.plan import WideBackward, WideForward, plan_backward, plan_forward
from tilenorm.spec import NormSpec

over = partial(pytest.mark.parametrize, "executor, spec", indirect=["executor"], ids=cases.label)
each_spec = partial(pytest.mark.parametrize, "spec", ids=cases.label)

# Beyond this the interpreter's column sum takes seconds, and is that of narrower rows.
SUMMED = 20480
# Wide on sm_80, which has no table: one chunk and a part of the second.
SHORT = NormSpec("rms", 4104, "bfloat16", "bfloat16", "bfloat16", 1.0)


@over(argvalues=cases.matrix("forward", wide=True))
def test_forward_in_every_regime(executor, spec):
    inputs = Inputs.random(spec, 3, executor.device)
    truth, own = inputs.truth(spec), inputs.own(spec)
    for name, found in executor.forward(spec, inputs).items():
        assert_close(name, found, truth[name], own[name])


@over(argvalues=cases.matrix("backward", wide=True))
def test_backward_in_every_regime(executor, spec):
    sums = executor.name == "gpu" or spec.hidden <= SUMMED
    needs = every_gradient(spec)
    if not sums:
        needs = needs._replace(dw=False, db=False)
    # Two rows a group and one more; few are enough where the groups are many.
    rows = min(13, executor.rows_beyond_grid(spec, "backward"))
    inputs = Inputs.random(spec, rows, executor.device)
    truth, own = inputs.truth(spec), inputs.own(spec)
    for name, grad in executor.backward(spec, inputs, needs).items():
        assert_close(name, grad, truth[name], own[name])


# The flags are those of whole rows, whose tests try every variant: here some, in every dtype.
@each_spec(argvalues=cases.every_variant(4104)[::8] + cases.every_variant(4107)[4::8])
@pytest.mark.parametrize("executor", ["interpreter_sm_80", "gpu"], indirect=True)
def test_every_variant(executor, spec):
    inputs = Inputs.random(spec, 2, executor.device)
    truth, own = inputs.truth(spec), inputs.own(spec)
    found = executor.forward(spec, inputs) | executor.backward(spec, inputs)
    for name, tensor in found.items():
        assert_close(name, tensor, truth[name], own[name])


@pytest.mark.parametrize("rows", [1, 2, 13])
@pytest.mark.parametrize("executor", ["interpreter_sm_80", "gpu"], indirect=True)
def test_groups_of_rows(executor, rows):
    inputs = Inputs.random(SHORT, rows, executor.device)
    truth, own = inputs.truth(SHORT), inputs.own(SHORT)
    grads = executor.backward(SHORT, inputs)
    assert set(grads) == {"dx", "dw", "db"}
    for name, grad in grads.items():
        assert_close(name, grad, truth[name], own[name])


@each_spec(argvalues=[NormSpec("rms", 40000, dtype, "float32") for dtype in cases.DTYPES])
@pytest.mark.parametrize("executor", ["interpreter_sm_90", "gpu"], indirect=True)
def test_output_does_not_depend_on_saving(executor, spec):
    assert isinstance(plan_forward(spec, executor.target, True), WideForward)
    inputs = Inputs.random(spec, 2, executor.device)
    saved = executor.forward(spec, inputs)
    found = executor.forward(spec, inputs, save=False)
    assert set(saved) - set(found) == {"rstd"}
    assert torch.equal(found["y"], saved["y"])


@pytest.mark.parametrize("needs", [Needs(True, False, False), Needs(False, True, True)], ids=str)
def test_gradients_do_not_depend_on_which_are_asked(needs):
    executor = Interpreter("sm_80")
    assert isinstance(plan_backward(SHORT, executor.target, needs), WideBackward)
    inputs = Inputs.random(SHORT, 5, executor.device)
    every = executor.backward(SHORT, inputs)
    for name, grad in executor.backward(SHORT, inputs, needs).items():
        assert torch.equal(grad, every[name]), name
