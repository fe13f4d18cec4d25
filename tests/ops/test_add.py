"""add_rms_norm and add_layer_norm: one residual or two, a dropout mask and a layer scale.

A call has the bits of the same operations one after the other, and so have its gradients. That of
the layer scale, a sum over rows, is within the error of float32.
"""

import pytest
import torch

import tilenorm

from .helpers import (
    BRANCHED,
    EACH_JOINED,
    EPS,
    FAMILY,
    JOINED,
    MASKED,
    before,
    call,
    incoming_of,
    name_of,
    op_call,
    random,
    step,
    tensors_of,
)
from .pretended import by

N = 40
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
ADDS = {name: form for name, form in FAMILY.items() if form.other == "residual"}
EACH_ADD = pytest.mark.parametrize("form", ADDS.values(), ids=ADDS)
SUMS = ADDS | JOINED | BRANCHED
# Dtypes of the input, of the residual that comes last, and of the first one or the layer scale.
DTYPES = [(BF16, BF16, BF16), (F32, F32, F32), (BF16, F32, BF16), (BF16, F32, F32)]
DTYPES += [(F16, F32, F32), (F32, BF16, F32), (F32, BF16, BF16), (BF16, F16, BF16)]
DTYPES += [(F64, F64, F64), (F32, F64, F32), (F64, F32, F64)]
CASES = [
    pytest.param(form, dtypes, id="-".join([name, *map(name_of, dtypes)]))
    for name, form in SUMS.items()
    for dtypes in DTYPES
    # With a layer scale, the residual has at least the digits of the input.
    if "layer_scale" not in form.branch or dtypes[:2] not in ((F32, BF16), (F64, F32))
]


def made(form, *shape, dtypes=(F32, F32, F32), device="cpu"):
    """The tensors of a form, with dtypes as in DTYPES."""
    dtype, residual, more = dtypes
    tensors = tensors_of(form, *shape, dtype=dtype, other=residual, device=device)
    return {n: t.to(more) if n in ("addend", "layer_scale") else t for n, t in tensors.items()}


def apart(form, tensors, **options):
    rest = {n: t for n, t in tensors.items() if n in FAMILY[form.op].names}
    return call(FAMILY[form.op], rest | {"input": before(form, tensors)}, **options)


def plain(form, tensors):
    """The norm without the addition."""
    tensors = {n: tensors[n] for n in ("input", "weight", "bias") if n in tensors}
    function = getattr(tilenorm, form.op.removeprefix("add_"))
    return function(**tensors, normalized_shape=tensors["input"].shape[-1:], eps=EPS)


def compare(found, expected):
    """Gradients of the layer scale, and all but the sum on a GPU, may be added up in another order,
    which tips a rounding.
    """
    assert found.keys() == expected.keys()
    for name, other in expected.items():
        assert found[name].dtype == other.dtype
        if name == "layer_scale" or (other.is_cuda and name != "sum"):
            close = {F16: 2e-2, BF16: 1e-1, F32: 1e-4, F64: 1e-10}
            bound = max(close[other.dtype], close[expected["output"].dtype])
            torch.testing.assert_close(found[name], other, rtol=bound, atol=bound)
        else:
            assert torch.equal(found[name], other), name


@pytest.mark.parametrize("form, dtypes", CASES)
def test_bits_are_those_of_the_operations_one_after_the_other(device, form, dtypes, served):
    tensors = made(form, 7, N, dtypes=dtypes, device=device)
    x, residual = before(form, tensors), tensors["residual"]
    total, (dy, dsum) = (x + residual).to(residual.dtype), incoming_of(tensors)
    with by(served, device):
        y, added = call(form, tensors)
        assert (y.dtype, added.dtype) == dtypes[:2]
        assert torch.equal(added, total)
        if x.dtype == dtypes[0]:
            for incoming in ((dy, dsum), (dy, None), (None, dsum)):
                compare(
                    step(form, tensors, incoming), step(form, tensors, incoming, function=apart)
                )
        # A GPU may add up a row in another order where it is not alone in being read. The norm of a
        # float16 sum is rounded to float16 before it becomes bfloat16.
        exact = dtypes[1] == dtypes[0] or (dtypes[1] == F32 and dtypes[0] != F64)
        if device == "cpu" and served == "reference" and exact:
            assert torch.equal(y, plain(form, tensors | {"input": total}).to(dtypes[0]))


@pytest.mark.parametrize("name", [n for n, f in BRANCHED.items() if "layer_scale" in f.branch])
def test_the_gradient_of_the_layer_scale(device, name, served):
    form = BRANCHED[name]
    tensors = made(form, 300, N, dtypes=(BF16, BF16, F32), device=device)
    with by(served, device):
        found = step(form, tensors)
    masked = before(form._replace(branch=form.branch[:-1]), tensors)
    products = found["residual"].double() * masked.double()
    torch.testing.assert_close(found["layer_scale"].double(), products.sum(0), rtol=1e-5, atol=1e-4)


@EACH_ADD
def test_the_mask_of_pytorchs_dropout(device, form):
    tensors = tensors_of(form._replace(options=MASKED), 64, N, device=device)
    dropped, mask = torch.ops.aten.native_dropout(tensors["input"], 0.1, True)
    _, total = call(form._replace(options=MASKED), tensors | {"dropout_mask": mask})
    assert torch.equal(total, dropped + tensors["residual"])


def test_what_the_op_refuses(device):
    x = random(5, N, device=device)
    for message, given in (
        ("take one residual", {"input": x, "residual": x, "addend": x, "dropout_mask": x > 0}),
        ("third dtype has fewer", {"input": x.half(), "residual": x.bfloat16(), "addend": x}),
    ):
        with pytest.raises(NotImplementedError, match=message):
            op_call("add_rms_norm", given, N, save=False)


@EACH_ADD
def test_gradients_that_accumulate_leave_each_other_alone(device, form):
    """Input and residual may get one tensor, or be one. A second pass adds to a grad in place."""
    tensors = {n: t.requires_grad_() for n, t in tensors_of(form, 7, 96, device=device).items()}
    once = step(form, tensors)
    both = tensors | {"residual": tensors["input"]}
    (total,) = torch.autograd.grad(call(form, both), tensors["input"], incoming_of(both))
    apart_from = step(form, both)
    assert torch.equal(total, apart_from["input"] + apart_from["residual"])
    for _ in range(2):
        torch.autograd.backward(call(form, tensors), incoming_of(tensors))
    for name, tensor in tensors.items():
        assert torch.equal(tensor.grad, 2 * once[name]), name


@EACH_JOINED
@pytest.mark.parametrize("kind", [tuple, list])
def test_a_sequence_of_any_kind(device, form, kind):
    tensors = tensors_of(form, 5, N, device=device)
    x, a, r, w, b = tensors.values()
    function, how = getattr(tilenorm, form.op), {"weight": w, "bias": b, "eps": EPS}
    found = function(x, kind((a, r)), (N,), **how)
    assert all(map(torch.equal, found, call(form, tensors)))
    one = function(x, kind((r,)), (N,), **how)
    assert all(map(torch.equal, one, function(x, r, (N,), **how)))
