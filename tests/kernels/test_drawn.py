"""Drawn calls of each kind of norm: rows of every kind, rows that are modulated by group, and heads
that are rotated. Results are within the error budget, and a row's bits depend on nothing beside it.

tests/ops/test_same_bits.py has the public functions in other layouts, batches and places.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial
from random import Random
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch

from tests.support import batch, cases, draw, rope
from tests.support.batch import Batch
from tests.support.calls import slow
from tests.support.draw import Case
from tests.support.executors import Executor, Inputs, Interpreter
from tests.support.results import assert_same_bits, check, check_undefined, every_result, seeds
from tests.support.rows import KINDS
from tests.support.tolerance import assert_close
from tilenorm.kernels import backward, forward
from tilenorm.launch.calls import every_gradient
from tilenorm.launch.plan import plan_backward
from tilenorm.spec import NormSpec
from tilenorm.table import MODULATION
from tilenorm.tools.precompile import compiling

# Examples of each executor, and the most elements of a row.
QUICK, MORE = (18, 60), (50, 300)
# On a GPU: specs, the most rows of each, and the most elements of a row.
SPECS, ROWS, WIDEST = 100, 400, 16384
# Of modulated rows: groups, and rows of each. A group for all blocks, tiles of several rows that
# end within a group, blocks that have several groups, and, last, groups that no blocks share.
GROUPS = ((1, 67), (5, 3), (3, 18), (70, 1), (66, 2))
WIDE = (1152, 1155)  # in two segments, on 8 warps
HIDDEN = (*(24, 37, 64) * 3, *WIDE)


def drawn(count: int, seed: int, hidden: int, rows: int) -> list[Batch]:
    return list(map(Batch.of, draw.drawn(count, seed, draw.Limits(hidden, rows, hidden * rows))))


def check_each(executor, batches: Iterable[Batch], *checks) -> None:
    for found in batches:
        with draw.naming(found):
            for check in (batch.check, *checks):
                check(executor, found)


def check_order(executor, found: Batch) -> None:
    check_undefined(executor, found.case.spec, found.inputs(executor.device), found.needs)


@pytest.mark.parametrize("examples", [QUICK, pytest.param(MORE, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "executor", [*cases.INTERPRETERS[:2], *slow(*cases.INTERPRETERS[2:])], indirect=True
)
def test_drawn_batches(executor, examples):
    """Fused products, as a GPU has them, are in the budget too."""
    count, hidden = examples
    seed = cases.INTERPRETERS.index(executor.name) + 1
    fused = partial(batch.check, fuse="first")
    check_each(executor, drawn(count, seed, hidden, 8), fused, batch.check_alone, check_order)


def test_a_row_of_equal_numbers_without_eps():
    """It is 0 / 0, and rounding decides what that gives. The row beside it is in the budget."""
    spec = NormSpec("layer", 8304, "float32", weight="float32", bias="float32")
    found = Batch(Case(spec, 2, 0), ("constant", "normal"), every_gradient(spec), 0.0)
    for fuse in ("", "first", "second"):
        batch.check(Interpreter("sm_90"), found, fuse=fuse)


def large() -> list[Batch]:
    """The batches for a GPU."""
    return drawn(SPECS, 0, WIDEST, ROWS)


@pytest.mark.long
@pytest.mark.parametrize("executor", ["gpu"], indirect=True)
def test_twenty_thousand_rows(executor):
    """All cores compile the kernels of the batches behind the one that runs."""
    batches = large()
    with compiling(batch.compile_ahead, [(b, executor.target) for b in batches], None) as done:
        check_each(executor, (found for found, _ in zip(batches, done, strict=True)))


class Call(NamedTuple):
    """Tensors of a norm that is modulated or rotated. groups: in which modulated rows lie."""

    spec: NormSpec
    inputs: Inputs | rope.Inputs
    groups: int = 0


def modulated(seed: int, device: str = "cpu") -> Call:
    """Dtypes, variants and shapes take turns."""
    dtype = cases.DTYPES[seed % len(cases.DTYPES)]
    variants = cases.modulations(dtype)
    more = variants[seed // len(cases.DTYPES) % len(variants)]
    spec = NormSpec(hidden=Random(seed).choice(HIDDEN), dtype=dtype, **more)
    groups, tokens = GROUPS[seed % len(GROUPS)]
    return Call(spec, Inputs.random(spec, groups * tokens, device, seed, groups), groups)


def rotated(seed: int) -> Call:
    spec, sizes = rope.drawn(Random(seed))
    return Call(spec, rope.Inputs.random(spec, sizes, seed))


@cache
def executor_of(seed: int) -> Executor:
    return Interpreter(Random(seed).choice(("sm_80", "sm_90")))


@seeds(10, 40)
@pytest.mark.parametrize("executor", cases.EXECUTORS[:1] + cases.EXECUTORS[-1:], indirect=True)
def test_accuracy_of_modulated_rows(executor, seed):
    spec, inputs, _ = modulated(seed, executor.device)
    check(spec, inputs, every_result(executor, spec, inputs))


def test_blocks_share_groups_or_have_whole_groups():
    spec, *_ = modulated(0)
    plan = plan_backward(spec, cases.target("sm_80"), every_gradient(spec))
    assert {plan.sums(groups).WHOLE for groups, _ in GROUPS} == {False, True}


@seeds(16, 40)
def test_accuracy_of_rotated_heads(seed):
    """Within the budget, or, rounded early, of Hugging Face's bits, given the same rstd."""
    spec, inputs, _ = rotated(seed)
    found = every_result(executor_of(seed), spec, inputs)
    if spec.rounding == "early":
        expected = rope.hugging_face(spec, inputs, found)
        assert_same_bits({name: found.pop(name) for name in expected}, expected)
    truths = rope.truths(spec, inputs)
    for name, t in found.items():
        assert_close(name, t, truths[name], truths[name].value.to(t.dtype))


