"""norm_backward: whole rows in registers, a persistent grid; the column sum included."""

from functools import partial
from itertools import product

import pytest
import torch

from tests import cases
from tests.executors import Inputs
from tests.tolerance import assert_close
from tilenorm.launch.plan import Needs, plan_backward
from tilenorm.spec import NormSpec

over = partial(pytest.mark.parametrize, "executor, spec", indirect=["executor"], ids=cases.label)
each_spec = partial(pytest.mark.parametrize, "spec", ids=cases.label)
NEEDS = [Needs(*flags) for flags in product((False, True), repeat=3) if any(flags)]


def check(executor, spec, rows, needs=None):
    inputs = Inputs.random(spec, rows, executor.device)
    truth, own = inputs.truth(spec), inputs.own(spec)
    grads = executor.backward(spec, inputs, needs)
    for name, grad in grads.items():
        assert_close(name, grad, truth[name], own[name])
    return grads


@over(argvalues=cases.matrix("backward", wide=False))
def test_every_regime(executor, spec):
    check(executor, spec, executor.rows_beyond_grid(spec, "backward"))


@each_spec(argvalues=cases.all_affine(24) + cases.all_affine(37))
@pytest.mark.parametrize("executor", ["interpreter_sm_90", "gpu"], indirect=True)
def test_every_weight_bias_and_offset(executor, spec):
    check(executor, spec, 5)


@pytest.mark.parametrize("rows", [1, 2, 13, 131, 1031])
@each_spec(argvalues=[NormSpec("rms", n, "float16", "float16", "float16") for n in (16, 37)])
def test_any_number_of_rows(executor, spec, rows):
    check(executor, spec, rows)


@pytest.mark.parametrize("needs", NEEDS, ids=lambda n: "+".join(k for k, v in vars_of(n) if v))
@each_spec(argvalues=[NormSpec("rms", n, "bfloat16", "bfloat16", "float32") for n in (24, 37)])
def test_gradients_do_not_depend_on_which_are_asked(executor, spec, needs):
    grads = check(executor, spec, 13, needs)
    assert set(grads) == {name for name, asked in vars_of(needs) if asked}
    every = check(executor, spec, 13)
    for name, grad in grads.items():
        assert torch.equal(grad, every[name]), name


@pytest.mark.parametrize("needs", NEEDS, ids=lambda n: "+".join(k for k, v in vars_of(n) if v))
@each_spec(argvalues=[NormSpec("rms", n, "float32", "float32", "float32") for n in (24, 37, 4100)])
def test_what_is_not_asked_is_not_written(executor, spec, needs):
    rows = 5
    inputs = Inputs.random(spec, rows, executor.device)
    plan = plan_backward(spec, executor.target, needs)

    def poisoned(*shape: int) -> torch.Tensor:
        return torch.full(shape, torch.nan, device=executor.device)

    dx, dw, db = poisoned(rows, spec.hidden), poisoned(spec.hidden), poisoned(spec.hidden)
    shape = plan.partials(rows)
    partials = poisoned(*(shape or (2, spec.hidden)))
    workspace = poisoned(*(plan.workspace(rows) or (rows, 128)))
    calls = plan.calls(
        inputs.x,
        inputs.dy,
        inputs.weight,
        inputs.rstd(spec),
        dx,
        partials,
        workspace,
        dw,
        db,
        rows,
    )
    executor.run()(calls, inputs.x.get_device())
    for (name, asked), grad in zip(vars_of(needs), (dx, dw, db), strict=True):
        assert (grad.isfinite() if asked else grad.isnan()).all(), name
    assert (partials.isfinite() if shape else partials.isnan()).all()


def vars_of(needs: Needs) -> list[tuple[str, bool]]:
    return list(needs._asdict().items())
