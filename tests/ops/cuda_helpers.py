"""What the tests that need a GPU share. Importing it needs none."""

import torch

import tilenorm


def tensors(rows, n, dtype=torch.bfloat16, device="cuda"):
    """x, weight, bias and dy made on the GPU, the first three requiring gradients."""
    generator = torch.Generator(device).manual_seed(rows * 31 + n)
    make = {"generator": generator, "device": device, "dtype": dtype}
    x, dy = torch.randn(rows, n, **make), torch.randn(rows, n, **make)
    weight, bias = torch.randn(n, **make), torch.randn(n, **make)
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), dy


def call(x, weight, bias=None):
    return tilenorm.rms_norm(x, x.shape[-1:], weight, 1e-6, bias=bias)


def step(x, weight, bias, dy):
    """y, dx, dw, db."""
    y = call(x, weight, bias)
    return y.detach(), *torch.autograd.grad(y, (x, weight, bias), dy)


def same(a, b) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))