@seeds(3, 12)
@pytest.mark.parametrize("draw_call", [modulated, rotated])
def test_bits_depend_neither_on_padding_nor_on_blocks_nor_on_other_gradients(draw_call, seed):
    (spec, inputs, _), executor = draw_call(seed), executor_of(seed)
    expected = check_undefined(executor, spec, inputs)
    if spec.modulated and spec.hidden in WIDE:
        return  # the needed gradients decide how many blocks add up
    for needs in cases.alone(spec):
        found = executor.backward(spec, inputs, needs)
        assert_same_bits(found, {name: expected[name] for name in found})


@seeds(4, 12)
def test_bits_of_a_row_do_not_depend_on_where_its_group_stands(seed):
    (spec, inputs, groups), executor = modulated(seed), executor_of(seed)
    order = torch.randperm(groups, generator=torch.Generator().manual_seed(seed))

    def moved(tensor):
        return tensor.unflatten(0, (groups, -1))[order].flatten(0, 1)

    there = {n: t[order] for n in MODULATION if (t := getattr(inputs, n)) is not None}
    other = replace(inputs.with_rows(lambda _, t: moved(t)), **there)
    found, expected = (every_result(executor, spec, given) for given in (other, inputs))
    for name in found.keys() & {"y", "sum", "mean", "rstd", "dx", "dresidual"}:
        assert_same_bits({name: found[name]}, {name: moved(expected[name])})


@seeds(3, 12)
def test_bits_of_a_token_do_not_depend_on_the_others(seed):
    spec, sizes = rope.drawn(Random(seed))
    spec = replace(spec, rotation=spec.rotation._replace(heads_first=False))
    sizes = sizes._replace(tokens=21)
    executor, inputs = Interpreter("sm_90"), rope.Inputs.random(spec, sizes, seed)
    first, count = 1 + seed % 5, 1 + seed % 11
    of_tokens = ["x", "dy", "key", "dsum", "positions"]
    of_tokens += [] if spec.rotation.positions else ["cos", "sin"]

    def some(t):
        return t[-1:, first : first + count]

    there = {n: some(t) for n in of_tokens if (t := getattr(inputs, n)) is not None}
    every, found = (
        every_result(executor, spec, given) for given in (inputs, replace(inputs, **there))
    )
    for name in found.keys() & {"y", "rstd", "dx", "key_y", "key_rstd", "dkey"}:
        expected = some(every[name].view(*sizes[:2], -1)).flatten()
        assert_same_bits({name: found[name].flatten()}, {name: expected})


SPEC = NormSpec("layer", 24, "bfloat16", "bfloat16", "float32", gate="bfloat16")


def larger_variance(*arguments):
    """The rows whose mean is large get a larger variance."""
    found = MOMENTS(*arguments)
    return replace(found, variance=found.variance * (1 + 0.1 * (found.mean > 3)))


def larger_sums(a, cut, home, tiles, first):
    WRITE_SUMS(a, cut, home, tuple(t * 1.01 for t in tiles), first)


MOMENTS, WRITE_SUMS = forward.moments, backward.write_sums
FAULTS = [
    (forward, "moments", larger_variance, ("normal", "large mean", "NaN"), "y of large mean"),
    (backward, "write_sums", larger_sums, ("normal", "zeros", "large gate"), "dw"),
]


@pytest.mark.parametrize("module, name, fault, kinds, found", FAULTS)
def test_an_error_of_one_kind_of_row_is_found(module, name, fault, kinds, found):
    some = Batch(Case(SPEC, len(kinds), 0), kinds, every_gradient(SPEC), 1e-6)
    batch.check(Interpreter("sm_90"), some)
    with patch.object(module, name, fault), pytest.raises(AssertionError, match=found):
        batch.check(Interpreter("sm_90"), some)


@pytest.mark.parametrize("hidden", [3, 7, 49, 112, 1000, 2600, 5121])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_mean_of_equal_numbers_is_that_number(dtype, hidden):
    """As PyTorch's is. A mean with a rounded 1 / N would be another float32."""
    spec = NormSpec("layer", hidden, dtype)
    inputs = Inputs.random(spec, 12, "cpu", seed=hidden)
    inputs = replace(inputs, x=inputs.x[:, :1].expand(-1, hidden).contiguous())
    found = Interpreter("sm_90").forward(spec, inputs)
    assert torch.equal(found["mean"], inputs.x[:, 0].float())
    assert not found["y"].any()


def test_drawn_batches_have_every_kind():
    """In so many batches as a GPU runs: each kind of rows and needed gradient."""
    found = large()
    assert sum(len(b.kinds) * (b.case.spec.heads or 1) for b in found) >= 20_000
    assert {k for b in found for k in b.kinds} == set(KINDS)
    assert {b.eps for b in found} == set(batch.EPS)
    for field in (*cases.GRADIENTS, "dsum"):
        assert {getattr(b.needs, field) for b in found} == {False, True}
