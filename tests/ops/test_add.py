"""add_rms_norm and add_layer_norm: the sum, its rounding, and the two incoming gradients."""

import pytest
import torch

import tilenorm

from .helpers import (
    EACH_DEVICE,
    EPS,
    FAMILY,
    assert_step,
    call,
    expected_of,
    incoming_of,
    random,
    same,
    step,
    tensors_of,
)

ADDS = {name: form for name, form in FAMILY.items() if form.other == "residual"}
pytestmark = [EACH_DEVICE, pytest.mark.parametrize("form", ADDS.values(), ids=ADDS)]

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = [(BF16, BF16), (F32, F32), (BF16, F32), (F16, F32), (F32, BF16), (BF16, F16)]
DTYPES += [(F64, F64), (F32, F64), (F64, F32)]
EACH_PAIR = pytest.mark.parametrize("dtype, other", DTYPES, ids=str)


def plain(form, tensors):
    """The norm without the addition, of the tensors without the residual."""
    function = getattr(tilenorm, form.op.removeprefix("add_"))
    tensors = {n: t for n, t in tensors.items() if n != "residual"}
    return function(**tensors, normalized_shape=tensors["input"].shape[-1:], eps=EPS)


@EACH_PAIR
def test_the_sum_is_rounded_to_the_residuals_dtype(device, form, dtype, other):
    tensors = tensors_of(form, 7, 96, dtype=dtype, other=other, device=device)
    output, total = call(form, tensors)
    assert (output.dtype, total.dtype) == (dtype, other)
    assert torch.equal(total, (tensors["input"] + tensors["residual"]).to(other))


@EACH_PAIR
def test_the_output_is_that_of_the_rounded_sum(device, form, dtype, other):
    tensors = tensors_of(form, 7, 96, dtype=dtype, other=other, device=device)
    output, total = call(form, tensors)
    # Computed from the sum in its own dtype, and rounded once more if that is wider.
    expected = plain(form, tensors | {"input": total})
    # A GPU may add up a row in another order where it is not alone in being read.
    if device == "cpu" and (other == dtype or (dtype, other) in [(BF16, F32), (F16, F32)]):
        assert torch.equal(output, expected.to(dtype))
    expected = expected_of(form, tensors)["output"]
    assert_step({"output": output}, {"output": expected}, ["output"])


@pytest.mark.parametrize("absent", ["neither", "output", "sum"])
@EACH_PAIR
def test_gradients_of_both_outputs(device, form, dtype, other, absent, gradients_made):
    tensors = tensors_of(form, 7, 96, dtype=dtype, other=other, device=device)
    dy, dsum = incoming_of(tensors)
    incoming = {"neither": (dy, dsum), "output": (None, dsum), "sum": (dy, None)}[absent]
    got = step(form, tensors, incoming)
    assert len(gradients_made) == (absent != "output"), "the gradient of a sum needs no kernel"
    present = got.keys() & tensors.keys()
    assert present == ({"input", "residual"} if absent == "output" else tensors.keys())
    assert all(got[name].dtype == tensors[name].dtype for name in present)
    assert_step(got, expected_of(form, tensors, incoming), got.keys())


@pytest.mark.parametrize("asked", ["input", "residual"])
@pytest.mark.parametrize("absent", [None, 0, 1], ids=["neither", "output", "sum"])
@pytest.mark.parametrize("other", [BF16, F32], ids=str)
def test_one_gradient_alone(device, form, other, asked, absent):
    tensors = tensors_of(form, 7, 96, dtype=BF16, other=other, device=device)
    incoming = [None if i == absent else dy for i, dy in enumerate(incoming_of(tensors))]
    got = step(form, tensors, incoming, [asked])
    assert got.keys() & tensors.keys() == {asked}
    assert_step(got, expected_of(form, tensors, incoming), got.keys())


@pytest.mark.parametrize("absent", [None, 0, 1], ids=["neither", "output", "sum"])
@pytest.mark.parametrize("other", [BF16, F32], ids=str)
def test_no_gradient_is_the_callers_memory(device, form, other, absent):
    tensors = tensors_of(form, 7, 96, dtype=BF16, other=other, device=device)
    leaves = [t.requires_grad_() for t in tensors.values()]
    outputs = call(form, tensors)
    incoming = incoming_of(tensors)
    used = [(y, dy) for i, (y, dy) in enumerate(zip(outputs, incoming, strict=True)) if i != absent]
    ys, dys = zip(*used, strict=True)
    grads = torch.autograd.grad(ys, leaves, dys, allow_unused=True)
    theirs = {t.untyped_storage().data_ptr() for t in (*incoming, *outputs, *leaves)}
    assert not theirs & {g.untyped_storage().data_ptr() for g in grads if g is not None}


def test_gradients_that_accumulate_leave_each_other_alone(device, form):
    """Input and residual may get one tensor; a second backward pass adds to each grad in place."""
    tensors = {n: t.requires_grad_() for n, t in tensors_of(form, 7, 96, device=device).items()}
    once = step(form, tensors)
    for _ in range(2):
        torch.autograd.backward(call(form, tensors), incoming_of(tensors))
    for name, tensor in tensors.items():
        assert torch.equal(tensor.grad, 2 * once[name]), name


@pytest.mark.parametrize("other", [BF16, F32], ids=str)
def test_the_gradient_of_a_sum_may_be_expanded(device, form, other):
    tensors = tensors_of(form, 7, 96, dtype=BF16, other=other, device=device)
    incoming = [dy[:1, :1].expand(7, 96) for dy in incoming_of(tensors)]
    for used in (incoming, [None, incoming[1]]):
        copied = [None if dy is None else dy.contiguous() for dy in used]
        assert same(step(form, tensors, used), step(form, tensors, copied))


def test_input_and_residual_may_be_one_tensor(device, form):
    x = random(7, 96, device=device)
    tensors = {"input": x, "residual": x}
    leaf = x.clone().requires_grad_()
    outputs = call(form, {"input": leaf, "residual": leaf})
    torch.autograd.backward(outputs, incoming_of(tensors))
    got = step(form, tensors)
    torch.testing.assert_close(leaf.grad, got["input"] + got["residual"], rtol=0, atol=0)


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
