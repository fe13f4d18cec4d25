"""What the host passes is in the order in which the kernels take it."""

from dataclasses import fields

import pytest

from tests.executors import backward_calls, forward_calls
from tilenorm.kernels import arrays
from tilenorm.launch.calls import (
    BackwardArrays,
    ForwardArrays,
    constants_of,
    every_gradient,
    groups,
)
from tilenorm.launch.target import Target
from tilenorm.spec import NormSpec

H200 = Target.of("sm_90")
SHORT = {"weight": "w", "bias": "b"}  # names of the formulas


@pytest.mark.parametrize(
    "host, kernel",
    [
        (ForwardArrays._fields, arrays.ForwardArrays),
        (BackwardArrays(*BackwardArrays._fields).of_branches(), arrays.BackwardArrays),
    ],
    ids=["forward", "backward"],
)
def test_fields_have_one_order(host, kernel):
    # Behind the host's come those of rows in pieces alone.
    taken = [field.name for field in fields(kernel)][: len(host)]
    assert [SHORT.get(name, name).upper() for name in host] == taken


@pytest.mark.parametrize("hidden", [64, 4096, 65536])
def test_every_constant_of_a_call_has_a_name(hidden):
    spec = NormSpec("layer", hidden, "bfloat16", "bfloat16", "bfloat16", residual="float32")
    calls = forward_calls(spec, H200, 1000, True)
    calls += backward_calls(spec, H200, 1000, every_gradient(spec))
    for call in calls:
        found = constants_of(call.kernel, call.arguments)
        for group in groups(call.kernel).values():
            assert {f.name for f in fields(group)} <= found.keys()
    norm = next(c for c in calls if "NORM" in groups(c.kernel))
    found = constants_of(norm.kernel, norm.arguments)
    assert (found["LAYER"], found["N"], found["OFFSET"]) == (True, hidden, 0.0)
