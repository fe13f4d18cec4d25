"""The outputs of every function: accurate, and the same bits in every layout and with grad."""

import pytest
import torch
import torch.nn.functional as F

from .helpers import (
    ADD,
    DTYPES,
    EACH_DEVICE,
    EACH_FORM,
    FAMILY,
    GATED,
    LAYER,
    RMS,
    assert_within,
    call,
    expected_of,
    name_of,
    random,
    tensors_of,
)

pytestmark = EACH_DEVICE
BF16 = torch.bfloat16

PARAMETERS = {"none": (), "weight": ("weight",), "bias": ("bias",), "both": ("weight", "bias")}
# form, dtype, parameters, their dtype, offset: all of rms_norm's, and of the others one of a kind.
ACCURACY = [
    (name, dtype, parameters, None, offset)
    for name in FAMILY
    for dtype in DTYPES
    for parameters in PARAMETERS
    for offset in (0.0, 1.0, -0.5)
    if name == "rms_norm" or (parameters == "both" and not offset) or (dtype, offset) == (BF16, 1.0)
]
ACCURACY += [
    (name, BF16, "both", torch.float32, offset) for name in FAMILY for offset in (0.0, 1.0)
]


def without(tensors, parameters):
    kept = PARAMETERS[parameters]
    return {n: t for n, t in tensors.items() if n in kept or n not in ("weight", "bias")}


@pytest.mark.parametrize("name, dtype, parameters, parameter, offset", ACCURACY, ids=name_of)
def test_accuracy(device, name, dtype, parameters, parameter, offset):
    form = FAMILY[name]
    tensors = tensors_of(form, 7, 96, dtype=dtype, parameter=parameter, device=device)
    tensors = without(tensors, parameters)
    outputs = call(form, tensors, offset=offset)
    assert outputs[0].dtype == dtype
    expected = expected_of(form, tensors, offset=offset)
    for name, y in zip(("output", "sum"), outputs, strict=False):
        assert_within(name, y, *expected[name])


@EACH_FORM
@pytest.mark.parametrize("dims", [2, 3])
def test_several_dimensions(device, form, dims):
    shape = (5, 2, 3, 4)
    tensors = tensors_of(form, *shape, parameter_shape=shape[-dims:], device=device)
    expected = expected_of(form, tensors, dims=dims)["output"]
    assert_within("output", call(form, tensors, dims)[0], *expected)


@EACH_FORM
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0), (0, 0), (3, 1)], ids=name_of)
def test_shapes_without_rows_or_columns(device, form, shape):
    tensors = tensors_of(form, *shape, device=device)
    expected = expected_of(form, tensors)
    for name, y in zip(("output", "sum"), call(form, tensors), strict=False):
        assert y.device == tensors["input"].device
        assert_within(name, y, *expected[name])


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


@EACH_FORM
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
def test_layout_changes_no_bit(device, form, dtype, layout):
    tensors = tensors_of(form, 6, 24, dtype=dtype, device=device)
    rows = {n: LAYOUTS[layout](t) for n, t in tensors.items() if n in ("input", form.other)}
    kept = {n: t.clone() for n, t in rows.items()}
    for got, expected in zip(call(form, tensors | rows), call(form, tensors), strict=True):
        assert got.is_contiguous()
        assert torch.equal(got.reshape(6, 24), expected)
    assert all(torch.equal(rows[n], kept[n]) for n in rows), "an input was written to"


@EACH_FORM
@pytest.mark.parametrize("shape", [(1, 24), (5, 1)], ids=["rows", "columns"])
def test_expanded(device, form, shape):
    tensors = tensors_of(form, *shape, parameter_shape=(24,), device=device)
    rows = {n: t.expand(5, 24) for n, t in tensors.items() if n in ("input", form.other)}
    outputs = call(form, tensors | rows)
    expected = call(form, tensors | {n: t.contiguous() for n, t in rows.items()})
    for got, wanted in zip(outputs, expected, strict=True):
        assert got.is_contiguous()
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("form", [RMS, LAYER], ids=["rms", "layer"])
@pytest.mark.parametrize("stride", [0, 2])
def test_weight_and_bias_may_be_strided(device, form, stride):
    tensors = tensors_of(form, 5, 24, device=device)
    view = random(48, device=device, seed=1).as_strided((24,), (stride,))
    got = call(form, tensors | {"weight": view, "bias": view})
    expected = call(form, tensors | {"weight": view.clone(), "bias": view.clone()})
    assert torch.equal(got[0], expected[0])


@EACH_FORM
def test_parameters(device, form):
    tensors = tensors_of(form, 5, 24, device=device)
    parameters = {n: torch.nn.Parameter(tensors[n]) for n in ("weight", "bias")}
    y = call(form, tensors | parameters)[0]
    assert y.requires_grad
    assert torch.equal(y, call(form, tensors)[0])


@EACH_FORM
@pytest.mark.parametrize("n", [1, 3, 24, 1000])
def test_with_and_without_grad_the_same_bits(device, form, n):
    tensors = tensors_of(form, 5, n, dtype=torch.bfloat16, device=device)
    leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    with torch.no_grad():
        plain = call(form, leaves)
    assert not any(y.requires_grad for y in plain)
    with torch.inference_mode():
        inferred = call(form, tensors)
    for a, b, c in zip(plain, call(form, leaves), inferred, strict=True):
        assert b.requires_grad
        assert torch.equal(a, b) and torch.equal(a, c)


@pytest.mark.parametrize("form", [LAYER, ADD, GATED], ids=["layer", "add", "gated"])
def test_outputs_are_memory_of_their_own(device, form):
    tensors = tensors_of(form, 5, 24, device=device)
    if form is ADD:
        tensors["residual"] = torch.zeros_like(tensors["residual"])  # the sum is the input
    outputs = call(form, tensors)
    starts = [t.untyped_storage().data_ptr() for t in (*tensors.values(), *outputs)]
    assert len(set(starts)) == len(starts)
