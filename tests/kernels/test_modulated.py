"""Rows that are modulated by group: both directions against the oracle, and equal bits."""

from itertools import product

import pytest
import torch

from tests import cases
from tests.executors import Inputs, Interpreter
from tilenorm.launch.calls import every_gradient
from tilenorm.launch.plan import plan_backward
from tilenorm.spec import NormSpec

from .helpers import assert_same_bits, check, every_result

# (groups, rows of each): a group for all blocks, tiles of several rows that end within a group,
# blocks that have several groups, and, last, groups that no blocks share.
SHAPES = ((1, 67), (5, 3), (3, 18), (70, 1), (66, 2))
SPECS = [
    NormSpec(hidden=hidden, dtype=dtype, **more)
    for hidden, dtype in ((64, "bfloat16"), (37, "float16"), (24, "float32"))
    for more in cases.modulations(dtype)
]
# Rows in two segments, on 8 warps; the second one has rows that do not fill vectors.
WIDE = [
    NormSpec(hidden=hidden, dtype="bfloat16", **more)
    for hidden, more in zip((1152, 1155), cases.modulations("bfloat16")[2::7], strict=False)
]
# Each spec in two shapes, which take turns.
TURNS = [
    pytest.param(
        spec,
        *SHAPES[(i + k) % len(SHAPES)],
        id=f"{cases.label(spec)}-{k}",
        marks=pytest.mark.slow if k else (),
    )
    for i, spec in enumerate(SPECS + WIDE)
    for k in (0, 2)
]


@pytest.mark.parametrize("spec, groups, tokens", TURNS)
@pytest.mark.parametrize("executor", cases.EXECUTORS[:1] + cases.EXECUTORS[-1:], indirect=True)
def test_accuracy(executor, spec, groups, tokens):
    inputs = Inputs.random(spec, groups * tokens, executor.device, groups=groups)
    check(spec, inputs, executor.forward(spec, inputs))
    check(spec, inputs, executor.backward(spec, inputs))


def test_shapes_of_both_kinds():
    """Blocks share groups in some cases of SHAPES, and have whole groups in others."""
    plan = plan_backward(SPECS[0], cases.target("sm_80"), every_gradient(SPECS[0]))
    assert {plan.sums(groups).WHOLE for groups, _ in SHAPES} == {False, True}


@pytest.mark.parametrize("spec", (SPECS[2], SPECS[5], SPECS[13]), ids=cases.label)
@pytest.mark.parametrize("groups", (3, 72))
def test_gradients_do_not_depend_on_other_needed_gradients(spec, groups):
    executor, every = Interpreter("sm_90"), every_gradient(spec)
    inputs = Inputs.random(spec, 72, executor.device, groups=groups)
    expected = executor.backward(spec, inputs, every)
    names = [name for name in cases.GRADIENTS if getattr(every, name)]
    nothing = every._replace(**dict.fromkeys(names, False), modulation=(False,) * 3)
    one = [nothing._replace(**{name: True}) for name in names]
    by_group = [tuple(i == j for j in range(3)) for i in range(3) if every.modulation[i]]
    one += [nothing._replace(modulation=asked) for asked in by_group]
    found = {}
    for needs in one:
        found |= executor.backward(spec, inputs, needs)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("spec", (SPECS[2], SPECS[12], WIDE[0]), ids=cases.label)
@pytest.mark.parametrize(
    "how", [{"fill": 1e30}, {"fill": -1e30}, {"order": "reverse"}, {"order": 1}], ids=str
)
def test_bits_do_not_depend_on_padding_or_the_order_of_blocks(spec, how):
    executor = Interpreter("sm_90")
    for groups, tokens in ((2, 13), (40, 1)):
        inputs = Inputs.random(spec, groups * tokens, executor.device, groups=groups)
        expected = every_result(executor, spec, inputs)
        assert_same_bits(every_result(executor, spec, inputs, **how), expected)


@pytest.mark.parametrize(
    "spec, arch", [*product((SPECS[2], SPECS[20]), ("sm_80", "sm_90"))], ids=str
)
def test_bits_of_a_row_do_not_depend_on_where_its_group_stands(spec, arch):
    executor = Interpreter(arch)
    inputs = Inputs.random(spec, 36, executor.device, groups=6)
    order = torch.tensor([3, 5, 0, 1, 4, 2])

    def moved(tensor):
        return tensor.unflatten(0, (6, -1))[order].flatten(0, 1)

    other = inputs.with_rows(lambda _, t: moved(t))
    groups = ("mod_scale", "mod_shift", "mod_gate")
    there = {n: t[order] for n in groups if (t := getattr(inputs, n)) is not None}
    other = type(inputs)(**vars(other) | there)
    found, expected = (every_result(executor, spec, given) for given in (other, inputs))
    for name in ("y", "sum", "mean", "rstd", "dx", "dresidual"):
        if name in expected:
            assert torch.equal(found[name], moved(expected[name])), name
