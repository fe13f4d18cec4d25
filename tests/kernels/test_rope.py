"""Heads that are normalised and rotated: both directions against the truth, and equal bits."""

from random import Random

import pytest
import torch

from tests.executors import Interpreter
from tests.tolerance import assert_close

from . import rope


def check(found, truths):
    for name, t in found.items():
        truth = truths[name]
        assert_close(name, t, truth, truth.value.to(t.dtype))


@pytest.mark.parametrize("seed", range(40))
def test_accuracy(seed):
    rng = Random(seed)
    spec, sizes = rope.drawn(rng)
    executor, inputs = Interpreter(rng.choice(("sm_80", "sm_90"))), None
    inputs = rope.Inputs.random(spec, sizes, seed)
    truths = rope.truths(spec, inputs)
    found = rope.forward(executor, spec, sizes, inputs, rng.choice((None, "heads first")))
    if spec.rounding == "early":
        expected = rope.hugging_face(spec, inputs, found)
        for name, y in expected.items():
            assert torch.equal(found[name].view(torch.uint8), y.view(torch.uint8)), name
        found = {name: t for name, t in found.items() if "rstd" in name}
    check(found, truths)
    check(rope.backward(executor, spec, sizes, inputs), truths)
