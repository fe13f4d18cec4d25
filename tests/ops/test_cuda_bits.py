"""The same bits: run to run, whatever M, the rows beside, the layout, or the way of calling."""

import pytest
import torch

import tilenorm
from tilenorm.spec import Options

from .cuda_helpers import OTHERS, forms_and_widths, made, train
from .helpers import EPS, FAMILY, NEEDS_GPU, RMS, call, name_of, random, same, step, tensors_of

pytestmark = NEEDS_GPU

REGIMES = [64, 256, 1000, 1001, 1024, 2048, 3072, 4096, 5120, 6144, 7168, 8192, 10240, 12288]
REGIMES += [16384, 20480, 32768, 65536, 131072]


CASES = [("rms_norm", n, torch.bfloat16) for n in REGIMES]
CASES += [("rms_norm", n, torch.float32) for n in (64, 1001, 4096, 5120, 7168, 8192, 12288)]
CASES += [("rms_norm", n, torch.float32) for n in (16384, 32768)]
CASES += [(name, n, torch.bfloat16) for name in OTHERS for n in (64, 4096, 65536)]


@pytest.mark.parametrize("name, n, dtype", CASES, ids=name_of)
def test_a_row_has_the_same_bits_whatever_is_beside_it(name, n, dtype):
    form = FAMILY[name]
    tensors, incoming = made(form, 4096, n, dtype)
    expected = train(form, tensors, incoming)
    by_rows = [n for n in expected if n not in ("weight", "bias")]
    for rows in (1, 2, 3, 15, 16, 17, 300):
        # From the end, so that a row's number in the tile and in the grid changes too.
        part = {n: t.detach()[-rows:] if n in by_rows else t for n, t in tensors.items()}
        part = {n: t.clone().detach().requires_grad_() for n, t in part.items()}
        got = train(form, part, [dy[-rows:].clone() for dy in incoming])
        for key in by_rows:
            assert torch.equal(got[key], expected[key][-rows:]), f"{key} of {rows} rows"


@pytest.mark.parametrize("n", [3072, 5120, 6144, 7168, 8192, 10240, 12288, 16384])
@pytest.mark.parametrize("weight", [None, torch.bfloat16, torch.float32])
def test_few_rows_have_the_bits_of_many(n, weight):
    """Where a few rows are not summed by the kernel that sums many."""
    x = random(1037, n, dtype=torch.bfloat16, device="cuda")
    w = None if weight is None else random(n, dtype=weight, device="cuda", seed=1)
    for options in ({}, {"bias": w}, {} if w is None else {"offset": 1.0}):
        expected = tilenorm.rms_norm(x, (n,), w, eps=EPS, **options)
        for rows in (1, 7, 16, 100, 132, 133, 264, 265, 528):
            few = x[-rows:].clone()
            got = tilenorm.rms_norm(few, (n,), w, eps=EPS, **options)
            assert torch.equal(got, expected[-rows:]), (rows, *options)
            got = tilenorm.rms_norm(few.requires_grad_(), (n,), w, eps=EPS, **options)
            assert torch.equal(got, expected[-rows:]), (rows, *options, "with grad")


@pytest.mark.parametrize("heads, d", [(6, 128), (32, 64), (8, 1001)])
def test_a_head_has_the_same_bits_whatever_is_beside_it(heads, d):
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    tensors = tensors_of(RMS, 700, heads, d, parameter_shape=(heads, d), **options)
    dy = random(700, heads, d, seed=9, **options)
    expected = step(RMS, tensors, [dy])
    for tokens in (1, 2, 3, 16, 17, 300):
        part = tensors | {"input": tensors["input"][-tokens:].clone()}
        got = step(RMS, part, [dy[-tokens:].clone()])
        for key in ("output", "input"):
            assert torch.equal(got[key], expected[key][-tokens:]), f"{key} of {tokens} tokens"


