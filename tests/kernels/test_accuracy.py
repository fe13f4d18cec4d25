"""Each schedule, variant and number of rows: every result is within the budget."""

from dataclasses import replace

import pytest
import torch

from tests.support import cases
from tests.support.executors import Inputs
from tests.support.results import assert_same_bits, check, each_spec, over
from tilenorm.launch import calls
from tilenorm.launch.calls import Needs, every_gradient
from tilenorm.launch.plan import plan_backward, plan_forward
from tilenorm.ops.passes import cutile
from tilenorm.spec import NormSpec
from tilenorm.table import OPTIONS


@over(argvalues=cases.matrix("forward"))
def test_every_regime_forward(executor, spec):
    inputs = Inputs.random(spec, executor.rows_beyond_grid(spec, "forward"), executor.device)
    check(spec, inputs, executor.forward(spec, inputs))


@each_spec(argvalues=[NormSpec("rms", 37, "float32"), NormSpec("layer", 4096, "bfloat16")])
def test_more_tiles_than_a_side_of_a_grid_forward(executor, spec, monkeypatch):
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
@pytest.mark.parametrize("hidden", [37, 4096, 40000])
@pytest.mark.parametrize("residual", [None, "float32"])
def test_a_mean_far_larger_than_the_deviation_forward(executor, hidden, dtype, mean, residual):
    spec = NormSpec("layer", hidden, dtype, dtype, dtype, residual=residual)
    inputs = Inputs.random(spec, 5, executor.device)
    inputs = replace(inputs, x=inputs.x + mean)
    check(spec, inputs, executor.forward(spec, inputs))


@pytest.mark.parametrize("hidden", [49, 1000])
def test_equal_numbers_have_a_variance_of_zero(executor, hidden):
    """With products that are fused, as on a GPU, the variance of such rows would be between -3e-6
    and -8e-5, and y NaN, if nothing kept it from being negative.
    """
    spec = NormSpec("layer", hidden, "float32")
    inputs = Inputs.random(spec, 12, executor.device, seed=hidden)
    x = (1e8 * (1.5 + inputs.x[:, :1].abs())).expand(-1, hidden).contiguous()
    for how in ({},) if executor.name == "gpu" else ({}, {"fuse": "first"}):
        found = executor.forward(spec, replace(inputs, x=x), **how)
        assert (found["mean"].reshape(-1) / x[:, 0] - 1).abs().max() < 2**-22
        assert found["y"].abs().max() < 0.01


# For wider rows the interpreter's column sum takes seconds, and works as for narrower rows.
SUMMED = 20480
# On sm_80, which has no table, blocks share rows of this spec in both directions.
SHORT = NormSpec("rms", 4104, "bfloat16", "bfloat16", "bfloat16", 1.0)
DX, DW_AND_DB = Needs(True, False, False), Needs(False, True, True)


@over(argvalues=cases.matrix("backward"))
def test_every_regime_backward(executor, spec):
    rows, needs = executor.rows_beyond_grid(spec, "backward"), every_gradient(spec)
    if executor.name != "gpu":
        # Some sets of blocks that share rows take two or more. Of many sets, few rows save time.
        shared = cases.shares(cases.config("backward", spec, executor.target), spec.hidden)
        rows = min(13, rows) if shared else rows
        if spec.hidden > SUMMED:
            needs = needs._replace(dw=False, db=False)
    inputs = Inputs.random(spec, rows, executor.device)
    if spec.norm == "layer" and spec.gate_first and spec.hidden == 1:
        # The mean is x · act(gate). The oracle's product is another float32 number than a GPU's.
        inputs = executor.with_own_statistics(spec, inputs)
    check(spec, inputs, executor.backward(spec, inputs, needs))


@pytest.mark.parametrize("needs", (DX, DW_AND_DB), ids=lambda needs: needs.label)
def test_gradients_of_shared_rows_do_not_depend_on_others(executor, needs):
    """test_drawn.py draws the gradients of other rows. With a gate they have other bits on a
    GPU: there the other gradients decide which multiplications the compiler fuses. An RMSNorm with
    a bias, which no function has, would have other segments with db than without, by sm_90's table.
    """
    spec = replace(SHORT, norm="layer")
    every = every_gradient(spec)._replace(dsum=needs.dsum)
    alone, whole = (plan_backward(spec, executor.target, asked) for asked in (needs, every))
    assert alone.config.widths == whole.config.widths
    inputs = replace(Inputs.random(spec, 13, executor.device), dsum=None)
    grads = check(spec, inputs, executor.backward(spec, inputs, needs))
    assert set(grads) == {name for name in cases.GRADIENTS if getattr(needs, name)}
    every = executor.backward(spec, inputs, every)
    assert_same_bits(grads, {name: every[name] for name in grads})


@pytest.mark.parametrize("hidden", [24, 37, 4104])
def test_float16_overflows_to_infinity(executor, hidden):
    spec = NormSpec("rms", hidden, "float16", "float16")
    inputs = Inputs.random(spec, 5, executor.device)
    inputs.weight[::2] = 6e4
    assert check(spec, inputs, executor.forward(spec, inputs))["y"].isinf().any()


@pytest.mark.parametrize("activation", OPTIONS["activation"].words)
def test_a_gated_row_of_one_element_is_its_own_mean(executor, activation):
    """In the backward pass, too: its x · act(gate) is the product of the forward pass, rounded."""
    gated = {"gate": "float32", "gate_first": True, "activation": activation}
    spec = NormSpec("layer", 1, "float32", "float32", **gated)
    inputs = Inputs.random(spec, 37, executor.device)
    assert not executor.forward(spec, inputs)["y"].any()
    found = executor.backward(spec, executor.with_own_statistics(spec, inputs))
    assert not found["dw"].any() and not found["dgate"].any()


def test_the_slope_of_a_sigmoid_keeps_its_digits(executor):
    """Where σ(z) is close to 1, too, as where it is close to 0."""
    spec = NormSpec("rms", 64, "float32", gate="float32", activation="sigmoid")
    gate = torch.linspace(-15, 15, 4 * 64, device=executor.device).reshape(4, 64)
    inputs = replace(Inputs.random(spec, 4, executor.device), gate=gate)
    truth = inputs.truth(spec)["dgate"].value.to(executor.device)
    error = (executor.backward(spec, inputs)["dgate"] / truth - 1).abs()
    assert error.max() < 5e-6


# Wider than the rows that cases.matrix gives the interpreter.
WIDEST = [
    NormSpec("layer", 65537, "bfloat16", "bfloat16", "bfloat16", residual="bfloat16"),
    NormSpec("rms", 262144, "bfloat16", "bfloat16"),
    NormSpec("layer", 262144, "float32", "float32"),
]


@each_spec(argvalues=WIDEST)
@pytest.mark.parametrize("executor", cases.INTERPRETERS, indirect=True)
def test_many_blocks_share_a_row(executor, spec):
    inputs = Inputs.random(spec, 1, executor.device)
    needs = every_gradient(spec)._replace(dw=False, db=False)
    found = executor.forward(spec, inputs) | executor.backward(spec, inputs, needs)
    check(spec, inputs, found)
