"""Blocks that share a row end, with the same bits, whatever they see of each other and when."""

import random
from functools import partial

import cuda.tile as ct
import pytest
import torch

from tests.interpreter import Tile
from tests.support import cases
from tests.support.calls import slow
from tests.support.executors import Inputs, Interpreter
from tests.support.results import assert_same_bits
from tilenorm.kernels import exchange
from tilenorm.kernels.exchange import SUM_POLLS, Slots
from tilenorm.launch.calls import every_gradient
from tilenorm.launch.plan import plan_backward, plan_forward
from tilenorm.spec import NormSpec

ROWS = 3
NEVER = 1 << 30
# The narrowest of each direction are quick.
SPECS = [
    ("backward", NormSpec("rms", 4104, "bfloat16", "bfloat16", "bfloat16", 1.0)),
    ("forward", NormSpec("rms", 16388, "bfloat16", "bfloat16")),
    *slow(
        ("backward", NormSpec("layer", 4104, "float16", "float16", "float16", residual="float16")),
        ("backward", NormSpec("rms", 4107, "float32", "float32", gate="float32", gate_first=True)),
        ("forward", NormSpec("layer", 16392, "float32", "float32", "float32", 1.0)),
        ("forward", NormSpec("rms", 16385, "bfloat16", "float32", gate="float32", gate_first=True)),
    ),
]
each_shared = pytest.mark.parametrize("direction, spec", SPECS, ids=cases.label)


class Visibility:
    """How much a block sees of the slots, and how often it polled, at most, for one row.

    arrives: a function of a slot's number that says with which poll, from 0 on, a block sees it.
    Every block of every row draws anew.
    """

    def __init__(self, monkeypatch, arrives):
        self.most, self.polls, self.arrives = {}, 0, arrives
        self.poll = Slots.poll
        monkeypatch.setattr(Slots, "poll", lambda slots: self.seen(slots))
        for name in ("collect", "collect_sums"):
            monkeypatch.setattr(Slots, name, self.counted(name, getattr(Slots, name)))

    def counted(self, name, collect):
        def counting(slots, numbers_of):
            self.polls = 0
            self.when = [self.arrives(slot) for slot in range(slots.PARTS * slots.CHUNKS)]
            found = collect(slots, numbers_of)
            self.most[name] = max(self.most.get(name, 0), self.polls)
            return found

        return counting

    def seen(self, slots):
        found = self.poll(slots)
        last = len(self.when) - 1  # past the last chunk a poll finds any of them
        when = [self.when[min(slot, last)] for slot in range(found.shape[0])]
        hidden = torch.tensor([self.polls < n for n in when])
        self.polls += 1
        return ct.where(Tile(hidden, ct.bool_), exchange.EMPTY, found)


def run(direction, spec, inputs, **how):
    executor = Interpreter("sm_80")
    if direction == "forward":
        assert plan_forward(spec, executor.target, True).chunks > 1
        return executor.forward(spec, inputs, **how)
    needs = every_gradient(spec)._replace(dw=False, db=False)  # those need no exchange
    assert plan_backward(spec, executor.target, needs).chunks > 1
    return executor.backward(spec, inputs, needs, **how)


def drawn(seed):
    """Slots that come at once, late, or never, one by one: also half of what a chunk publishes."""
    return partial(random.Random(seed).choice, (0, 0, 1, 2, 5, SUM_POLLS + 2, NEVER))


@each_shared
def test_slots_that_come_late_or_never(direction, spec, monkeypatch):
    inputs = Inputs.random(spec, 2, "cpu")
    expected = run(direction, spec, inputs)
    for seed in (0, 1, 2):
        draw = drawn(seed)
        with monkeypatch.context() as patched:
            Visibility(patched, lambda slot, draw=draw: draw())
            order = (None, "reverse", seed)[seed]
            found = run(direction, spec, inputs, POLLS=seed + 1, order=order)
        assert_same_bits(found, expected)


@each_shared
@pytest.mark.parametrize("polls", [0, 5])
def test_a_block_that_waits_in_vain_polls_so_often_and_ends(direction, spec, polls, monkeypatch):
    """It does the work of all, as where no other block has started in a grid that was preempted."""
    inputs = Inputs.random(spec, 1, "cpu")
    expected = run(direction, spec, inputs)
    visibility = Visibility(monkeypatch, lambda slot: NEVER)
    assert_same_bits(run(direction, spec, inputs, POLLS=polls), expected)
    most = {"collect": 1 + polls, "collect_sums": 1 + SUM_POLLS + polls}
    assert visibility.most.items() <= most.items() and visibility.most


@each_shared
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_sum_that_is_not_a_number_is_not_waited_for(direction, spec, value, monkeypatch):
    """EMPTY is a NaN too. A row with a NaN ends, and its neighbours have the bits they had."""
    inputs = Inputs.random(spec, ROWS, "cpu")
    before = run(direction, spec, inputs)
    inputs.x[1, 7] = value
    visibility = Visibility(monkeypatch, lambda slot: 0)
    found = run(direction, spec, inputs, POLLS=3)
    for name, tensor in found.items():
        if tensor.shape[0] == ROWS:
            for row in (0, 2):
                assert torch.equal(tensor[row], before[name][row]), name
    assert visibility.most.get("collect_sums", 0) <= 1 + SUM_POLLS + 3
    again = run(direction, spec, inputs, exchange=False)
    for name, tensor in again.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, equal_nan=True)