@forms_and_widths(REGIMES, [64, 4096])
def test_the_same_bits_again_and_without_grad(form, n):
    tensors, incoming = made(form, 1037, n)
    first = train(form, tensors, incoming)
    for _ in range(3):
        assert same(train(form, tensors, incoming), first)
    with torch.no_grad():
        for got, key in zip(call(form, tensors), ("output", "sum"), strict=False):
            assert torch.equal(got, first[key])


@pytest.mark.parametrize("n", [64, 1001, 4096, 16384, 65536])
@pytest.mark.parametrize("name", ["add_rms_norm", "add_layer_norm"])
def test_the_sum_has_the_bits_of_an_addition(name, n):
    tensors, _ = made(FAMILY[name], 333, n)
    _, total = call(FAMILY[name], tensors)
    assert torch.equal(total, tensors["input"] + tensors["residual"])


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
@forms_and_widths([64, 1001, 1024, 4096, 12288, 65536], [4096])
def test_the_same_bits_in_every_layout(form, n, layout):
    tensors, incoming = made(form, 102, n)
    expected = train(form, tensors, incoming)

    def view(tensor):
        laid = STRIDES[layout](tensor.detach())
        return laid.transpose(0, 1) if layout == "transposed batch" else laid

    rows = {n: view(tensors[n]).requires_grad_() for n in tensors if n in ("input", form.other)}
    got = train(form, tensors | rows, [view(dy) for dy in incoming])
    assert all(got[key].is_contiguous() for key in got)
    for key in got:
        assert torch.equal(got[key].view_as(expected[key]), expected[key]), key


@pytest.mark.parametrize("n", [64, 1001, 4096, 12288, 65536])
def test_one_row_of_an_odd_stride(n):
    tensors, incoming = made(RMS, 1, n)
    x = tensors["input"].detach()
    view = torch.cat([x, x.new_zeros(1, 1)], 1)[:, :n].requires_grad_()
    assert view.stride(0) == n + 1
    expected = train(RMS, tensors, incoming)
    assert same(train(RMS, tensors | {"input": view}, incoming), expected)


@forms_and_widths([64, 1001, 4096, 12288, 65536], [4096])
def test_the_ops_give_the_bits_of_the_eager_path(form, n):
    tensors, incoming = made(form, 333, n)
    given = [tensors.get(name) for name in ("input", "residual", "gate", "weight", "bias")]
    norm = "layer" if "layer" in form.op else "rms"
    gate_first = not form.options.get("norm_before_gate", True)
    activation = form.options.get("activation", "silu")
    options = Options(n, norm, gate_first=gate_first, activation=activation)
    y, total, mean, rstd = torch.ops.tilenorm.norm(*given, *options, EPS, True)
    outputs = (y, total)[: len(incoming)]
    grads = torch.autograd.grad(outputs, list(tensors.values()), incoming)
    expected = train(form, tensors, incoming)
    assert same(dict(zip(expected, (*outputs, *grads), strict=True)), expected)
    assert rstd.shape == (333,) and mean.shape == ((333,) if norm == "layer" else (0,))


def trained(steps=5):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.ones(1024, device="cuda"))
    bias = torch.nn.Parameter(torch.zeros(1024, device="cuda"))
    linear = torch.nn.Linear(1024, 1024, bias=False, device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.SGD([weight, bias, linear.weight], lr=0.1)
    for seed in range(steps):
        x = random(300, 1024, dtype=torch.bfloat16, device="cuda", seed=seed)
        out, total = tilenorm.add_rms_norm(linear(x), x, (1024,), weight, bias=bias)
        out = tilenorm.layer_norm(out + total, (1024,), weight, bias)
        optimizer.zero_grad()
        out.float().square().mean().backward()
        optimizer.step()
    return weight.detach(), bias.detach(), linear.weight.detach()


def test_training_twice_gives_the_same_weights():
    first, second = trained(), trained()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], torch.ones_like(first[0]))
