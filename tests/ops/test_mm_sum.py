"""tilenorm::mm_sum: its error, its derivative, what it refuses, and what tracers make of it."""

import random as draw
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.library import opcheck

from tilenorm.ops import mm_sum  # noqa: F401  defines the op

from .helpers import EACH_DEVICE, random

MM_SUM = torch.ops.tilenorm.mm_sum.default
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def factors(rows, columns, inner, dtype=F32, device="cpu"):
    """Factors of products with given inner sizes. The second factors are transposed, as weights."""
    kind = {"dtype": dtype, "device": device}
    left = [random(rows, k, seed=i, **kind) for i, k in enumerate(inner)]
    return left, [random(columns, k, seed=9 + i, **kind).t() for i, k in enumerate(inner)]


@EACH_DEVICE
def test_opcheck(device):
    a, b = factors(5, 8, (16, 24, 16), BF16, device)
    opcheck(MM_SUM, ([t.requires_grad_() for t in a], [t.requires_grad_() for t in b]))


@EACH_DEVICE
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_error_is_below_that_of_products_and_additions(device, dtype):
    """The root of the mean square, in drawn shapes: mm_sum rounds once less an addition."""
    rng = draw.Random(5)
    for _ in range(8):
        inner = [rng.randint(100, 300) for _ in range(rng.randint(2, 4))]
        a, b = factors(rng.randint(30, 90), rng.randint(30, 90), inner, dtype, device)
        exact = sum(x.double() @ y.double() for x, y in zip(a, b, strict=True))
        added = a[0] @ b[0]
        for x, y in zip(a[1:], b[1:], strict=True):
            added = added + x @ y
        got, eager = ((t.double() - exact).norm() for t in (MM_SUM(a, b), added))
        # Of two equal products, the variances of the roundings are 1 + 2 in place of 1 + 1 + 2.
        # In float32 the roundings inside the products are larger than these.
        assert got <= eager * (1.1 if dtype == F32 else 0.97), inner


@EACH_DEVICE
def test_one_product_has_the_bits_of_mm(device):
    (a,), (b,) = factors(5, 8, (16,), BF16, device)
    assert torch.equal(MM_SUM([a], [b]), a @ b)


def test_derivative():
    tensors = [t.requires_grad_() for part in factors(3, 4, (2, 5), F64) for t in part]
    assert torch.autograd.gradcheck(lambda a, c, b, d: MM_SUM([a, c], [b, d]), tensors)
    assert torch.autograd.gradgradcheck(lambda a, c, b, d: MM_SUM([a, c], [b, d]), tensors)


WRONG = {
    "lengths": (lambda a, b: (a, b[:1]), "'b' takes as many matrices as argument 'a', 2, got 1"),
    "rows": (lambda a, b: ([a[0], a[1][:4]], b), r"'a' takes .* shape\[0\], 5, got 4"),
    "columns": (lambda a, b: (a, [b[0], b[1][:, :1]]), r"'b' takes .* shape\[1\], 8, got 1"),
    "inner": (lambda a, b: (a, b[::-1]), "'b' takes a matrix with 16 rows, .* got 24"),
    "dtype": (
        lambda a, b: (a, [b[0], b[1].double()]),
        r"'b' takes .*float32, got torch.float64\[24, 8",
    ),
    "vector": (lambda a, b: ([a[0], a[1][0]], b), r"'a' takes .* got torch.float32\[24\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    change, message = WRONG[name]
    a, b = change(*factors(5, 8, (16, 24)))
    for mode in (nullcontext(), FakeTensorMode(allow_non_fake_inputs=True)):
        with mode, pytest.raises(ValueError, match=f"mm_sum: argument {message}"):
            MM_SUM(a, b)


def test_nothing_to_add():
    with pytest.raises(NotImplementedError, match="mm_sum"):
        MM_SUM([], [])
