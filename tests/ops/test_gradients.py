"""Whose memory gradients are, and what may be done to outputs and inputs."""

import pytest
import torch

from .helpers import (
    EACH_CALL,
    EACH_DEVICE,
    call,
    incoming_of,
    leaves_of,
    tensors_of,
)

pytestmark = EACH_DEVICE


@EACH_CALL
def test_outputs_may_be_detached_in_place(device, form):
    """As zero-bubble pipelines do with what a stage returns. PyTorch refuses it for views."""
    tensors = tensors_of(form, 2, 3, 16, device=device)
    tensors["input"].requires_grad_()
    for y in call(form, tensors):
        assert not y.detach_().requires_grad


@EACH_CALL
def test_no_gradient_is_the_callers_memory(device, form):
    """Nor that of an output, nor is an output that of an input."""
    tensors = leaves_of(tensors_of(form, 7, 40, device=device))
    leaves = [t for t in tensors.values() if t.requires_grad]
    outputs, incoming = call(form, tensors), incoming_of(tensors)
    for used in [slice(None), slice(1, 2), slice(1)][: 3 if outputs[1:] else 1]:
        grads = torch.autograd.grad(
            outputs[used], leaves, incoming[used], allow_unused=True, retain_graph=True
        )
        theirs = [*outputs, *tensors.values()]
        theirs += () if form.other == "skip" else incoming  # a skip's gradient is the output's
        starts = [t.untyped_storage().data_ptr() for t in theirs]
        assert len({*starts}) == len(starts)
        made = {g.untyped_storage().data_ptr() for g in grads if g is not None}
        assert not made & {*starts}


@EACH_CALL
def test_what_the_backward_pass_needs_may_not_be_written_to(device, form):
    tensors = leaves_of(tensors_of(form, 5, 8, device=device))
    tensors["input"] = tensors["input"] * 1
    outputs = call(form, tensors)
    saved = outputs[-1] if form.other == "residual" else tensors["input"]
    with torch.no_grad():
        saved.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs[0].sum().backward()
