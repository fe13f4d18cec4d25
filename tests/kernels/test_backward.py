"""norm_backward on rows that one block holds, and the column sum."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests import cases, oracle
from tests.executors import Inputs
from tests.tolerance import assert_close
from tilenorm.launch.calls import BackwardArrays, every_gradient
from tilenorm.launch.plan import plan_backward
from tilenorm.spec import NormSpec

over = partial(pytest.mark.parametrize, "executor, spec", indirect=["executor"], ids=cases.label)
each_spec = partial(pytest.mark.parametrize, "spec", ids=cases.label)
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


def check(executor, spec, rows, needs=None):
    inputs = Inputs.random(spec, rows, executor.device)
    if needs and not needs.dsum:
        inputs = replace(inputs, dsum=None)
    truth, own = inputs.truth(spec), inputs.own(spec)
    grads = executor.backward(spec, inputs, needs)
    for name, grad in grads.items():
        assert_close(name, grad, truth[name], own[name])
    return grads


@over(argvalues=cases.matrix("backward", shared=False))
def test_every_regime(executor, spec):
    check(executor, spec, executor.rows_beyond_grid(spec, "backward"))


@each_spec(argvalues=cases.every_variant(24) + cases.every_variant(37))
@pytest.mark.parametrize("executor", ["interpreter_sm_90", "gpu"], indirect=True)
def test_every_variant(executor, spec):
    check(executor, spec, 5)


@pytest.mark.parametrize("rows", [1, 2, 13, 131, 1031])
@each_spec(argvalues=[NormSpec("rms", n, "float16", "float16", "float16") for n in (16, 37)])
def test_any_number_of_rows(executor, spec, rows):
    check(executor, spec, rows)


def with_needs(*specs: NormSpec):
    return pytest.mark.parametrize(
        "spec, needs",
        [
            pytest.param(s, n, id=f"{cases.label(s)}-{n.label}")
            for s in specs
            for n in cases.some_needs(s)
        ],
    )


@with_needs(*NEEDED)
def test_gradients_do_not_depend_on_other_needed_gradients(executor, spec, needs):
    grads = check(executor, spec, 13, needs)
    assert set(grads) == {name for name in cases.GRADIENTS if getattr(needs, name)}
    every = check(executor, spec, 13, every_gradient(spec)._replace(dsum=needs.dsum))
    if spec.gate and executor.name == "gpu":
        return  # the other gradients decide which multiplications the compiler fuses
    for name, grad in grads.items():
        assert torch.equal(grad, every[name]), name


@with_needs(*NEEDED, NormSpec("rms", 4100, "float32", "float32", "float32"))
def test_gradients_that_are_not_needed_are_not_written(executor, spec, needs):
    inputs = Inputs.random(spec, 6, executor.device)
    rows = inputs.x.numel() // spec.hidden
    plan = plan_backward(spec, executor.target, needs)
    mean, rstd = inputs.stats(spec)

    def poisoned(*shape: int) -> torch.Tensor:
        return torch.full(shape, torch.nan, device=executor.device)

    sums = (spec.heads or 1) * spec.hidden
    shapes = dict.fromkeys(("dx", "dresidual", "dgate", "y"), (rows, spec.hidden))
    shapes |= {"dw": (sums,), "db": (sums,)}
    found = {name: poisoned(*shape) for name, shape in shapes.items()}
    shape = plan.partials(rows)
    partials = poisoned(*(shape or (2, spec.hidden)))
    slots = torch.zeros(plan.slots(rows) or (1, 1), dtype=torch.int32, device=executor.device)
    arrays = BackwardArrays(
        x=oracle.total(spec, inputs.arguments),
        dy=(inputs.dy,),
        gate=inputs.gate if spec.gate else poisoned(1, 1),
        dsum=inputs.dsum if needs.dsum else poisoned(1, 1),
        weight=inputs.weight,
        bias=inputs.bias if spec.bias else poisoned(1),
        mean=poisoned(1) if mean is None else mean,
        rstd=rstd,
        partials=partials,
        slots=slots,
        **found,
    )
    executor.run()(plan.launches(rows), arrays, inputs.x.get_device())
    for name, grad in found.items():
        is_needed = getattr(needs, name, needs.output)
        assert (grad.isfinite() if is_needed else grad.isnan()).all(), name
    assert (partials.isfinite() if shape else partials.isnan()).all()
    assert bool(slots.any()) == (plan.slots(rows) is not None)
