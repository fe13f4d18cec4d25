"""Tensors whose memory does not hold their values, or which something else has to see first.

PyTorch's dispatcher resolves such a state before it calls a kernel. Each call is compared with the
same call on tensors that hold the same values in memory of their own.
"""

from random import Random

import pytest
import torch
from torch import Tensor

from .helpers import (
    DTYPES,
    FAMILY,
    LAYER,
    RMS,
    by_inductor,
    call,
    incoming_of,
    random,
    same,
    step,
    tensors_of,
)
from .passes import Seen, changed
from .test_overrides import Subclass

pytestmark = pytest.mark.usefixtures("way")


# What gives a tensor of some values a state. A zero tensor has values of its own.
STATES = {
    "plain": lambda x: x,
    "negative": lambda x: torch._neg_view(-x),
    "imaginary": lambda x: torch.complex(x, -x).conj().imag if x.dtype == torch.float32 else x,
    "zero": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device),
    "copy on write": torch._lazy_clone,
    "subclass": lambda x: x.as_subclass(Subclass),
}
DIFFERENTIABLE = ("plain", "negative", "imaginary", "subclass")  # as functions of x


def materialised(x: Tensor | None) -> Tensor | None:
    """The values in memory of their own."""
    return None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def results(form, tensors, incoming, recorded: bool) -> dict:
    """What a call gives. Gradients go to the tensors as they are, states included."""
    if recorded and any(dy is not None for dy in incoming):
        return step(form, tensors, incoming)
    return dict(enumerate(call(form, tensors)))


def test_any_states_of_any_tensors(device, served):
    rng = Random(served)
    for _ in range(50):
        form, recorded = rng.choice([*FAMILY.values()]), rng.random() < 0.5
        shape, dtype = (rng.randint(0, 4), rng.choice((7, 16, 40))), rng.choice(DTYPES[1:3])
        plain = tensors_of(form, *shape, dtype=dtype, device=device)
        states = DIFFERENTIABLE if recorded else [*STATES]
        tensors = {name: STATES[rng.choice(states)](t) for name, t in plain.items()}
        drawn = [(rng.choice((None, *STATES)), dy) for dy in incoming_of(plain)]
        incoming = [None if state is None else STATES[state](dy) for state, dy in drawn]
        plain = {name: materialised(t) for name, t in tensors.items()}
        expected = results(form, plain, [*map(materialised, incoming)], recorded)
        for _ in range(2):
            assert same(results(form, tensors, incoming, recorded), expected)


EACH_STATE = pytest.mark.parametrize("state", [name for name in STATES if name != "subclass"])


def check_each_in_turn(function, arguments, state) -> None:
    """Each tensor in turn in a state, after a call of plain tensors."""
    function(*arguments)
    for place, value in enumerate(arguments):
        if isinstance(value, Tensor):
            other = [*arguments[:place], STATES[state](value), *arguments[place + 1 :]]
            plain = [*arguments[:place], materialised(other[place]), *arguments[place + 1 :]]
            for got, expected in zip(function(*other), function(*plain), strict=True):
                absent = expected is None or not expected.numel()
                assert absent or torch.equal(got, expected)


@EACH_STATE
@pytest.mark.parametrize("of_inductor", [False, True], ids=["op", "bound"])
def test_the_ops_and_what_inductor_calls(device, state, of_inductor):
    form = FAMILY["gated_layer_norm"]
    terms = {f"grad_output_{i}": random(3, 16, device=device, seed=8 + i) for i in (2, 3)}
    with Seen() as seen:
        step(form, tensors_of(form, 3, 16, device=device))
    backward, given = seen.calls[-1]
    for op, arguments in (*seen.calls, (backward, changed(backward, given, **terms))):
        function = by_inductor(op._opname) if of_inductor else op
        check_each_in_turn(function, arguments, state)


@pytest.mark.parametrize("state", ["negative", "imaginary"])
def test_hooks_of_saved_tensors_may_return_any_state(device, state):
    tensors = tensors_of(LAYER, 3, 16, device=device)
    expected = step(LAYER, tensors)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), STATES[state])
    for _ in range(2):
        with hooks:
            got = step(LAYER, tensors)
        assert same(got, expected)


def test_a_sparse_gradient_is_refused_by_the_dispatcher(device):
    x, dy = random(4, 16, device=device).requires_grad_(), random(4, 16, device=device)
    torch.autograd.grad(call(RMS, {"input": x})[0], x, dy)
    with pytest.raises(NotImplementedError, match="norm_backward"):
        torch.autograd.grad(call(RMS, {"input": x})[0], x, dy.to_sparse())
