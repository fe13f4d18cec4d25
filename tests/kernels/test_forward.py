"""The forward kernels."""

from dataclasses import replace

import pytest
import torch

from tests import cases
from tests.executors import Inputs
from tilenorm.launch import calls
from tilenorm.launch.calls import ForwardArrays
from tilenorm.launch.plan import plan_forward
from tilenorm.ops import cutile
from tilenorm.spec import NormSpec

from .helpers import check, each_spec, over

SAVING = [
    NormSpec(norm, n, "bfloat16", "float32", residual=residual)
    for norm in ("rms", "layer")
    for residual in (None, "bfloat16")
    for n in (16, 37)
]
SAVING += [NormSpec("rms", n, "bfloat16", "float32") for n in (1024, 40000)]


@over(argvalues=cases.matrix("forward", shared=False))
def test_every_regime(executor, spec):
    inputs = Inputs.random(spec, executor.rows_beyond_grid(spec, "forward"), executor.device)
    check(spec, inputs, executor.forward(spec, inputs))


@over(argvalues=cases.matrix("forward", shared=True))
def test_every_regime_of_shared_rows(executor, spec):
    inputs = Inputs.random(spec, 3, executor.device)
    check(spec, inputs, executor.forward(spec, inputs))


@each_spec(argvalues=SAVING)
def test_output_does_not_depend_on_saving(executor, spec):
    inputs = Inputs.random(spec, 2 if spec.hidden > 1024 else 13, executor.device)
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
    check(spec, inputs, {"y": y})
    assert all(t.isnan().all() for t in absent.values())


@each_spec(argvalues=[NormSpec("rms", 37, "float32"), NormSpec("layer", 4096, "bfloat16")])
def test_more_tiles_than_a_side_of_a_grid(executor, spec, monkeypatch):
    monkeypatch.setattr(calls, "MAX_SIDE", 3)
    plan = replace(plan_forward(spec, executor.target, True))  # a new plan remembers no grids
    rows = 11 * plan.config.rows - (plan.config.rows > 1)
    grids = [launch.grid for launch in plan.launches(rows, 1e-6)]
    assert grids == [(1, 2, 4), (1, 3, 1)]
    inputs = Inputs.random(spec, rows, executor.device)
    given = inputs.x, None, None, inputs.weight, inputs.bias
    y, *_ = cutile.forward(plan, given, inputs.eps, run=executor.run())
    check(spec, inputs, {"y": y})


@pytest.mark.parametrize("dtype, mean", [("float32", 1000.0), ("bfloat16", 100.0)])
@pytest.mark.parametrize("hidden", [37, 1024, 4096, 12288, 40000])
@pytest.mark.parametrize("residual", [None, "float32"])
def test_a_mean_far_larger_than_the_deviation(executor, hidden, dtype, mean, residual):
    spec = NormSpec("layer", hidden, dtype, dtype, dtype, residual=residual)
    inputs = Inputs.random(spec, 5, executor.device)
    inputs = replace(inputs, x=inputs.x + mean)
    check(spec, inputs, executor.forward(spec, inputs))
