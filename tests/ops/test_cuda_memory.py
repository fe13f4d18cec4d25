"""Memory on a GPU: outputs, what is saved, and scratch; no copies."""

import gc

import pytest
import torch

from tilenorm.launch.calls import every_gradient
from tilenorm.launch.plan import plan_backward, plan_forward

from .cuda_helpers import forms_and_widths, made, target, train
from .helpers import FAMILY, NEEDS_GPU, call, spec_of

pytestmark = NEEDS_GPU

ROWS = 4096
WIDTHS = [256, 1000, 1024, 4096, 12288, 16384, 32768, 65536]


def requested(which: str) -> int:
    """Bytes that were asked for; what is allocated may be a larger block."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


def peak_of(function) -> int:
    """The bytes in use at the peak of a call, beyond those in use before it."""
    gc.collect()  # what an earlier test left in a cycle would be freed meanwhile
    torch.cuda.synchronize()
    before = requested("current")
    torch.cuda.reset_peak_memory_stats()
    kept = function()
    peak = requested("peak") - before
    del kept
    return peak


def scratch_of(shape, most: int) -> int:
    """Bytes of scratch in 32 bits, and no more than `most`."""
    size = 4 * shape[0] * shape[1] if shape else 0
    assert size <= most
    return size


def bytes_of(*tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@forms_and_widths(WIDTHS, [4096], [("layer_norm", 65536), ("add_rms_norm", 65536)])
def test_forward(form, n, grad):
    tensors, _ = made(form, ROWS, n)
    for tensor in tensors.values():
        tensor.requires_grad_(grad)
    outputs = call(form, tensors)  # the first call compiles
    plan = plan_forward(spec_of(form, tensors), target(), grad)
    stats = ROWS * 4 * ("layer" in form.op) + ROWS * 4 if plan.save else 0
    # A slot or two for each block that shares a row.
    slots = scratch_of(plan.slots(ROWS), ROWS * n * 2 // 128)
    assert peak_of(lambda: call(form, tensors)) == bytes_of(*outputs) + stats + slots


@forms_and_widths(WIDTHS, [4096], [("layer_norm", 65536), ("add_rms_norm", 65536)])
def test_backward(form, n):
    tensors, incoming = made(form, ROWS, n)
    check_backward(form, tensors, incoming)


def test_backward_of_a_residual_of_another_dtype():
    form = FAMILY["add_rms_norm"]
    check_backward(form, *made(form, ROWS, 4096, other=torch.float32))


def check_backward(form, tensors, incoming):
    leaves = list(tensors.values())
    train(form, tensors, incoming)
    outputs = call(form, tensors)
    peak = peak_of(lambda: torch.autograd.grad(outputs, leaves, incoming))
    spec = spec_of(form, tensors)
    plan = plan_backward(spec, target(), every_gradient(spec))
    # One gradient serves an input and a residual of one dtype.
    own = [t for name, t in tensors.items() if name != "residual" or spec.residual != spec.dtype]
    n = spec.hidden
    sums = scratch_of(plan.partials(ROWS), 2 * 4 * target().multiprocessors * n * 4)
    slots = scratch_of(plan.slots(ROWS), ROWS * n * 2 // 128)
    assert peak <= bytes_of(*own) + sums + slots


@pytest.mark.parametrize("name", ["rms_norm", "gated_rms_norm", "add_layer_norm"])
def test_frozen_parameters_take_no_scratch(name):
    form = FAMILY[name]
    tensors, incoming = made(form, ROWS, 4096)
    for parameter in ("weight", "bias"):
        tensors[parameter].requires_grad_(False)
    leaves = [t for t in tensors.values() if t.requires_grad]
    torch.autograd.grad(call(form, tensors), leaves, incoming)
    outputs = call(form, tensors)
    matrices = 2 if form.other == "gate" else 1
    peak = peak_of(lambda: torch.autograd.grad(outputs, leaves, incoming))
    assert peak == matrices * ROWS * 4096 * 2
