"""Gradients of tilenorm.rms_norm, of first and second order, and that no others are computed."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import tilenorm

from .helpers import DEVICES, DTYPES, NEEDS_GPU, assert_within, name_of, oracle, random

ON_EACH_DEVICE = pytest.mark.parametrize("device", DEVICES)
ASKED = [mask for mask in itertools.product((True, False), repeat=3) if any(mask)]


def names_asked(mask) -> str:
    return "+".join(n for n, m in zip(("dx", "dw", "db"), mask, strict=True) if m)


def backward(x, weight, bias, dy, mask=(True, True, True), **options):
    """y and the three gradients, None where the mask is false."""
    given = [None if t is None else t.detach() for t in (x, weight, bias)]
    for tensor, need in zip(given, mask, strict=True):
        if tensor is not None:
            tensor.requires_grad_(need)
    y = tilenorm.rms_norm(given[0], x.shape[-1:], given[1], 1e-6, bias=given[2], **options)
    y.backward(dy)
    return y, *(None if t is None else t.grad for t in given)


def pytorch_backward(x, weight, dy):
    given = [t.detach().requires_grad_() for t in (x, weight)]
    return torch.autograd.grad(F.rms_norm(given[0], x.shape[-1:], given[1], 1e-6), given, dy)


@ON_EACH_DEVICE
@pytest.mark.parametrize("parameters", ["same", "float32"])
@pytest.mark.parametrize("n", [1, 24, 100, 513])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_accuracy(device, dtype, n, parameters):
    x, dy = (random(37, n, dtype=dtype, device=device, seed=s) for s in (0, 1))
    dtype = torch.float32 if parameters == "float32" else dtype
    weight, bias = (random(n, dtype=dtype, device=device, seed=s) for s in (2, 3))
    y, dx, dw, db = backward(x, weight, bias, dy)
    expected = oracle(x, (n,), weight, 1e-6, bias, dy=dy)
    peer = pytorch_backward(x, weight, dy)
    for name, got, like in (("y", y, x), ("dx", dx, x), ("dw", dw, weight), ("db", db, bias)):
        assert got.dtype == like.dtype, name
    assert_within("y", y, expected.y)
    assert_within("dx", dx, expected.dx, peer[0], terms=expected.dx_terms)
    assert_within("dw", dw, expected.dw, peer[1], rows=37)
    assert_within("db", db, expected.db, rows=37)


@ON_EACH_DEVICE
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("mask", ASKED, ids=names_asked)
def test_each_combination_of_gradients(device, mask, offset, gradients_made):
    x, dy = (random(19, 40, device=device, seed=s) for s in (0, 1))
    weight, bias = (random(40, device=device, seed=s) for s in (2, 3))
    _, *grads = backward(x, weight, bias, dy, mask, offset=offset)
    expected = oracle(x, (40,), weight, 1e-6, bias, offset, dy)
    assert tuple(g is not None for g in grads) == mask
    assert gradients_made == [mask], "computed another set of gradients than was asked for"
    for name, grad, wanted in zip(("dx", "dw", "db"), grads, expected[1:4], strict=True):
        if grad is not None:
            assert_within(name, grad, wanted, rows=19)


@ON_EACH_DEVICE
@pytest.mark.parametrize("absent", ["weight", "bias", "both"])
def test_absent_parameters(device, absent, gradients_made):
    x, dy = (random(19, 40, device=device, seed=s) for s in (0, 1))
    weight = random(40, device=device, seed=2) if absent == "bias" else None
    bias = random(40, device=device, seed=3) if absent == "weight" else None
    _, *grads = backward(x, weight, bias, dy)
    present = (True, weight is not None, bias is not None)
    assert gradients_made == [present]
    expected = oracle(x, (40,), weight, 1e-6, bias, dy=dy)
    for name, grad, wanted in zip(("dx", "dw", "db"), grads, expected[1:4], strict=True):
        if wanted is not None:
            assert_within(name, grad, wanted, rows=19)


@ON_EACH_DEVICE
def test_only_the_gradients_that_autograd_grad_names(device, gradients_made):
    x, weight = random(5, 8, device=device), random(8, device=device)
    y = tilenorm.rms_norm(x.requires_grad_(), (8,), weight)
    torch.autograd.grad(y.sum(), x)
    assert gradients_made == [(True, False, False)]


@ON_EACH_DEVICE
@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 4)], ids=name_of)
def test_parameters_of_several_dimensions(device, shape):
    x, dy = (random(5, *shape, device=device, seed=s) for s in (0, 1))
    weight, bias = (random(*shape, device=device, seed=s).requires_grad_() for s in (2, 3))
    tilenorm.rms_norm(x, shape, weight, 1e-6, bias=bias).backward(dy)
    expected = oracle(x, shape, weight, 1e-6, bias, dy=dy)
    assert_within("dw", weight.grad, expected.dw, rows=5)
    assert_within("db", bias.grad, expected.db, rows=5)


@ON_EACH_DEVICE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)], ids=name_of)
def test_empty_batches_give_zero_gradients(device, shape, dtype):
    x = torch.empty(shape, device=device, dtype=dtype)
    weight, bias = (random(shape[-1], device=device, dtype=dtype) for _ in range(2))
    y, dx, dw, db = backward(x, weight, bias, torch.empty_like(x))
    assert y.shape == dx.shape == x.shape
    assert torch.equal(dw, torch.zeros_like(weight))
    assert torch.equal(db, torch.zeros_like(bias))


LAYOUTS = {
    "expanded to all": lambda dy: dy[:1, :1].expand(dy.shape),
    "expanded rows": lambda dy: dy[:1].expand(dy.shape),
    "expanded columns": lambda dy: dy[:, :1].expand(dy.shape),
    "transposed": lambda dy: dy.t().contiguous().t(),
    "rows apart": lambda dy: F.pad(dy, (0, 8))[:, : dy.shape[1]],
    "rows apart, off by one": lambda dy: F.pad(dy, (1, 7))[:, 1 : 1 + dy.shape[1]],
}


@ON_EACH_DEVICE
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [40, 41])
def test_layout_of_the_gradient_changes_no_bit(device, n, layout):
    x, dy = (random(6, n, device=device, seed=s) for s in (0, 1))
    weight, bias = (random(n, device=device, seed=s) for s in (2, 3))
    view = LAYOUTS[layout](dy)
    got = backward(x, weight, bias, view)
    expected = backward(x, weight, bias, view.contiguous())
    assert got[1].is_contiguous()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@ON_EACH_DEVICE
@pytest.mark.parametrize("layout", ["transposed", "rows apart", "rows apart, off by one"])
def test_layout_of_the_input_changes_no_bit(device, layout):
    x, dy = (random(6, 40, device=device, seed=s) for s in (0, 1))
    weight = random(40, device=device, seed=2)
    got = backward(LAYOUTS[layout](x), weight, None, dy)
    expected = backward(x, weight, None, dy)
    assert all(torch.equal(a, b) for a, b in zip(got[:3], expected[:3], strict=True))


@ON_EACH_DEVICE
def test_gradient_reaches_the_base_of_a_view(device):
    qkv = random(4, 3, 16, device=device).requires_grad_()
    dy = random(4, 16, device=device, seed=1)
    tilenorm.rms_norm(qkv[:, 1], (16,), None, 1e-6).backward(dy)
    expected = oracle(qkv[:, 1], (16,), dy=dy).dx
    assert_within("dx", qkv.grad[:, 1], expected)
    assert not qkv.grad[:, ::2].any()


@ON_EACH_DEVICE
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_second_derivatives(device, with_bias):
    x, dy, v = (random(5, 12, device=device, dtype=torch.float32, seed=s) for s in range(3))
    weight, bias = (random(12, device=device, seed=s) for s in (3, 4))

    def second(function, *inputs):
        inputs = [t.detach().requires_grad_() for t in inputs]
        dx, dw = torch.autograd.grad(function(*inputs), inputs[:2], inputs[2], create_graph=True)
        return torch.autograd.grad((dx * inputs[3]).sum() + dw.square().sum(), inputs[:3])

    def ours(x, weight, *_):
        bias_or_none = bias if with_bias else None
        return tilenorm.rms_norm(x, (12,), weight, 1e-5, bias=bias_or_none)

    def pytorch(x, weight, *_):
        return F.rms_norm(x, (12,), weight, 1e-5)

    got = second(ours, x, weight, dy, v)
    expected = second(pytorch, *(t.double() for t in (x, weight, dy, v)))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5 * b.abs().max().item())


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("given", ["x", "x, weight", "x, weight, bias"])
def test_derivatives_of_the_reference_agree_with_differences(given, offset):
    sizes = {"x": (2, 3, 5), "weight": (3, 5), "bias": (3, 5)}
    names = given.split(", ")
    inputs = [random(*sizes[n], dtype=torch.float64).requires_grad_() for n in names]

    def call(x, weight=None, bias=None):
        return tilenorm.rms_norm(x, (3, 5), weight, 1e-3, bias=bias, offset=offset)

    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


def tangent_by_dual_numbers(function, x, v):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, v)
        return torch.autograd.forward_ad.unpack_dual(function(dual)).tangent


TRANSFORMS = {
    "forward mode": tangent_by_dual_numbers,
    "jvp": lambda f, x, v: torch.func.jvp(f, (x,), (v,))[1],
    "vjp": lambda f, x, v: torch.func.vjp(f, x)[1](v)[0],
    "grad": lambda f, x, v: torch.func.grad(lambda x: f(x).mul(v).sum())(x),
    "vmap": lambda f, x, v: torch.func.vmap(f)(torch.stack([x, v])),
    "jacrev": lambda f, x, v: torch.func.jacrev(f)(x),
    "hessian": lambda f, x, v: torch.func.hessian(lambda x: f(x).mul(v).sum())(x),
}


@ON_EACH_DEVICE
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(device, transform):
    x, v, weight = (random(3, 8, device=device, seed=s) for s in range(3))
    apply = TRANSFORMS[transform]
    got = apply(lambda x: tilenorm.rms_norm(x, (8,), weight[0], 1e-5), x, v)
    expected = apply(lambda x: F.rms_norm(x, (8,), weight[0], 1e-5), x, v)
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6)


@NEEDS_GPU
def test_transforms_on_a_gpu_say_that_the_reference_runs():
    x = random(3, 8, device="cuda")
    with pytest.warns(tilenorm.ReferenceWarning, match=r"torch\.func"):
        torch.func.vmap(lambda x: tilenorm.rms_norm(x, (8,)))(x)
    with pytest.raises(RuntimeError, match=r"'cutile' was asked for, but torch\.func"):
        torch.func.vmap(lambda x: tilenorm.rms_norm(x, (8,), backend="cutile"))(x)
