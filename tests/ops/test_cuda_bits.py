"""The same bits: run to run, whatever M, the rows beside, the layout, or the way of calling."""

import pytest
import torch

import tilenorm

from .cuda_helpers import call, same, step, tensors
from .helpers import NEEDS_GPU, name_of, random

pytestmark = NEEDS_GPU

REGIMES = [64, 256, 1000, 1001, 1024, 2048, 3072, 4096, 5120, 8192, 12288, 16384, 20480, 32768]
REGIMES += [65536, 131072]


CASES = [(n, torch.bfloat16) for n in REGIMES]
CASES += [(n, torch.float32) for n in (64, 1001, 4096, 16384, 32768)]


@pytest.mark.parametrize("n, dtype", CASES, ids=name_of)
def test_a_row_has_the_same_bits_whatever_is_beside_it(n, dtype):
    x, weight, bias, dy = tensors(4096, n, dtype)
    y, dx, _, _ = step(x, weight, bias, dy)
    for rows in (1, 2, 3, 15, 16, 17, 300):
        # From the end, so that a row's number in the tile and in the grid changes too.
        part = x.detach()[-rows:].clone().requires_grad_()
        got = step(part, weight, bias, dy[-rows:].clone())
        assert torch.equal(got[0], y[-rows:]), f"y of {rows} rows"
        assert torch.equal(got[1], dx[-rows:]), f"dx of {rows} rows"


@pytest.mark.parametrize("n", REGIMES)
def test_the_same_bits_again_and_without_grad(n):
    inputs = tensors(1037, n)
    first = step(*inputs)
    for _ in range(3):
        assert same(step(*inputs), first)
    with torch.no_grad():
        assert torch.equal(call(*inputs[:3]), first[0])


def strided(tensor, start, apart):
    """The same rows, `apart` elements further apart, `start` elements into an allocation."""
    rows, n = tensor.shape
    view = tensor.new_zeros(start + rows * (n + apart)).as_strided((rows, n), (n + apart, 1), start)
    return view.copy_(tensor)


STRIDES = {
    "rows apart": lambda t: strided(t, 0, 64),
    "rows apart, 16 bytes in": lambda t: strided(t, 16 // t.element_size(), 64),
    "one element in": lambda t: strided(t, 1, 0),
    "one element in, rows apart": lambda t: strided(t, 1, 64),
    "rows an odd distance apart": lambda t: strided(t, 0, 3),
    "middle of three": lambda t: torch.stack([t] * 3, 1)[:, 1],
    "transposed batch": lambda t: t.view(6, -1, t.shape[1]).transpose(0, 1).contiguous(),
    "columns transposed": lambda t: t.t().contiguous().t(),
}


@pytest.mark.parametrize("layout", STRIDES)
@pytest.mark.parametrize("n", [64, 1001, 1024, 4096, 12288, 65536])
def test_the_same_bits_in_every_layout(n, layout):
    x, weight, bias, dy = tensors(102, n)
    y, dx, dw, db = step(x, weight, bias, dy)
    view, dy_view = (STRIDES[layout](t.detach()) for t in (x, dy))
    if layout == "transposed batch":
        view, dy_view = view.transpose(0, 1), dy_view.transpose(0, 1)
    got = step(view.requires_grad_(), weight, bias, dy_view)
    assert got[0].is_contiguous() and got[1].is_contiguous()
    assert torch.equal(got[0].view_as(y), y), "y"
    assert torch.equal(got[1].view_as(y), dx), "dx"
    assert same(got[2:], (dw, db)), "dw or db"


@pytest.mark.parametrize("n", [64, 1001, 4096, 12288, 65536])
def test_one_row_of_an_odd_stride(n):
    x, weight, bias, dy = tensors(1, n)
    view = torch.cat([x.detach(), x.new_zeros(1, 1)], 1)[:, :n].requires_grad_()
    assert view.stride(0) == n + 1
    assert same(step(view, weight, bias, dy), step(x, weight, bias, dy))


@pytest.mark.parametrize("n", [64, 1001, 4096, 12288, 65536])
def test_the_ops_give_the_bits_of_the_eager_path(n):
    x, weight, bias, dy = tensors(333, n)
    y, rstd = torch.ops.tilenorm.rms_norm(x, weight, bias, n, 1e-6, 0.0, True)
    grads = torch.autograd.grad(y, (x, weight, bias), dy)
    assert same((y, *grads), step(x, weight, bias, dy))
    assert rstd.shape == (333,)


def train(steps=5):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.ones(1024, device="cuda"))
    bias = torch.nn.Parameter(torch.zeros(1024, device="cuda"))
    linear = torch.nn.Linear(1024, 1024, bias=False, device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.SGD([weight, bias, linear.weight], lr=0.1)
    for seed in range(steps):
        x = random(300, 1024, dtype=torch.bfloat16, device="cuda", seed=seed)
        out = tilenorm.rms_norm(linear(x), (1024,), weight, bias=bias)
        optimizer.zero_grad()
        out.float().square().mean().backward()
        optimizer.step()
    return weight.detach(), bias.detach(), linear.weight.detach()


def test_training_twice_gives_the_same_weights():
    first, second = train(), train()
    assert same(first, second)
    assert not torch.equal(first[0], torch.ones_like(first[0]))
