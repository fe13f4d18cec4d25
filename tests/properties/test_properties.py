"""Drawn batches of any shape, layout, flags and kinds of rows are within the error budget."""

from collections.abc import Iterable
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from tests.support import cases
from tests.support.executors import Inputs, Interpreter
from tilenorm.kernels import backward, forward
from tilenorm.launch.calls import every_gradient
from tilenorm.spec import NormSpec
from tilenorm.tools.precompile import compiling

from ..sweep import draw
from ..sweep.draw import Case
from . import batch
from .batch import Batch
from .rows import KINDS

# Examples of each executor, and the most elements of a row.
QUICK, MORE = (30, 60), (150, 300)
# On a GPU: specs, the most rows of each, and the most elements of a row.
SPECS, ROWS, WIDEST = 100, 400, 16384


def drawn(count: int, seed: int, hidden: int, rows: int) -> list[Batch]:
    return list(map(Batch.of, draw.drawn(count, seed, draw.Limits(hidden, rows, hidden * rows))))


def check_each(executor, batches: Iterable[Batch], *checks) -> None:
    for found in batches:
        try:
            for check in (batch.check, *checks):
                check(executor, found)
        except Exception as error:
            raise AssertionError(str(found)) from error


@pytest.mark.parametrize("examples", [QUICK, pytest.param(MORE, marks=pytest.mark.slow)])
@pytest.mark.parametrize("executor", cases.INTERPRETERS, indirect=True)
def test_drawn_batches(executor, examples):
    count, hidden = examples
    seed = cases.INTERPRETERS.index(executor.name) + 1
    check_each(executor, drawn(count, seed, hidden, 8), batch.check_alone)


def large() -> list[Batch]:
    """The batches for a GPU."""
    return drawn(SPECS, 0, WIDEST, ROWS)


@pytest.mark.parametrize("executor", ["gpu"], indirect=True)
def test_twenty_thousand_rows(executor):
    """All cores compile the kernels of the batches behind the one that runs."""
    batches = large()
    with compiling(batch.compile_ahead, [(b, executor.target) for b in batches], None) as done:
        check_each(executor, (found for found, _ in zip(batches, done, strict=True)))


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
