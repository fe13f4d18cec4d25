"""Rows that are modulated by group: both directions against the oracle, and equal bits."""

from dataclasses import replace
from random import Random

import pytest
import torch

from tests.support import cases
from tests.support.executors import Inputs, Interpreter
from tests.support.results import assert_same_bits, check, every_result, seeds
from tilenorm.launch.calls import every_gradient
from tilenorm.launch.plan import plan_backward
from tilenorm.spec import NormSpec
from tilenorm.table import MODULATION

# (groups, rows of each): a group for all blocks, tiles of several rows that end within a group,
# blocks that have several groups, and, last, groups that no blocks share.
SHAPES = ((1, 67), (5, 3), (3, 18), (70, 1), (66, 2))
WIDE = (1152, 1155)  # in two segments, on 8 warps
HIDDEN = (*(24, 37, 64) * 3, *WIDE)


def call_of(seed: int, device="cpu") -> tuple[NormSpec, Inputs, int]:
    """A spec, inputs and their groups. Dtypes, variants and shapes take turns."""
    dtype = cases.DTYPES[seed % len(cases.DTYPES)]
    variants = cases.modulations(dtype)
    more = variants[seed // len(cases.DTYPES) % len(variants)]
    spec = NormSpec(hidden=Random(seed).choice(HIDDEN), dtype=dtype, **more)
    groups, tokens = SHAPES[seed % len(SHAPES)]
    return spec, Inputs.random(spec, groups * tokens, device, seed, groups), groups


@seeds(30, 90)
@pytest.mark.parametrize("executor", cases.EXECUTORS[:1] + cases.EXECUTORS[-1:], indirect=True)
def test_accuracy(executor, seed):
    spec, inputs, _ = call_of(seed, executor.device)
    check(spec, inputs, executor.forward(spec, inputs))
    check(spec, inputs, executor.backward(spec, inputs))


def test_shapes_of_both_kinds():
    """Blocks share groups in some cases of SHAPES, and have whole groups in others."""
    spec, *_ = call_of(0)
    plan = plan_backward(spec, cases.target("sm_80"), every_gradient(spec))
    assert {plan.sums(groups).WHOLE for groups, _ in SHAPES} == {False, True}


@seeds(5, 30)
def test_bits_do_not_depend_on_padding_the_order_of_blocks_or_other_needed_gradients(seed):
    (spec, inputs, _), executor = call_of(seed), Interpreter("sm_90")
    expected = every_result(executor, spec, inputs)
    for how in {"fill": 1e30, "order": "reverse"}, {"fill": -1e30, "order": 1}:
        assert_same_bits(every_result(executor, spec, inputs, **how), expected)
    if spec.hidden in WIDE:
        return  # the needed gradients decide how many blocks add up
    every = every_gradient(spec)
    names = [name for name in cases.GRADIENTS if getattr(every, name)]
    nothing = every._replace(**dict.fromkeys(names, False), modulation=(False,) * 3)
    one = [nothing._replace(**{name: True}) for name in names]
    by_group = [tuple(i == j for j in range(3)) for i in range(3) if every.modulation[i]]
    found = executor.forward(spec, inputs)
    for needs in (*one, *(nothing._replace(modulation=asked) for asked in by_group)):
        found |= executor.backward(spec, inputs, needs)
    assert_same_bits(found, expected)


@seeds(4, 30)
def test_bits_of_a_row_do_not_depend_on_where_its_group_stands(seed):
    (spec, inputs, groups), executor = call_of(seed), Interpreter(("sm_80", "sm_90")[seed % 2])
    order = torch.randperm(groups, generator=torch.Generator().manual_seed(seed))

    def moved(tensor):
        return tensor.unflatten(0, (groups, -1))[order].flatten(0, 1)

    there = {n: t[order] for n in MODULATION if (t := getattr(inputs, n)) is not None}
    other = replace(inputs.with_rows(lambda _, t: moved(t)), **there)
    found, expected = (every_result(executor, spec, given) for given in (other, inputs))
    for name in found.keys() & {"y", "sum", "mean", "rstd", "dx", "dresidual"}:
        assert_same_bits({name: found[name]}, {name: moved(expected[name])})
