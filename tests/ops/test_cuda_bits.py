"""The same bits in calls that tests/sweep does not make."""

import pytest
import torch

from .cuda_helpers import forms_and_widths, made, train
from .helpers import EPS, FAMILY, NEEDS_GPU, RMS, arguments_by_port, call, op_call, same

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
