"""What an extension has to do right before it is used: a norm on the CPU, without a kernel."""

import ctypes
from typing import Any

import torch
from torch import Tensor

ROWS, HIDDEN, EPS = 3, 8, 1e-6


class CheckError(ImportError):
    """An extension gives wrong results."""


def _at(address: int, *shape: int) -> Tensor:
    size = 4 * torch.Size(shape).numel()
    memory = (ctypes.c_char * size).from_address(address)
    return torch.frombuffer(memory, dtype=torch.float32).view(shape)


def _launch(stream: int, starts: list[int]) -> bool:
    """RMSNorm, in the place of a kernel. starts: of x, weight, y and rstd."""
    x, w = _at(starts[0], ROWS, HIDDEN), _at(starts[1], HIDDEN)
    rstd = (x.square().mean(1) + EPS).rsqrt()
    _at(starts[2], ROWS, HIDDEN).copy_(x * rstd[:, None] * w)
    _at(starts[3], ROWS).copy_(rstd)
    return True


def _backward(number: int, token: Any, asked: tuple, grads: tuple, saved: tuple) -> tuple:
    (dy,), (x, w, rstd) = grads, saved
    x_hat, g = x * rstd[:, None], dy * w
    dx = rstd[:, None] * (g - x_hat * (g * x_hat).mean(1, keepdim=True))
    return dx, (dy * x_hat).sum(0)


def check(extension: Any) -> None:
    """Raises CheckError where an extension's call differs from PyTorch's."""
    from . import start

    start(extension)
    x, w = (torch.rand(shape, requires_grad=True) for shape in ((ROWS, HIDDEN), (HIDDEN,)))
    dy = torch.rand(ROWS, HIDDEN)
    made = [((ROWS, HIDDEN), (HIDDEN, 1), torch.float32), ((ROWS,), (1,), torch.float32)]
    repeat = extension.repeat(-1, 0, 2, [], made, [], [], 2, _launch)
    call = "check", (x, w), (HIDDEN,), EPS, (), None
    if extension.served(*call) is not None:
        raise CheckError("it serves a call that it does not know")
    extension.remember(call, True, True, [True], repeat, [], [0, 1, 3], None, _backward)
    expected = torch.nn.functional.rms_norm(x, (HIDDEN,), w, EPS)
    found = extension.served(*call)
    if found is None or len(found) != 1:
        raise CheckError("it does not serve a call that it knows")
    results = [*found, *torch.autograd.grad(found, (x, w), dy)]
    others = [expected, *torch.autograd.grad(expected, (x, w), dy)]
    if not all(map(torch.allclose, results, others)):
        raise CheckError("a norm and its gradients differ from PyTorch's")
    extension.forget()
