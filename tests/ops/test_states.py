"""Tensors whose memory does not hold their values, or which something else has to see first.

PyTorch's dispatcher resolves such a state before it calls a kernel. Each call is compared with the
same call on tensors that hold the same values in memory of their own.
"""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tilenorm.spec import Options

from .helpers import (
    EACH_DEVICE,
    FAMILY,
    LAYER,
    RMS,
    by_inductor,
    call,
    incoming_of,
    op_arguments,
    random,
    step,
    tensors_of,
)
from .pretended import EACH_WAY, by


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


class Case(NamedTuple):
    """A call. states: of each tensor. incoming: of each output's gradient; None for no gradient.
    recorded: whether the tensors require gradients.
    """

    form: str
    rows: int
    hidden: int
    dtype: torch.dtype
    states: tuple[str, ...]
    incoming: tuple[str | None, ...]
    recorded: bool


@st.composite
def cases(draw) -> Case:
    name, recorded = draw(st.sampled_from(list(FAMILY))), draw(st.booleans())
    form = FAMILY[name]
    states = st.sampled_from(DIFFERENTIABLE if recorded else list(STATES))
    gradients = st.sampled_from([*STATES, None])
    return Case(
        name,
        draw(st.integers(0, 4)),
        draw(st.sampled_from([7, 16, 40])),
        draw(st.sampled_from([torch.float32, torch.bfloat16])),
        tuple(draw(states) for _ in form.names),
        tuple(draw(gradients) for _ in range(2 if form.other == "residual" else 1)),
        recorded,
    )


def tensors_in(case: Case, device: str) -> tuple[dict[str, Tensor], list[Tensor | None]]:
    """The tensors of a case in their states, and the incoming gradients in theirs."""
    form = FAMILY[case.form]
    tensors = tensors_of(form, case.rows, case.hidden, dtype=case.dtype, device=device)
    incoming = [
        None if state is None else STATES[state](dy)
        for state, dy in zip(case.incoming, incoming_of(tensors), strict=True)
    ]
    named = zip(case.states, tensors.items(), strict=True)
    return {name: STATES[state](t) for state, (name, t) in named}, incoming


def outputs_and_gradients(case: Case, tensors, incoming) -> list[Tensor | None]:
    """What a call gives. Gradients go to the tensors as they are, states included."""
    if case.recorded:
        tensors = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    outputs = call(FAMILY[case.form], tensors)
    used = [(y, dy) for y, dy in zip(outputs, incoming, strict=True) if dy is not None]
    if not case.recorded or not used:
        return [*outputs]
    ys, dys = zip(*used, strict=True)
    leaves = list(tensors.values())
    return [*outputs, *torch.autograd.grad(ys, leaves, dys, allow_unused=True)]


def check(case: Case, device: str) -> None:
    tensors, incoming = tensors_in(case, device)
    plain = {name: materialised(t) for name, t in tensors.items()}
    expected = outputs_and_gradients(case, plain, [materialised(dy) for dy in incoming])
    for _ in range(2):
        got = outputs_and_gradients(case, tensors, incoming)
        for a, b in zip(got, expected, strict=True):
            assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


@EACH_DEVICE
@EACH_WAY
@settings(deadline=None, max_examples=50, derandomize=True)
@given(case=cases())
def test_any_states_of_any_tensors(device, served, case):
    with by(served, device):
        check(case, device)


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


@EACH_DEVICE
@EACH_WAY
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


@EACH_DEVICE
@EACH_WAY
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


@EACH_DEVICE
@EACH_WAY
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


@EACH_DEVICE
@EACH_WAY
def test_a_functional_wrapper_stays_one(device, served):
    x = random(4, 16, device=device)
    with by(served, device):
        (expected,) = call(RMS, {"input": x})
        for _ in range(2):
            (got,) = call(RMS, {"input": torch._to_functional_tensor(x)})
            assert torch._is_functional_tensor(got)
            assert torch.equal(torch._from_functional_tensor(got), expected)
