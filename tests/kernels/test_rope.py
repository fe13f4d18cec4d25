"""Heads that are normalised and rotated: both directions against the truth, and equal bits.

tests/ops/test_rope.py compares the bits of tensors that lie otherwise in memory.
"""

from dataclasses import fields, replace
from random import Random

import pytest

from tests.executors import Interpreter
from tests.tolerance import assert_close
from tilenorm.launch.calls import Sizes, every_gradient

from . import rope
from .helpers import assert_same_bits


def drawn(quick: int, count: int):
    seeds = [pytest.param(n, marks=() if n < quick else pytest.mark.slow) for n in range(count)]
    return pytest.mark.parametrize("seed", seeds)


def call_of(seed: int, tokens: int | None = None):
    """(executor, spec, sizes, inputs) of a seed. tokens: of a sequence, not drawn."""
    rng = Random(seed)
    spec, sizes = rope.drawn(rng)
    sizes = sizes if tokens is None else sizes._replace(tokens=tokens)
    inputs = rope.Inputs.random(spec, sizes, seed)
    return Interpreter(rng.choice(("sm_80", "sm_90"))), spec, sizes, inputs


def every_result(executor, spec, sizes, inputs, **how):
    results = rope.forward(executor, spec, sizes, inputs, **how)
    return results | rope.backward(executor, spec, sizes, inputs, **how)


def check(found, truths):
    for name, t in found.items():
        truth = truths[name]
        assert_close(name, t, truth, truth.value.to(t.dtype))


@drawn(24, 100)
def test_accuracy(seed):
    """Within the budget, or, rounded early, of Hugging Face's bits, given the same rstd."""
    executor, spec, sizes, inputs = call_of(seed)
    truths = rope.truths(spec, inputs)
    found = rope.forward(executor, spec, sizes, inputs, ("heads first", None)[seed % 2])
    if spec.rounding == "early":
        expected = rope.hugging_face(spec, inputs, found)
        assert_same_bits({name: found.pop(name) for name in expected}, expected)
    check(found, truths)
    check(rope.backward(executor, spec, sizes, inputs), truths)


@drawn(6, 30)
def test_bits_do_not_depend_on_padding_the_order_of_blocks_or_other_needed_gradients(seed):
    call = call_of(seed)
    expected = every_result(*call)
    for how in {"fill": 1e30, "order": "reverse"}, {"fill": -1e30, "order": 1}:
        assert_same_bits(every_result(*call, **how), expected)
    spec, every = call[1], every_gradient(call[1])
    asked = {"dx": every.dx, "dw": every.dw, "key_dx": every.dkey, "key_dw": every.dkey_weight}
    for name in [name for name, needed in asked.items() if needed]:
        of_key = tuple(name == each for each in ("key_dx", "key_dw"))
        needs = every._replace(dx=name == "dx", dw=name == "dw", of_key=of_key if spec.key else ())
        one = rope.backward(*call, needs=needs)
        assert_same_bits(one, {name: expected[name]})


@drawn(6, 30)
def test_bits_of_a_token_do_not_depend_on_the_others(seed):
    executor, spec, sizes, inputs = call_of(seed, tokens=21)
    every, first, count = every_result(executor, spec, sizes, inputs), 1 + seed % 5, 1 + seed % 11
    of_tokens = {f.name for f in fields(inputs)} - {"weight", "key_weight"}
    of_tokens -= {"cos", "sin"} if spec.rotation.positions else set()

    def some(t):
        return t[-1:, first : first + count]

    there = {n: some(t) for n in of_tokens if (t := getattr(inputs, n)) is not None}
    own = Sizes(1, count, *sizes[2:])
    found = every_result(executor, spec, own, replace(inputs, **there))
    for name in ("y", "rstd", "dx", "key_y", "key_rstd", "key_dx"):
        if name in found:
            assert_same_bits({name: found[name]}, {name: some(every[name]).contiguous()})
