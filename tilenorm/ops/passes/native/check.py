"""What an extension has to do right before it is used: a norm on the CPU, without a kernel.

A process of its own runs this. An extension that crashes ends that process alone.
"""

import ctypes
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .build import load

ROWS, HIDDEN, EPS = 3, 8, 1e-6


class CheckError(Exception):
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
    x = torch.linspace(-1, 2, ROWS * HIDDEN).square().view(ROWS, HIDDEN).requires_grad_()
    w, dy = torch.linspace(0.5, 1, HIDDEN, requires_grad=True), torch.cos(3 * x.detach())
    layouts = [((ROWS, HIDDEN), (HIDDEN, 1), torch.float32), ((ROWS,), (1,), torch.float32)]
    repeat = extension.repeat(-1, 0, 2, [], layouts, [], [], 2, _launch)
    call = "check", (x, w), (HIDDEN,), EPS, (), None
    if extension.served(*call) is not None:
        raise CheckError("it serves a call that it does not know")
    extension.remember(call, True, True, [True], repeat, [], [], [0, 1, 3], None, _backward)
    expected = torch.nn.functional.rms_norm(x, (HIDDEN,), w, EPS)
    outputs = extension.served(*call)
    if outputs is None or len(outputs) != 1:
        raise CheckError("it does not serve a call that it knows")
    results = [*outputs, *torch.autograd.grad(outputs, (x, w), dy)]
    others = [expected, *torch.autograd.grad(expected, (x, w), dy)]
    close = partial(torch.allclose, atol=1e-5)  # elements of dx are near 0
    if not all(map(close, results, others)):
        raise CheckError("a norm and its gradients differ from PyTorch's")
    extension.forget()


def main(path: str) -> str | None:
    """Check the extension of a file. What is wrong, for sys.exit, or None."""
    try:
        check(load(Path(path)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
