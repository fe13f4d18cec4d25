"""add_rms_norm and add_layer_norm: one residual or two, the sum and its rounding."""

import pytest
import torch

import tilenorm

from .helpers import (
    EACH_DEVICE,
    EACH_JOINED,
    EPS,
    FAMILY,
    JOINED,
    call,
    incoming_of,
    name_of,
    random,
    step,
    tensors_of,
)
from .pretended import EACH_WAY, by

ADDS = {name: form for name, form in FAMILY.items() if form.other == "residual"}
EACH_ADD = pytest.mark.parametrize("form", ADDS.values(), ids=ADDS)
EACH_SUM = pytest.mark.parametrize("form", (JOINED | ADDS).values(), ids=JOINED | ADDS)
pytestmark = EACH_DEVICE

N = 40
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
# Dtypes of the input, of the first of two residuals, and of the last.
DTYPES = [(BF16, BF16, BF16), (F32, F32, F32), (BF16, BF16, F32), (BF16, F32, F32)]
DTYPES += [(F16, F32, F32), (F32, F32, BF16), (F32, BF16, BF16), (BF16, BF16, F16)]
DTYPES += [(F64, F64, F64), (F32, F32, F64), (F64, F64, F32)]
EACH_DTYPES = pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(map(name_of, d)))


def made(form, *shape, dtypes=(F32, F32, F32), device="cpu"):
    """The tensors of a form, with dtypes as in DTYPES."""
    dtype, before, residual = dtypes
    tensors = tensors_of(form, *shape, dtype=dtype, other=before, device=device)
    return {n: t.to(residual) if n == "residual" else t for n, t in tensors.items()}


def plain(form, tensors):
    """The norm without the addition."""
    tensors = {n: t for n, t in tensors.items() if n not in ("addend", "residual")}
    function = getattr(tilenorm, form.op.removeprefix("add_"))
    return function(**tensors, normalized_shape=tensors["input"].shape[-1:], eps=EPS)


@EACH_WAY
@EACH_SUM
@EACH_DTYPES
def test_bits_are_those_of_the_operations_one_after_the_other(device, form, dtypes, served):
    tensors = made(form, 7, N, dtypes=dtypes, device=device)
    x, total = tensors["input"], tensors["input"]
    for name in (*form.before, "residual"):
        total = (total + tensors[name]).to(tensors[name].dtype)
    with by(served, device):
        found = call(form, tensors)
        assert [y.dtype for y in found] == [dtypes[0], dtypes[2]]
        assert torch.equal(found[1], total)
        if form.before and dtypes[0] == dtypes[1]:
            first = {"input": x + tensors["addend"]}
            rest = {n: t for n, t in tensors.items() if n != "addend"}
            assert torch.equal(found[0], call(form, rest | first)[0])
        # A GPU may add up a row in another order where it is not alone in being read. The norm of a
        # float16 sum is rounded to float16 before it becomes bfloat16.
        exact = dtypes[2] == dtypes[0] or (dtypes[2] == F32 and dtypes[0] != F64)
        if device == "cpu" and served == "reference" and exact:
            assert torch.equal(found[0], plain(form, tensors | {"input": total}).to(dtypes[0]))


@EACH_ADD
def test_gradients_that_accumulate_leave_each_other_alone(device, form):
    """Input and residual may get one tensor; a second backward pass adds to each grad in place."""
    tensors = {n: t.requires_grad_() for n, t in tensors_of(form, 7, 96, device=device).items()}
    once = step(form, tensors)
    for _ in range(2):
        torch.autograd.backward(call(form, tensors), incoming_of(tensors))
    for name, tensor in tensors.items():
        assert torch.equal(tensor.grad, 2 * once[name]), name


@EACH_ADD
def test_input_and_residual_may_be_one_tensor(device, form):
    x = random(7, 96, device=device)
    tensors = {"input": x, "residual": x}
    leaf = x.clone().requires_grad_()
    outputs = call(form, {"input": leaf, "residual": leaf})
    torch.autograd.backward(outputs, incoming_of(tensors))
    got = step(form, tensors)
    torch.testing.assert_close(leaf.grad, got["input"] + got["residual"], rtol=0, atol=0)


@EACH_ADD
def test_layers_in_a_row(device, form):
    """The residual stream of a transformer: each sum is read by the next layer."""
    tensors = tensors_of(form, 7, 96, device=device)
    weights = [random(96, 96, device=device, seed=s) / 10 for s in range(3)]

    def stream(tensors, function):
        x, total = tensors["input"], tensors["residual"]
        for w in weights:
            x, total = function(tensors | {"input": x @ w, "residual": total})
        return x.sum() + total.square().mean()

    def composed(tensors):
        total = tensors["input"] + tensors["residual"]
        return plain(form, tensors | {"input": total}), total

    grads = []
    for function in (lambda t: call(form, t), composed):
        leaves = {n: t.clone().requires_grad_() for n, t in tensors.items()}
        grads.append(torch.autograd.grad(stream(leaves, function), leaves.values()))
    for ours, theirs in zip(*grads, strict=True):
        scale = theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * scale)


@EACH_JOINED
@pytest.mark.parametrize("kind", [tuple, list])
def test_a_sequence_of_any_kind(device, form, kind):
    tensors = tensors_of(form, 5, N, device=device)
    x, a, r, w, b = tensors.values()
    function, how = getattr(tilenorm, form.op), {"weight": w, "bias": b, "eps": EPS}
    found = function(x, kind((a, r)), (N,), **how)
    assert all(map(torch.equal, found, call(form, tensors)))
    one = function(x, kind((r,)), (N,), **how)
    assert all(map(torch.equal, one, function(x, r, (N,), **how)))
