"""Calls that were checked before: found again where nothing that counts differs, and only there."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import tilenorm
from tilenorm.ops import call as calls
from tilenorm.ops import torch_private
from tilenorm.ops.call import MOST_CALLS, MOST_GUARDS, remembered

from .helpers import (
    RMS,
    call,
    random,
    same,
    step,
    tensors_of,
)
from .passes import Seen

N = 40


@pytest.fixture(autouse=True)
def checked(as_on_a_gpu, monkeypatch) -> list[str]:
    """A list that gets the names of the functions whose calls are checked."""
    seen, original = [], calls.checked
    monkeypatch.setattr(calls, "checked", lambda op, *a: seen.append(op.name) or original(op, *a))
    return seen


@pytest.mark.parametrize("lead", [(5,), (2, 3), ()], ids=str)
def test_the_same_bits_without_checks(device, form, lead, checked):
    tensors = tensors_of(form, *lead, N, device=device)
    expected = step(form, tensors), call(form, tensors)
    assert len(checked) == 2
    assert same(step(form, tensors), expected[0])
    assert all(map(torch.equal, call(form, tensors), expected[1]))
    assert len(checked) == 2


def test_any_number_of_rows(device, form, checked):
    call(form, tensors_of(form, 5, N, device=device))
    for rows in (1, 7, 0, 5):
        tensors = tensors_of(form, rows, N, device=device)
        assert call(form, tensors)[0].shape == (rows, N)
    assert len(checked) == 1


def one_element_in(x):
    """A copy that does not start on 16 bytes."""
    return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)


def under_autocast(x, w):
    with torch.autocast(x.device.type, torch.bfloat16):
        return tilenorm.layer_norm(x.bfloat16(), (N,), w)


def masked(x, w, scale):
    how = {"dropout_mask": x > 0, "dropout_scale": scale}
    return tilenorm.add_rms_norm(x, 2 * x, (N,), w, 1e-6, **how)[0]


def rms(x, w, eps=1e-6, shape=(N,), **options):
    return tilenorm.rms_norm(x, shape, w, eps, **options)


OTHER = {
    "another eps": lambda x, w: rms(x, w, 1e-3),
    "no eps": lambda x, w: rms(x, w, None),
    "an offset": lambda x, w: rms(x, w, offset=1.0),
    "rounded early": lambda x, w: rms(x.bfloat16(), w.bfloat16(), rounding="early"),
    "the reference": lambda x, w: rms(x, w, backend="reference"),
    "layer_norm": lambda x, w: tilenorm.layer_norm(x, (N,), w, None, 1e-6),
    "a list": lambda x, w: rms(x, w, shape=[N]),
    "both dimensions": lambda x, w: rms(x, None, shape=x.shape),
    "a row of two dimensions": lambda x, w: rms(x[:1], w[None], shape=(1, N)),
    "heads": lambda x, w: rms(x.view(3, 2, N), torch.stack([w, 2 * w])),
    "a bias for a weight": lambda x, w: rms(x, None, bias=w),
    "no weight": lambda x, w: rms(x, None),
    "a parameter": lambda x, w: rms(x, nn.Parameter(w)).detach(),
    "another dtype": lambda x, w: rms(x.bfloat16(), w),
    "three dimensions": lambda x, w: rms(x.view(2, 3, N), w),
    "one dimension": lambda x, w: rms(x[0], w),
    "no rows": lambda x, w: rms(x[:0], w),
    "rows apart": lambda x, w: rms(torch.cat([x, x], 1)[:, :N], w),
    "columns first": lambda x, w: rms(x.t().contiguous().t(), w),
    "one row of an odd stride": lambda x, w: rms(x[:1].as_strided((1, N), (7, 1)), w),
    "one element in": lambda x, w: rms(one_element_in(x), w),
    "a weight one element in": lambda x, w: rms(x, one_element_in(w)),
    "a strided weight": lambda x, w: rms(x, w.repeat_interleave(2)[::2]),
    "under autocast": under_autocast,
    "in inference mode": torch.inference_mode()(lambda x, w: rms(x, w)),
    "with gradients": lambda x, w: torch.autograd.grad(rms(x.requires_grad_(), w).sum(), x)[0],
    "without": lambda x, w: torch.no_grad()(rms)(x.requires_grad_(), w),
    "its own residual": lambda x, w: tilenorm.add_rms_norm(x, x, (N,), w, 1e-6)[0],
    "a second residual": lambda x, w: tilenorm.add_rms_norm(x, (x, 2 * x), (N,), w, 1e-6)[0],
    "masked": lambda x, w: masked(x, w, 1.0),
    "masked and larger": lambda x, w: masked(x, w, 2.0),
    "transformed": lambda x, w: torch.func.vmap(lambda row: rms(row, w))(x),
    "a constant of a transform": lambda x, w: torch.func.vmap(lambda i: i * rms(x, w))(x),
    "a gradient of torch.func": lambda x, w: torch.func.grad(lambda x: rms(x, w).sum())(x),
}


@pytest.mark.parametrize("name", OTHER)
def test_another_call_gives_the_bits_it_would_give_alone(device, name):
    other, x, w = OTHER[name], random(6, N, device=device), random(N, device=device, seed=1)
    expected = other(x.clone(), w.clone())
    remembered.cache_clear()
    first = rms(x, w)
    for _ in range(2):
        got = other(x.clone(), w.clone())
        assert got.dtype == expected.dtype and torch.equal(got, expected)
        assert torch.equal(rms(x, w), first)


def test_a_mode_sees_the_op(device):
    tensors = tensors_of(RMS, 5, N, device=device)
    call(RMS, tensors)
    with Seen() as seen:
        call(RMS, tensors)
    assert seen.ops == [torch.ops.tilenorm.rms_norm.default]


def test_a_dual_level_runs_the_reference(device, checked):
    tensors = tensors_of(RMS, 5, N, device=device)
    call(RMS, tensors)
    with forward_ad.dual_level():
        x = forward_ad.make_dual(tensors["input"], torch.ones_like(tensors["input"]))
        (y,) = call(RMS, tensors | {"input": x})
        assert forward_ad.unpack_dual(y).tangent is not None


def test_another_current_device_is_not_served(device, checked, monkeypatch):
    tensors = tensors_of(RMS, 5, N, device=device)
    call(RMS, tensors)
    monkeypatch.setattr(torch_private, "current_device", lambda: 1)
    call(RMS, tensors)
    assert len(checked) == 2


def test_a_bool_is_no_size(device):
    x = random(5, 1, device=device)
    rms(x, None, shape=(1,))
    with pytest.raises(TypeError, match="'normalized_shape' takes a tuple of ints"):
        rms(x, None, shape=(True,))


@pytest.mark.parametrize("shape", [(), (1,)], ids=["taken", "refused"])
def test_a_tensor_in_place_of_a_number_is_not_kept(device, shape):
    eps = torch.full(shape, 1e-5)
    with pytest.raises(TypeError) if shape else nullcontext():
        tilenorm.layer_norm(random(5, N, device=device), (N,), None, None, eps)
    alive = weakref.ref(eps)
    del eps
    gc.collect()
    assert alive() is None


def test_what_is_remembered_is_bounded(device):
    for number in range(MOST_CALLS + 9):
        remembered("rms_norm", 1e-6 * number)
    assert remembered.cache_info().currsize == MOST_CALLS
    remembered.cache_clear()
    for dims in range(1, MOST_GUARDS + 4):
        rms(random(*[1] * dims, N, device=device), None)
    how = (1e-6, None, 0b1100, tuple, 0.0, "late", N)  # the bits: which tensors there are
    assert len(remembered("rms_norm", *how)) == MOST_GUARDS


def test_a_tensor_given_twice(device, checked):
    """Calls with one tensor for input and residual are told from those with two."""
    x, r = random(5, N, device=device), random(5, N, device=device, seed=1)
    for residual in (x, r, x, r):
        expected = tilenorm.rms_norm(x + residual, (N,), None, 1e-6)
        y, total = tilenorm.add_rms_norm(x, residual, (N,), None, 1e-6)
        assert torch.equal(y, expected) and torch.equal(total, x + residual)
    assert checked.count("add_rms_norm") == 2
