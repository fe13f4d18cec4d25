"""What the tests of the ops share: devices, the float64 oracle, and the error budget."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def name_of(value: object) -> str | None:
    """A readable test id of a dtype or a shape."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, tuple) and all(isinstance(n, int) for n in value):
        return "x".join(map(str, value)) or "scalar"
    return None


class Results(NamedTuple):
    """What a forward and a backward pass give; None where it was not asked for.

    dx_terms: for each row of dx, the largest of the terms that cancel in it.
    """

    y: Tensor
    dx: Tensor | None = None
    dw: Tensor | None = None
    db: Tensor | None = None
    dx_terms: Tensor | None = None


def random(*shape: int, dtype=torch.float32, device="cpu", seed=0) -> Tensor:
    """Normal numbers, the same ones on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def formula(x, shape, weight=None, eps=1e-6, bias=None, offset=0.0) -> Tensor:
    """The definition, one operation after the other."""
    dims = tuple(range(-len(shape), 0))
    y = x * (x.square().mean(dims, keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * (weight + offset)
    return y if bias is None else y + bias


def oracle(x, shape, weight=None, eps=1e-6, bias=None, offset=0.0, dy=None) -> Results:
    """The formula and its derivatives by autograd, in float64 on the CPU."""
    inputs = [None if t is None else t.detach().cpu().double() for t in (x, weight, bias)]
    given = [t.requires_grad_(dy is not None) for t in inputs if t is not None]
    y = formula(inputs[0], shape, inputs[1], eps, inputs[2], offset)
    if dy is None:
        return Results(y)
    dy = dy.detach().cpu().double()
    grads = iter(torch.autograd.grad(y, given, dy))
    grads = [None if t is None else next(grads) for t in inputs]
    dims = tuple(range(-len(shape), 0))
    rstd = (inputs[0].detach().square().mean(dims, keepdim=True) + eps).rsqrt()
    g = dy if weight is None else dy * (inputs[1].detach() + offset)
    terms = g.abs().amax(dims, keepdim=True) * rstd if x.numel() else None
    return Results(y.detach(), *grads, terms)


def assert_within(
    name: str,
    got: Tensor,
    expected: Tensor,
    peer: Tensor | None = None,
    *,
    rows: int = 1,
    terms: Tensor | None = None,
) -> None:
    """Hold the error budget: a unit in the last place and the rounding of float32 sums, or twice
    the error of `peer`, PyTorch's own result, whichever is larger.

    rows: how many were added up. terms: the size of what cancels, where that is not the result's.
    """
    got64, expected = got.detach().cpu().double(), expected.double()
    compute = torch.finfo(torch.float64 if got.dtype == torch.float64 else torch.float32).eps
    scale = expected.abs().max() if expected.numel() else torch.tensor(0.0)
    scale = scale if terms is None else terms
    unit = torch.finfo(got.dtype)
    allowed = unit.eps * expected.abs() + 8 * rows**0.5 * compute * scale + unit.tiny * unit.eps
    if peer is not None and peer.numel():
        own = (peer.detach().cpu().double() - expected).abs().max()
        allowed = torch.maximum(allowed, 2 * own)
    assert got.shape == expected.shape, f"{name}: shape {got.shape}, not {expected.shape}"
    wrong = ~((got64 - expected).abs() <= allowed)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {wrong.sum()} of {wrong.numel()} beyond the budget, the first at {at}:"
            f" got {got64[at]:.9g}, expected {expected[at]:.9g} ± {allowed[at]:.2g}"
        )
