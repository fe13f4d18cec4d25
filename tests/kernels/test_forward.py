"""The forward kernels."""

from dataclasses import replace

import pytest

from tests import cases
from tests.executors import Inputs
from tilenorm.launch import calls
from tilenorm.launch.plan import plan_forward
from tilenorm.ops import cutile
from tilenorm.spec import NormSpec

from .helpers import check, each_spec, over


@over(argvalues=cases.matrix("forward", shared=False))
def test_every_regime(executor, spec):
    inputs = Inputs.random(spec, executor.rows_beyond_grid(spec, "forward"), executor.device)
    check(spec, inputs, executor.forward(spec, inputs))


@over(argvalues=cases.matrix("forward", shared=True))
def test_every_regime_of_shared_rows(executor, spec):
    inputs = Inputs.random(spec, 3, executor.device)
    check(spec, inputs, executor.forward(spec, inputs))


@each_spec(argvalues=[NormSpec("rms", 37, "float32"), NormSpec("layer", 4096, "bfloat16")])
def test_more_tiles_than_a_side_of_a_grid(executor, spec, monkeypatch):
    monkeypatch.setattr(calls, "MAX_SIDE", 3)
    plan = replace(plan_forward(spec, executor.target, True))  # a new plan remembers no grids
    rows = 11 * plan.config.rows - (plan.config.rows > 1)
    grids = [launch.grid for launch in plan.launches(rows, 1e-6)]
    assert grids == [(1, 2, 4), (1, 3, 1)]
    inputs = Inputs.random(spec, rows, executor.device)
    given = inputs.tensors(spec)
    y, *_ = cutile.bind_forward(plan, executor.run())(given, inputs.eps)
    check(spec, inputs, {"y": y})


@pytest.mark.parametrize("dtype, mean", [("float32", 1000.0), ("bfloat16", 100.0)])
@pytest.mark.parametrize("hidden", [37, 1024, 4096, 12288, 40000])
@pytest.mark.parametrize("residual", [None, "float32"])
def test_a_mean_far_larger_than_the_deviation(executor, hidden, dtype, mean, residual):
    spec = NormSpec("layer", hidden, dtype, dtype, dtype, residual=residual)
    inputs = Inputs.random(spec, 5, executor.device)
    inputs = replace(inputs, x=inputs.x + mean)
    check(spec, inputs, executor.forward(spec, inputs))
