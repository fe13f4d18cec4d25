"""What the tests of kernels share."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from . import cases
from .calls import slow
from .tolerance import assert_close

over = partial(pytest.mark.parametrize, "executor, spec", indirect=["executor"], ids=cases.label)
each_spec = partial(pytest.mark.parametrize, "spec", ids=cases.label)


def seeds(quick: int, count: int):
    """Parametrises with so many seeds, of which the first are quick."""
    return pytest.mark.parametrize("seed", [*range(quick), *slow(*range(quick, count))])


def every_result(executor, spec, inputs, needs=None, **how) -> dict[str, Tensor]:
    """The results of the forward and of the backward pass. needs: by default every gradient."""
    return executor.forward(spec, inputs, **how) | executor.backward(spec, inputs, needs, **how)


# What a kernel may not depend on: the value of undefined padding, and the order of blocks.
UNDEFINED = {"fill": 1e30, "order": "reverse"}, {"fill": -1e30, "order": 1}


def check_undefined(executor, spec, inputs, needs=None) -> dict[str, Tensor]:
    """The results, whose bits depend on nothing that is undefined."""
    expected = every_result(executor, spec, inputs, needs)
    for how in UNDEFINED:
        assert_same_bits(every_result(executor, spec, inputs, needs, **how), expected)
    return expected


def check(spec, inputs, results: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each result is within the budget."""
    truth, own = inputs.truth(spec), inputs.own(spec)
    if spec.mod_gate and "sum" in results:
        # A sum that rounds its product once may be the next number of its dtype: y follows from it.
        given = replace(inputs, given_sum=results["sum"])
        truth = given.truth(spec) | {"sum": truth["sum"]}
        own = given.own(spec) | {"sum": own["sum"]}
    for name, found in results.items():
        assert_close(name, found, truth[name], own[name])
    return results


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, t in found.items():
        other = expected[name]
        same = torch.equal(t.view(torch.uint8), other.view(torch.uint8))
        assert same, f"{name}: {(t != other).sum()} differ"
