"""The same bits in calls that tests/sweep does not make."""

import pytest
import torch

import tilenorm

from .cuda_helpers import forms_and_widths, made, train
from .helpers import EPS, FAMILY, NEEDS_GPU, RMS, arguments_by_port, call, op_call, random, same

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("n", [64, 1001, 4096, 16384, 65536])
@pytest.mark.parametrize("name", ["add_rms_norm", "add_layer_norm"])
def test_the_sum_has_the_bits_of_an_addition(name, n):
    tensors, _ = made(FAMILY[name], 333, n)
    _, total = call(FAMILY[name], tensors)
    assert torch.equal(total, tensors["input"] + tensors["residual"])


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
    given = arguments_by_port(tensors)
    made_by_op = op_call(form.op, given, n, eps=EPS, **form.options)
    outputs = [made_by_op[name] for name in ("output", "residual_out") if name in made_by_op]
    grads = torch.autograd.grad(outputs, list(tensors.values()), incoming)
    expected = train(form, tensors, incoming)
    assert same(dict(zip(expected, (*outputs, *grads), strict=True)), expected)
    numbers = ("mean", "rstd") if "layer" in form.op else ("rstd",)
    assert all(made_by_op[name].shape == (333,) for name in numbers)


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
