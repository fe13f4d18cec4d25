"""Heads that are normalised and rotated: both directions against the truth, and equal bits.

tests/ops/test_rope.py compares the bits of tensors that lie otherwise in memory.
"""

from dataclasses import replace
from random import Random

from tests.support import rope
from tests.support.cases import OF_KEY
from tests.support.executors import Interpreter
from tests.support.results import assert_same_bits, every_result, seeds
from tests.support.tolerance import assert_close
from tilenorm.launch.calls import every_gradient


def call_of(seed: int):
    """(executor, spec, inputs) of a seed."""
    rng = Random(seed)
    spec, sizes = rope.drawn(rng)
    return Interpreter(rng.choice(("sm_80", "sm_90"))), spec, rope.Inputs.random(spec, sizes, seed)


@seeds(24, 100)
def test_accuracy(seed):
    """Within the budget, or, rounded early, of Hugging Face's bits, given the same rstd."""
    executor, spec, inputs = call_of(seed)
    found = every_result(executor, spec, inputs)
    if spec.rounding == "early":
        expected = rope.hugging_face(spec, inputs, found)
        assert_same_bits({name: found.pop(name) for name in expected}, expected)
    truths = rope.truths(spec, inputs)
    for name, t in found.items():
        assert_close(name, t, truths[name], truths[name].value.to(t.dtype))


@seeds(6, 30)
def test_bits_do_not_depend_on_padding_the_order_of_blocks_or_other_needed_gradients(seed):
    call = call_of(seed)
    expected = every_result(*call)
    for how in {"fill": 1e30, "order": "reverse"}, {"fill": -1e30, "order": 1}:
        assert_same_bits(every_result(*call, **how), expected)
    executor, spec, inputs = call
    every = every_gradient(spec)
    for name in [name for name in ("dx", "dw", *OF_KEY) if getattr(every, name)]:
        of_key = tuple(name == each for each in OF_KEY)
        needs = every._replace(dx=name == "dx", dw=name == "dw", of_key=of_key)
        assert_same_bits(executor.backward(spec, inputs, needs), {name: expected[name]})


@seeds(6, 30)
def test_bits_of_a_token_do_not_depend_on_the_others(seed):
    rng = Random(seed)
    spec, sizes = rope.drawn(rng)
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
