"""patch on norms whose forward is a kernel that runs on GPUs alone."""

from re import fullmatch

import pytest
import torch
from torch import nn

import tilenorm
from tests.support.calls import EACH_DEVICE, random
from tilenorm.integrations.patch import recognition
from tilenorm.integrations.patch.twin import on_device

from .norms import N, rms

EPS = 1e-6


def normalized(x, weight):
    return (rms(x.float(), EPS) * weight.float()).to(x.dtype)


class OnGPU(nn.Module):
    """Refuses to run unless pretended_device has moved it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(1 + random(N, seed=1))
        self.eps, self.moved = EPS, False

    def forward(self, x):
        if not self.moved:
            raise RuntimeError("input must be a CUDA tensor")
        return normalized(x, self.weight)


@pytest.fixture
def pretended_device(monkeypatch):
    def moved(module, device):
        assert device == "cuda"
        other = on_device(module, "cpu")
        other.__dict__ = vars(module) | {"moved": True}
        return other

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(recognition, "on_device", moved)


@pytest.mark.parametrize("wide", [False, True])
def test_is_tried_on_a_gpu(wide, pretended_device):
    module = OnGPU()
    if wide:
        module.weight = nn.Parameter(random(3000))
    (entry,) = tilenorm.patch(module).patched
    assert entry.how == f"rms_norm offset=0.0 rounding=late eps={EPS}"
    x = random(3, len(module.weight))
    torch.testing.assert_close(module(x), normalized(x, module.weight))


def test_is_left_where_the_gpu_refuses_it_too(pretended_device):
    module = OnGPU()
    cls = type("Refused", (OnGPU,), {"forward": lambda self, x: x.not_there_on_cuda()})
    module.__class__ = cls
    (entry,) = tilenorm.patch(module).left
    raised = (
        r"AttributeError in line \d+ of test_kernel_norms.py \(.* attribute 'not_there_on_cuda'\)"
    )
    text = "its forward does not run on the CPU, and patch has found no GPU that runs it: "
    assert fullmatch(text + raised, entry.reason)


def test_a_module_on_a_device_computes_the_same():
    module = nn.LayerNorm(N)
    other = on_device(module, "cpu")
    x = random(3, N).requires_grad_()
    for norm in (module, other):
        norm.zero_grad()
        y = norm(x)
        y.square().sum().backward()
        results = y.detach(), x.grad, module.weight.grad, module.bias.grad
        x.grad = None
        if norm is module:
            expected = [t.clone() for t in results]
    torch.testing.assert_close([*results], expected, rtol=0, atol=0)


def operator_for(device):
    """RMSNorm as an operator with a kernel for one device alone, and with what tracing needs."""
    op = torch.library.custom_op(
        f"tilenorm_tests::rms_on_{device}",
        normalized,
        mutates_args=(),
        device_types=device,
        schema="(Tensor x, Tensor w) -> Tensor",
    )
    op.register_fake(lambda x, w: torch.empty_like(x))

    def backward(ctx, dy):
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            return torch.autograd.grad(normalized(*leaves), leaves, dy)

    def setup_context(ctx, inputs, output):  # PyTorch passes all three by name
        ctx.save_for_backward(*inputs)

    op.register_autograd(backward, setup_context=setup_context)
    return op


@EACH_DEVICE
def test_an_operator_for_one_device(device):
    op = operator_for(device)

    class Norm(OnGPU):
        def forward(self, x):
            return op(x, self.weight)

    module = Norm()
    report = tilenorm.patch(module)
    assert not report.left, report.left[0].reason
    assert report.patched[0].how.startswith("rms_norm offset=0.0")
    module.to(device)
    x = random(3, N, device=device)
    torch.testing.assert_close(module(x), normalized(x, module.weight))
