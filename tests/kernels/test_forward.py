"""row_forward and stream_forward, which hold whole rows in registers."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests import cases
from tests.executors import Inputs
from tests.tolerance import assert_close
from tilenorm.launch import calls
from tilenorm.launch.calls import ForwardArrays
from tilenorm.launch.plan import plan_forward
from tilenorm.ops import cutile
from tilenorm.spec import NormSpec

over = partial(pytest.mark.parametrize, "executor, spec", indirect=["executor"], ids=cases.label)
each_spec = partial(pytest.mark.parametrize, "spec", ids=cases.label)
SAVING = [
    NormSpec(norm, n, "bfloat16", "float32", residual=residual)
    for norm in ("rms", "layer")
    for residual in (None, "bfloat16")
    for n in (16, 37)
]


def check(executor, spec, rows):
    inputs = Inputs.random(spec, rows, executor.device)
    truth, own = inputs.truth(spec), inputs.own(spec)
    for name, found in executor.forward(spec, inputs).items():
        assert_close(name, found, truth[name], own[name])


@over(argvalues=cases.matrix("forward", shared=False))
def test_every_regime(executor, spec):
    check(executor, spec, executor.rows_beyond_grid(spec, "forward"))


@each_spec(argvalues=cases.every_variant(24) + cases.every_variant(37))
@pytest.mark.parametrize("executor", ["interpreter_sm_90", "gpu"], indirect=True)
def test_every_variant(executor, spec):
    check(executor, spec, 5)


@pytest.mark.parametrize("rows", [1, 2, 13, 131, 1031])
@each_spec(argvalues=[NormSpec("rms", n, "float16", "float16") for n in (16, 37, 520)])
def test_any_number_of_rows(executor, spec, rows):
    check(executor, spec, rows)


@each_spec(argvalues=[*SAVING, NormSpec("rms", 1024, "bfloat16", "float32")])
def test_output_does_not_depend_on_saving(executor, spec):
    inputs = Inputs.random(spec, 13, executor.device)
    saved = executor.forward(spec, inputs)
    found = executor.forward(spec, inputs, SAVE=False)
    for name, tensor in found.items():
        if name in ("mean", "rstd"):
            assert tensor.isnan().all(), f"{name} was written"
        else:
            assert torch.equal(tensor, saved[name]), name


@each_spec(argvalues=[NormSpec("rms", 24, "float32"), NormSpec("rms", 37, "float32")])
def test_absent_arrays_are_not_touched(executor, spec):
    # A kernel that reads a placeholder would put NaN into y. A write would replace NaN.
    rows = 5
    inputs = Inputs.random(spec, rows, executor.device)
    names = set(ForwardArrays._fields) - {"x", "y"}
    absent = {name: torch.full_like(inputs.x, torch.nan) for name in names}
    y = torch.full_like(inputs.x, torch.nan)
    plan = replace(plan_forward(spec, executor.target, False), save=False)
    arrays = ForwardArrays(x=inputs.x, y=y, **absent)
    executor.run()(plan.launches(rows, inputs.eps), arrays, inputs.x.get_device())
    assert_close("y", y, inputs.truth(spec)["y"], inputs.own(spec)["y"])
    assert all(t.isnan().all() for t in absent.values())


@each_spec(argvalues=[NormSpec("rms", 37, "float32"), NormSpec("layer", 4096, "bfloat16")])
def test_more_tiles_than_a_side_of_a_grid(executor, spec, monkeypatch):
    monkeypatch.setattr(calls, "MAX_SIDE", 3)
    plan = replace(
        plan_forward(spec, executor.target, True)
    )  # a new plan, which remembers no grids
    rows = 11 * plan.config.rows - (plan.config.rows > 1)
    grids = [launch.grid for launch in plan.launches(rows, 1e-6)]
    assert grids == [(1, 2, 4), (1, 3, 1)]
    inputs = Inputs.random(spec, rows, executor.device)
    given = inputs.x, None, None, inputs.weight, inputs.bias
    y, *_ = cutile.forward(plan, given, inputs.eps, run=executor.run())
    assert_close("y", y, inputs.truth(spec)["y"], inputs.own(spec)["y"])


@pytest.mark.parametrize("dtype, mean", [("float32", 1000.0), ("bfloat16", 100.0)])
@pytest.mark.parametrize("hidden", [37, 1024, 4096, 12288, 40000])
@pytest.mark.parametrize("residual", [None, "float32"])
def test_a_mean_far_larger_than_the_deviation(executor, hidden, dtype, mean, residual):
    spec = NormSpec("layer", hidden, dtype, dtype, dtype, residual=residual)
    inputs = Inputs.random(spec, 5, executor.device)
    inputs = replace(inputs, x=inputs.x + mean)
    truth, own = inputs.truth(spec), inputs.own(spec)
    for name, found in executor.forward(spec, inputs).items():
        assert_close(name, found, truth[name], own[name])
