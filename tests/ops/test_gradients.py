"""First derivatives of every function, and that no others are computed than are asked for."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import tilenorm

from .helpers import (
    CALLS,
    DTYPES,
    EACH_CALL,
    EACH_DEVICE,
    EACH_FORM,
    EACH_WITH_OTHER,
    RMS,
    assert_step,
    call,
    expected_of,
    incoming_of,
    leaves_of,
    name_of,
    random,
    rows_of,
    same,
    step,
    tensors_of,
)

pytestmark = EACH_DEVICE
B, H, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def computed(tensors, asked) -> set[str]:
    """What is to be computed: one gradient serves several tensors."""
    asked, dtypes = set(asked) - {"skip"}, {n: t.dtype for n, t in tensors.items()}
    if "layer_scale" in asked:
        asked = asked - {"layer_scale"} | {"residual"}
    if "addend" in asked:
        alike = dtypes["addend"] == dtypes["input"]
        asked = asked - {"addend"} | {"input" if alike else "residual"}
    branch = {"dropout_mask", "layer_scale"} & tensors.keys()
    if "residual" in asked and dtypes["residual"] == dtypes["input"] and not branch:
        asked = asked - {"residual"} | {"input"}
    return asked


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


@EACH_CALL
@pytest.mark.parametrize("n", [1, 2, 24])
def test_accuracy_in_float32(device, form, n):
    """Also where all terms cancel, in rows of one or two elements."""
    check_accuracy(device, form, torch.float32, n)


@EACH_WITH_OTHER
@pytest.mark.parametrize("dtype, other", [(B, F32), (F32, B), (H, F32), (F64, F32)], ids=str)
def test_accuracy_with_a_tensor_of_another_dtype(device, form, dtype, other):
    check_accuracy(device, form, dtype, 96, other=other)


def check_accuracy(device, form, dtype, n, parameter=None, other=None):
    tensors = tensors_of(form, 37, n, dtype=dtype, parameter=parameter, other=other, device=device)
    got = step(form, tensors)
    wanted = {n: t.dtype for n, t in tensors.items() if n != "dropout_mask"}
    assert {name: got[name].dtype for name in wanted} == wanted
    assert_step(got, expected_of(form, tensors))


def combinations(form) -> list[tuple[str, ...]]:
    """Each tensor alone, all, and all but one."""
    names = [n for n in form.names if n != "dropout_mask"]
    counts = dict.fromkeys((1, len(names) - 1, len(names)))
    return [asked for count in counts for asked in itertools.combinations(names, count)]


COMBINATIONS = [(name, asked) for name, form in CALLS.items() for asked in combinations(form)]


@pytest.mark.parametrize(
    "name, asked", COMBINATIONS, ids=lambda v: v if v in CALLS else "+".join(v)
)
def test_each_combination_of_gradients(device, name, asked, gradients_made):
    form = CALLS[name]
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


@EACH_CALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0), (0, 0)], ids=name_of)
def test_empty_batches(device, form, shape, dtype):
    """Outputs of the input's shape, and gradients of zeros."""
    tensors = tensors_of(form, *shape, dtype=dtype, device=device)
    got = step(form, tensors)
    assert all(t.shape == shape for n, t in got.items() if n in ("output", "sum"))
    for name in tensors.keys() - {"dropout_mask"}:
        assert torch.equal(got[name], torch.zeros_like(tensors[name])), name


LAYOUTS = {
    "expanded to all": lambda t: t[:1, :1].expand(t.shape),
    "expanded rows": lambda t: t[:1].expand(t.shape),
    "expanded columns": lambda t: t[:, :1].expand(t.shape),
    "transposed": lambda t: t.t().contiguous().t(),
    "rows apart": lambda t: F.pad(t, (0, 8))[:, : t.shape[1]],
    "rows apart, off by one": lambda t: F.pad(t, (1, 7))[:, 1 : 1 + t.shape[1]],
    "every second column": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    "every second row": lambda t: t.repeat_interleave(2, 0)[::2],
    "offset start": lambda t: torch.cat([t.new_zeros(3), t.flatten()])[3:].view_as(t),
    "a head of four": lambda t: torch.stack([t] * 4, 1)[:, 2],
}


@EACH_CALL
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype, n", [(torch.bfloat16, 24), (torch.float32, 41)], ids=str)
def test_layout_changes_no_bit(device, form, dtype, n, layout):
    """Of one tensor with rows, of all, and of the gradients that come in."""
    tensors = tensors_of(form, 6, n, dtype=dtype, device=device)
    rows = {name: LAYOUTS[layout](t) for name, t in rows_of(tensors).items()}
    incoming = [LAYOUTS[layout](dy) for dy in incoming_of(tensors)]
    kept = {name: t.clone() for name, t in rows.items()}
    for given in (rows, {"input": rows["input"]}):
        plain = {name: t.contiguous() for name, t in given.items()}
        got = step(form, tensors | given, incoming)
        assert all(t.is_contiguous() for n, t in got.items() if n in ("output", "sum"))
        assert same(got, step(form, tensors | plain, [dy.contiguous() for dy in incoming]))
    if incoming[1:]:
        alone = [None, incoming[1]], [None, incoming[1].contiguous()]
        assert same(*(step(form, tensors, used) for used in alone))
    assert all(torch.equal(rows[name], kept[name]) for name in rows), "an input was written to"


def test_gradient_reaches_the_base_of_a_view(device):
    qkv = random(4, 3, 16, device=device).requires_grad_()
    dy = random(4, 16, device=device, seed=1)
    tilenorm.rms_norm(qkv[:, 1], (16,), None, 1e-6).backward(dy)
    assert_step({"input": qkv.grad[:, 1]}, expected_of(RMS, {"input": qkv[:, 1]}, [dy]), ["input"])
    assert not qkv.grad[:, ::2].any()


@EACH_CALL
def test_outputs_may_be_detached_in_place(device, form):
    """As zero-bubble pipelines do with what a stage returns. PyTorch refuses it for views."""
    tensors = tensors_of(form, 2, 3, 16, device=device)
    tensors["input"].requires_grad_()
    for y in call(form, tensors):
        assert not y.detach_().requires_grad


@EACH_CALL
def test_no_gradient_is_the_callers_memory(device, form):
    """Nor that of an output, nor is an output that of an input."""
    tensors = leaves_of(tensors_of(form, 7, 40, device=device))
    leaves = [t for t in tensors.values() if t.requires_grad]
    outputs, incoming = call(form, tensors), incoming_of(tensors)
    for used in [slice(None), slice(1, 2), slice(1)][: 3 if outputs[1:] else 1]:
        grads = torch.autograd.grad(
            outputs[used], leaves, incoming[used], allow_unused=True, retain_graph=True
        )
        theirs = [*outputs, *tensors.values()]
        theirs += () if form.other == "skip" else incoming  # a skip's gradient is the output's
        starts = [t.untyped_storage().data_ptr() for t in theirs]
        assert len({*starts}) == len(starts)
        made = {g.untyped_storage().data_ptr() for g in grads if g is not None}
        assert not made & {*starts}


@EACH_CALL
def test_what_the_backward_pass_needs_may_not_be_written_to(device, form):
    tensors = leaves_of(tensors_of(form, 5, 8, device=device))
    tensors["input"] = tensors["input"] * 1
    outputs = call(form, tensors)
    saved = outputs[-1] if form.other == "residual" else tensors["input"]
    with torch.no_grad():
        saved.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs[0].sum().backward()
