"""Tensors whose memory does not hold their values, or which something else has to see first.

PyTorch's dispatcher resolves such a state before it calls a kernel. Each call is compared with the
same call on tensors that hold the same values in memory of their own.
"""

from random import Random

import pytest
import torch
from torch import Tensor

from tilenorm.spec import Options

from .helpers import (
    DTYPES,
    FAMILY,
    LAYER,
    RMS,
    by_inductor,
    call,
    incoming_of,
    op_arguments,
    random,
    same,
    step,
    tensors_of,
)
from .pretended import by


class Subclass(Tensor):
    pass


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
        with by(served, device):
            expected = results(form, plain, [*map(materialised, incoming)], recorded)
            for _ in range(2):
                assert same(results(form, tensors, incoming, recorded), expected)


EACH_STATE = pytest.mark.parametrize("state", [name for name in STATES if name != "subclass"])
HOW = (*Options(16, "layer"), 1e-6, True)


def check_each_in_turn(function, tensors, how, state) -> None:
    """Each tensor in turn in a state, after a call of plain tensors."""
    function(*tensors, *how)
    for place, tensor in enumerate(tensors):
        if tensor is not None:
            other = [*tensors[:place], STATES[state](tensor), *tensors[place + 1 :]]
            expected = function(*map(materialised, other), *how)
            for got, plain in zip(function(*other, *how), expected, strict=True):
                absent = plain is None or not plain.numel()
                assert absent or torch.equal(got, plain)


@EACH_STATE
@pytest.mark.parametrize("of_inductor", [False, True], ids=["op", "bound"])
def test_the_ops_and_what_inductor_calls(device, served, state, of_inductor):
    ops = torch.ops.tilenorm
    norm, backward = ops.gated_layer_norm, ops.norm_backward
    if of_inductor:
        norm, backward = map(by_inductor, ("gated_layer_norm", "norm_backward"))
    x, *others = tensors_of(FAMILY["gated_layer_norm"], 3, 16, device=device).values()
    with by(served, device), torch.no_grad():
        how = op_arguments("gated_layer_norm", {}, 16)[4:]
        check_each_in_turn(norm, (x, *others), how, state)
        mean, rstd = norm(x, *others, *how)[1:]
        saved = (random(3, 16, device=device, seed=9), None, x, *others, mean, rstd)
        mask = [True, False, True, True, True]
        check_each_in_turn(backward, saved, (*HOW[:-1], False, mask), state)

        def of_terms(second, third, *others):
            return backward(*others, None, second, third)

        terms = (random(3, 16, device=device, seed=seed) for seed in (10, 11))
        check_each_in_turn(of_terms, (*terms, *saved), (*HOW[:-1], False, mask), state)


@pytest.mark.parametrize("state", ["negative", "imaginary"])
def test_hooks_of_saved_tensors_may_return_any_state(device, served, state):
    tensors = tensors_of(LAYER, 3, 16, device=device)
    with by(served, device):
        expected = step(LAYER, tensors)
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), STATES[state])
        for _ in range(2):
            with hooks:
                got = step(LAYER, tensors)
            assert got.keys() == expected.keys()
            assert all(torch.equal(got[name], expected[name]) for name in got)


def test_a_sparse_gradient_is_refused_by_the_dispatcher(device, served):
    x = random(4, 16, device=device).requires_grad_()
    with by(served, device):
        for dy in (random(4, 16, device=device), random(4, 16, device=device).to_sparse()):
            (y,) = call(RMS, {"input": x})
            if dy.is_sparse:
                with pytest.raises(NotImplementedError, match="norm_backward"):
                    torch.autograd.grad(y, x, dy)
            else:
                torch.autograd.grad(y, x, dy)


def test_a_functional_wrapper_stays_one(device, served):
    x = random(4, 16, device=device)
    with by(served, device):
        (expected,) = call(RMS, {"input": x})
        for _ in range(2):
            (got,) = call(RMS, {"input": torch._to_functional_tensor(x)})
            assert torch._is_functional_tensor(got)
            assert torch.equal(torch._from_functional_tensor(got), expected)
