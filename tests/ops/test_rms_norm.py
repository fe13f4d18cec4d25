"""tilenorm.rms_norm takes what F.rms_norm takes, and gives what it gives."""

import pytest
import torch
import torch.nn.functional as F

import tilenorm

from .helpers import DEVICES, DTYPES, assert_within, name_of, oracle, random

pytestmark = pytest.mark.parametrize("device", DEVICES)


def assert_same(got, expected):
    """To five units in the last place of float32: both round at every step, each in its own way."""
    options = {"rtol": 6e-7, "atol": 6e-7, "equal_nan": True, "check_device": False}
    torch.testing.assert_close(got, expected, **options)


FORMS = {
    "positional": lambda f, x, w: f(x, (24,), w, 1e-5),
    "keywords": lambda f, x, w: f(input=x, normalized_shape=(24,), weight=w, eps=1e-5),
    "list": lambda f, x, w: f(x, [24], w),
    "torch.Size": lambda f, x, w: f(x, x.shape[-1:], w),
    "numpy sizes": lambda f, x, w: f(x, (w.cpu().numpy().astype("int64").size,), w),
    "no weight": lambda f, x, w: f(x, (24,)),
    "weight None": lambda f, x, w: f(x, (24,), None, 1e-3),
    "eps None": lambda f, x, w: f(x, (24,), w, None),
    "eps 0": lambda f, x, w: f(x, (24,), w, 0.0),
    "eps an int": lambda f, x, w: f(x, (24,), w, 1),
    "two dimensions": lambda f, x, w: f(x.view(5, 4, 6), (4, 6), w.view(4, 6)),
    "three dimensions": lambda f, x, w: f(x.view(5, 2, 3, 4), (2, 3, 4), w.view(2, 3, 4)),
    "all dimensions": lambda f, x, w: f(x, (5, 24)),
    "one row": lambda f, x, w: f(x[0], (24,), w),
    "sizes of 1": lambda f, x, w: f(x.view(5, 1, 24, 1), (24, 1), w.view(24, 1)),
    "no rows": lambda f, x, w: f(x[:0], (24,), w),
    "no rows, three dimensions": lambda f, x, w: f(x.view(5, 2, 12)[:, :0], (12,), w[:12]),
    "one column": lambda f, x, w: f(x.view(120, 1), (1,), w[:1]),
    "no columns": lambda f, x, w: f(x[:, :0], (0,), w[:0]),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(device, form):
    x = random(5, 24, device=device)
    w = random(24, device=device, seed=1)
    expected = FORMS[form](F.rms_norm, x.cpu(), w.cpu())
    got = FORMS[form](tilenorm.rms_norm, x, w)
    assert got.device == x.device
    assert_same(got, expected)


def test_eps_may_be_a_numpy_number(device):
    numpy = pytest.importorskip("numpy")
    x = random(3, 8, device=device)
    got = tilenorm.rms_norm(x, (8,), None, numpy.float32(0.25))
    assert torch.equal(got, tilenorm.rms_norm(x, (8,), None, 0.25))


@pytest.mark.parametrize("offset", [0.0, 1.0, -0.5])
@pytest.mark.parametrize("parameters", ["none", "weight", "bias", "both", "both float32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_accuracy(device, dtype, parameters, offset):
    x = random(7, 96, dtype=dtype, device=device)
    dtype = torch.float32 if parameters == "both float32" else dtype
    weight = random(96, dtype=dtype, device=device, seed=1)
    bias = random(96, dtype=dtype, device=device, seed=2)
    weight = None if parameters in ("none", "bias") else weight
    bias = None if parameters in ("none", "weight") else bias
    y = tilenorm.rms_norm(x, (96,), weight, 1e-6, bias=bias, offset=offset)
    peer = F.rms_norm(x, (96,), weight, 1e-6) if bias is None and not offset else None
    assert y.dtype == x.dtype
    assert_within("y", y, oracle(x, (96,), weight, 1e-6, bias, offset).y, peer)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_eps_none_is_what_pytorch_means(device, dtype, scale):
    # At 1e-4 the mean square is 1e-8: another eps, the dtype's own say, changes the first digit.
    x = (random(4, 64, dtype=torch.float64) * scale).to(dtype).to(device)
    got, peer = tilenorm.rms_norm(x, (64,)), F.rms_norm(x, (64,))
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    assert_within("y", got, oracle(x, (64,), eps=eps).y)
    torch.testing.assert_close(got, peer, rtol=4 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("n", [16, 17])
def test_nan_and_inf_stay_in_their_row(device, value, n):
    x = random(3, n, device=device)
    x[1, n - 1] = value
    got = tilenorm.rms_norm(x, (n,))
    # PyTorch on the CPU: on CUDA it makes a NaN of the whole row where N does not fill vectors.
    assert torch.equal(got.isnan().cpu(), F.rms_norm(x.cpu(), (n,)).isnan())
    assert_same(got[::2], tilenorm.rms_norm(x[::2], (n,)))


LAYOUTS = {
    "transposed": lambda x: x.t().contiguous().t(),
    "rows apart": lambda x: F.pad(x, (0, 8))[:, :24],
    "rows apart, off by one": lambda x: F.pad(x, (1, 6))[:, 1:25],
    "every second column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "every second row": lambda x: x.repeat_interleave(2, 0)[::2],
    "offset start": lambda x: torch.cat([x.new_zeros(3), x.flatten()])[3:].view_as(x),
    "a head of four": lambda x: torch.stack([x] * 4, 1)[:, 2],
    "permuted batch": lambda x: x.view(2, 3, 24).transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
def test_layout_changes_no_bit(device, dtype, layout):
    x = random(6, 24, dtype=dtype, device=device)
    view = LAYOUTS[layout](x)
    kept = view.clone()
    y = tilenorm.rms_norm(view, (24,))
    assert y.is_contiguous()
    assert torch.equal(y.reshape(6, 24), tilenorm.rms_norm(x, (24,)))
    assert torch.equal(view, kept), "the input was written to"


def test_same_row_many_times(device):
    x = random(1, 24, device=device)
    y = tilenorm.rms_norm(x.expand(5, 24), (24,))
    assert y.is_contiguous()
    assert torch.equal(y, tilenorm.rms_norm(x, (24,)).expand(5, 24))


def test_same_number_along_a_row(device):
    x = random(5, 1, device=device)
    assert torch.equal(
        tilenorm.rms_norm(x.expand(5, 24), (24,)),
        tilenorm.rms_norm(x.expand(5, 24).contiguous(), (24,)),
    )


@pytest.mark.parametrize("stride", [0, 2])
def test_weight_and_bias_may_be_strided(device, stride):
    x = random(5, 24, device=device)
    storage = random(48, device=device, seed=1)
    view = storage.as_strided((24,), (stride,))
    got = tilenorm.rms_norm(x, (24,), view, bias=view)
    assert torch.equal(got, tilenorm.rms_norm(x, (24,), view.clone(), bias=view.clone()))


def test_parameters(device):
    x = random(5, 24, device=device)
    weight = torch.nn.Parameter(random(24, device=device, seed=1))
    bias = torch.nn.Parameter(random(24, device=device, seed=2))
    y = tilenorm.rms_norm(x, (24,), weight, bias=bias)
    assert y.requires_grad
    assert torch.equal(y, tilenorm.rms_norm(x, (24,), weight.data, bias=bias.data))


@pytest.mark.parametrize("n", [1, 3, 24, 1000])
def test_with_and_without_grad_the_same_bits(device, n):
    x = random(5, n, dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        plain = tilenorm.rms_norm(x.requires_grad_(), (n,))
    assert not plain.requires_grad
    assert torch.equal(plain, tilenorm.rms_norm(x, (n,)))
    with torch.inference_mode():
        assert torch.equal(plain, tilenorm.rms_norm(x.detach(), (n,)))


def test_pytorch_calls_it_in_place_of_its_own(device, monkeypatch):
    module = torch.nn.RMSNorm(24, eps=None, device=device)
    x = random(5, 24, device=device)
    expected = module(x)
    monkeypatch.setattr(F, "rms_norm", tilenorm.rms_norm)
    assert_same(module(x), expected)
