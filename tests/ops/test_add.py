"""add_rms_norm and add_layer_norm: the gradient of a layer scale, which is a sum over rows, dropped
elements, and tensors given twice. test_drawn.py compares bits with those of single operations.
"""

import pytest
import torch

import tilenorm

from .helpers import (
    BRANCHED,
    EACH_JOINED,
    EPS,
    FAMILY,
    MASKED,
    before,
    call,
    incoming_of,
    op_call,
    random,
    step,
    tensors_of,
)
from .pretended import by

N = 40
BF16, F32 = torch.bfloat16, torch.float32
ADDS = {name: form for name, form in FAMILY.items() if form.other == "residual"}
EACH_ADD = pytest.mark.parametrize("form", ADDS.values(), ids=ADDS)


@pytest.mark.parametrize("name", [n for n, f in BRANCHED.items() if "layer_scale" in f.branch])
def test_the_gradient_of_the_layer_scale(device, name, served):
    form = BRANCHED[name]
    tensors = tensors_of(form, 300, N, dtype=BF16, device=device)
    tensors["layer_scale"] = tensors["layer_scale"].to(F32)
    with by(served, device):
        found = step(form, tensors)
    masked = before(form._replace(branch=form.branch[:-1]), tensors)
    products = found["residual"].double() * masked.double()
    torch.testing.assert_close(found["layer_scale"].double(), products.sum(0), rtol=1e-5, atol=1e-4)


@EACH_ADD
def test_the_mask_of_pytorchs_dropout(device, form):
    tensors = tensors_of(form._replace(options=MASKED), 64, N, device=device)
    dropped, mask = torch.ops.aten.native_dropout(tensors["input"], 0.1, True)
    _, total = call(form._replace(options=MASKED), tensors | {"dropout_mask": mask})
    assert torch.equal(total, dropped + tensors["residual"])


def test_what_the_op_refuses(device):
    x = random(5, N, device=device)
    for message, given in (
        ("take one residual", {"input": x, "residual": x, "addend": x, "dropout_mask": x > 0}),
        ("third dtype has fewer", {"input": x.half(), "residual": x.bfloat16(), "addend": x}),
    ):
        with pytest.raises(NotImplementedError, match=message):
            op_call("add_rms_norm", given, N, save=False)


@EACH_ADD
def test_gradients_that_accumulate_leave_each_other_alone(device, form):
    """Input and residual may get one tensor, or be one. A second pass adds to a grad in place."""
    tensors = {n: t.requires_grad_() for n, t in tensors_of(form, 7, 96, device=device).items()}
    once = step(form, tensors)
    both = tensors | {"residual": tensors["input"]}
    (total,) = torch.autograd.grad(call(form, both), tensors["input"], incoming_of(both))
    apart_from = step(form, both)
    assert torch.equal(total, apart_from["input"] + apart_from["residual"])
    for _ in range(2):
        torch.autograd.backward(call(form, tensors), incoming_of(tensors))
    for name, tensor in tensors.items():
        assert torch.equal(tensor.grad, 2 * once[name]), name


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
