"""norm_forward: whole rows in registers."""

from functools import partial

import pytest
import torch

from tests import cases
from tests.executors import Inputs
from tests.tolerance import assert_close
from tilenorm.launch.plan import plan_forward
from tilenorm.spec import NormSpec

over = partial(pytest.mark.parametrize, "executor, spec", indirect=["executor"], ids=cases.label)
each_spec = partial(pytest.mark.parametrize, "spec", ids=cases.label)


def check(executor, spec, rows):
    inputs = Inputs.random(spec, rows, executor.device)
    y, rstd = executor.forward(spec, inputs)
    truth, own = inputs.truth(spec), inputs.own(spec)
    assert_close("y", y, truth["y"], own["y"])
    assert_close("rstd", rstd, truth["rstd"], own["rstd"])


@over(argvalues=cases.matrix("forward", wide=False))
def test_every_regime(executor, spec):
    check(executor, spec, executor.rows_beyond_grid(spec, "forward"))


@each_spec(argvalues=cases.all_affine(24) + cases.all_affine(37))
@pytest.mark.parametrize("executor", ["interpreter_sm_90", "gpu"], indirect=True)
def test_every_weight_bias_and_offset(executor, spec):
    check(executor, spec, 5)


@pytest.mark.parametrize("rows", [1, 2, 13, 131, 1031])
@each_spec(argvalues=[NormSpec("rms", n, "float16", "float16") for n in (16, 37, 520)])
def test_any_number_of_rows(executor, spec, rows):
    check(executor, spec, rows)


@each_spec(argvalues=[NormSpec("rms", n, "bfloat16", "float32") for n in (16, 37, 1024)])
def test_output_does_not_depend_on_saving(executor, spec):
    inputs = Inputs.random(spec, 13, executor.device)
    saved, _ = executor.forward(spec, inputs)
    y, rstd = executor.forward(spec, inputs, save=False)
    assert rstd is None
    assert torch.equal(y, saved)


@each_spec(argvalues=[NormSpec("rms", 24, "float32"), NormSpec("rms", 37, "float32")])
def test_absent_arrays_are_not_touched(executor, spec):
    # NaN read from a placeholder would show in y, and a write would replace it.
    rows = 5
    inputs = Inputs.random(spec, rows, executor.device)
    weight, bias, rstd = (torch.full_like(inputs.x, torch.nan) for _ in range(3))
    y = torch.full_like(inputs.x, torch.nan)
    plan = plan_forward(spec, executor.target, False)
    calls = plan.calls(inputs.x, weight, bias, y, rstd, inputs.x, rows, inputs.eps)
    executor.run()(calls, inputs.x.get_device())
    assert_close("y", y, inputs.truth(spec)["y"], inputs.own(spec)["y"])
    assert all(t.isnan().all() for t in (weight, bias, rstd))
