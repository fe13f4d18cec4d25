"""The backward pass: norm_backward and the column sum."""

from dataclasses import replace

import pytest
import torch

from tests import cases, oracle
from tests.executors import Inputs, Interpreter
from tilenorm.launch.calls import BackwardArrays, Needs, every_gradient
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


def given(executor, spec, rows, needs) -> Inputs:
    inputs = Inputs.random(spec, rows, executor.device)
    return inputs if needs.dsum else replace(inputs, dsum=None)


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
    inputs = given(executor, spec, 13, needs)
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
