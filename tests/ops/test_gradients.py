"""First derivatives of every function, and that no others are computed than are asked for."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import tilenorm

from .helpers import (
    DTYPES,
    EACH_DEVICE,
    EACH_FORM,
    FAMILY,
    RMS,
    assert_step,
    call,
    expected_of,
    incoming_of,
    name_of,
    random,
    same,
    step,
    tensors_of,
)

pytestmark = EACH_DEVICE


def computed(tensors, asked) -> set[str]:
    """What is to be computed: one gradient serves input and residual of one dtype."""
    asked = set(asked) - {"skip"}  # whose gradient is the output's
    one = "residual" in tensors and tensors["residual"].dtype == tensors["input"].dtype
    return asked - {"residual"} | {"input"} if one and "residual" in asked else asked


def passes(tensors, asked) -> list[set[str]]:
    """What the backward passes are to compute: there is none that computes nothing."""
    found = computed(tensors, asked)
    return [found] if found else []


@pytest.mark.parametrize("parameter", [None, torch.float32], ids=["same", "float32"])
@pytest.mark.parametrize("n", [1, 24, 100, 513])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_accuracy_of_rms_norm(device, dtype, n, parameter):
    check_accuracy(device, RMS, dtype, n, parameter)


@EACH_FORM
@pytest.mark.parametrize("dtype, n", [(d, 100) for d in DTYPES] + [(torch.float32, 513)], ids=str)
def test_accuracy(device, form, dtype, n):
    check_accuracy(device, form, dtype, n)


@EACH_FORM
@pytest.mark.parametrize("n", [1, 2])
def test_accuracy_where_all_cancels(device, form, n):
    check_accuracy(device, form, torch.float32, n)


def check_accuracy(device, form, dtype, n, parameter=None):
    tensors = tensors_of(form, 37, n, dtype=dtype, parameter=parameter, device=device)
    got = step(form, tensors)
    assert {name: got[name].dtype for name in tensors} == {n: t.dtype for n, t in tensors.items()}
    assert_step(got, expected_of(form, tensors))


COMBINATIONS = [
    (name, asked)
    for name, form in FAMILY.items()
    for count in range(1, len(form.names) + 1)
    for asked in itertools.combinations(form.names, count)
]


@pytest.mark.parametrize(
    "name, asked", COMBINATIONS, ids=lambda v: v if v in FAMILY else "+".join(v)
)
def test_each_combination_of_gradients(device, name, asked, gradients_made):
    form = FAMILY[name]
    tensors = tensors_of(form, 19, 40, device=device)
    got = step(form, tensors, asked=asked, offset=1.0)
    assert got.keys() & tensors.keys() == set(asked)
    assert gradients_made == passes(tensors, asked), "computed other gradients than asked for"
    assert_step(got, expected_of(form, tensors, offset=1.0), got.keys())


@EACH_FORM
@pytest.mark.parametrize("absent", [("weight",), ("bias",), ("weight", "bias")], ids="+".join)
def test_absent_parameters(device, form, absent, gradients_made):
    tensors = tensors_of(form, 19, 40, device=device)
    tensors = {n: t for n, t in tensors.items() if n not in absent}
    assert_step(step(form, tensors), expected_of(form, tensors))
    assert gradients_made == passes(tensors, tensors)


@EACH_FORM
@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 4)], ids=name_of)
def test_parameters_of_several_dimensions(device, form, shape):
    tensors = tensors_of(form, 5, *shape, parameter_shape=shape, device=device)
    dims = len(shape)
    assert_step(step(form, tensors, dims=dims), expected_of(form, tensors, dims=dims))


@EACH_FORM
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)], ids=name_of)
def test_empty_batches_give_zero_gradients(device, form, shape, dtype):
    tensors = tensors_of(form, *shape, dtype=dtype, device=device)
    got = step(form, tensors)
    for name, tensor in tensors.items():
        assert torch.equal(got[name], torch.zeros_like(tensor)), name


LAYOUTS = {
    "expanded to all": lambda dy: dy[:1, :1].expand(dy.shape),
    "expanded rows": lambda dy: dy[:1].expand(dy.shape),
    "expanded columns": lambda dy: dy[:, :1].expand(dy.shape),
    "transposed": lambda dy: dy.t().contiguous().t(),
    "rows apart": lambda dy: F.pad(dy, (0, 8))[:, : dy.shape[1]],
    "rows apart, off by one": lambda dy: F.pad(dy, (1, 7))[:, 1 : 1 + dy.shape[1]],
}


@EACH_FORM
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [40, 41])
def test_layout_of_the_gradient_changes_no_bit(device, form, n, layout):
    tensors = tensors_of(form, 6, n, device=device)
    views = [LAYOUTS[layout](dy) for dy in incoming_of(tensors)]
    got = step(form, tensors, views)
    assert got["input"].is_contiguous()
    assert same(got, step(form, tensors, [v.contiguous() for v in views]))


@EACH_FORM
@pytest.mark.parametrize("layout", ["transposed", "rows apart", "rows apart, off by one"])
def test_layout_of_the_input_changes_no_bit(device, form, layout):
    tensors = tensors_of(form, 6, 40, device=device)
    rows = {n: LAYOUTS[layout](t) for n, t in tensors.items() if n in ("input", form.other)}
    assert same(step(form, tensors | rows), step(form, tensors))


def test_gradient_reaches_the_base_of_a_view(device):
    qkv = random(4, 3, 16, device=device).requires_grad_()
    dy = random(4, 16, device=device, seed=1)
    tilenorm.rms_norm(qkv[:, 1], (16,), None, 1e-6).backward(dy)
    assert_step({"input": qkv.grad[:, 1]}, expected_of(RMS, {"input": qkv[:, 1]}, [dy]), ["input"])
    assert not qkv.grad[:, ::2].any()


@EACH_FORM
@pytest.mark.parametrize("shape", [(5, 16), (2, 3, 16)], ids=name_of)
def test_outputs_may_be_detached_in_place(device, form, shape):
    """As zero-bubble pipelines do with what a stage returns. PyTorch refuses it for views."""
    tensors = tensors_of(form, *shape, device=device)
    tensors["input"].requires_grad_()
    for y in call(form, tensors):
        assert not y.detach_().requires_grad


@EACH_FORM
def test_what_the_backward_pass_needs_may_not_be_written_to(device, form):
    tensors = {n: t.requires_grad_() for n, t in tensors_of(form, 5, 8, device=device).items()}
    tensors["input"] = tensors["input"] * 1
    outputs = call(form, tensors)
    saved = outputs[-1] if form.other == "residual" else tensors["input"]
    with torch.no_grad():
        saved.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs[0].sum().backward()
