"""What surrounds a norm in few models, as part of the call: a second residual.

A call has the bits of the same operations one after the other, and the gradients of their formula.
"""

import itertools
from contextlib import nullcontext

import pytest
import torch

from .helpers import (
    EACH_DEVICE,
    EACH_JOINED,
    assert_step,
    call,
    expected_of,
    incoming_of,
    name_of,
    same,
    step,
    tensors_of,
)
from .pretended import pretended_gpu

pytestmark = EACH_DEVICE
N = 40
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
# Dtypes of the input, of the tensors before the residual, and of the residual.
DTYPES = [(BF16, BF16, BF16), (F32, F32, F32), (BF16, BF16, F32), (BF16, F32, F32)]
DTYPES += [(F16, F32, F32), (F32, F32, BF16), (F64, F64, F64), (F32, BF16, BF16)]
EACH_DTYPES = pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(map(name_of, d)))
# On a CPU, by the reference and by the kernels in the interpreter.
SERVED = {"reference": nullcontext, "kernels": pretended_gpu}
EACH_WAY = pytest.mark.parametrize("served", SERVED)


def made(form, *shape, dtypes=(F32, F32, F32), device="cpu", **others):
    """The tensors of a form, with dtypes as in DTYPES."""
    dtype, before, residual = dtypes
    tensors = tensors_of(form, *shape, dtype=dtype, other=before, device=device, **others)
    return {n: t.to(residual) if n == "residual" else t for n, t in tensors.items()}


def served_by(served, device):
    return SERVED[served]() if device == "cpu" else nullcontext()


def apart(form, tensors, **options):
    """The same by operations of their own: what comes before the call of the plain function."""
    tensors = dict(tensors)
    if "addend" in tensors:
        addend = tensors.pop("addend")
        tensors["input"] = (tensors["input"] + addend).to(addend.dtype)
    return call(form, tensors, **options)


@EACH_WAY
@EACH_JOINED
@EACH_DTYPES
def test_bits_are_those_of_the_operations_one_after_the_other(device, form, dtypes, served):
    tensors = made(form, 7, N, dtypes=dtypes, device=device)
    with served_by(served, device):
        for _ in range(2):
            found, expected = call(form, tensors), apart(form, tensors)
            assert [y.dtype for y in found] == [dtypes[0], dtypes[2]]
            # Of an input of another dtype the plain function's output has that dtype.
            assert torch.equal(found[1], expected[1])
            assert dtypes[0] != dtypes[1] or torch.equal(found[0], expected[0])


@EACH_WAY
@EACH_JOINED
@EACH_DTYPES
def test_outputs_and_gradients(device, form, dtypes, served):
    tensors = made(form, 19, N, dtypes=dtypes, device=device)
    with served_by(served, device):
        got = step(form, tensors)
    assert {n: got[n].dtype for n in tensors} == {n: t.dtype for n, t in tensors.items()}
    assert_step(got, expected_of(form, tensors))


@EACH_JOINED
@pytest.mark.parametrize("dtypes", [(BF16, BF16, BF16), (BF16, BF16, F32), (BF16, F32, F32)])
@pytest.mark.parametrize("absent", [None, 0, 1], ids=["neither", "output", "sum"])
def test_each_gradient_alone(device, form, dtypes, absent, gradients_made):
    tensors = made(form, 7, N, dtypes=dtypes, device=device)
    incoming = [None if i == absent else dy for i, dy in enumerate(incoming_of(tensors))]
    expected = expected_of(form, tensors, incoming)
    for count in (1, 2):
        for asked in itertools.combinations(form.names, count):
            if absent == 0 and not {*asked} - {"weight", "bias"}:
                continue  # no gradient comes in
            gradients_made.clear()
            got = step(form, tensors, incoming, asked)
            reached = {*asked} - ({"weight", "bias"} if absent == 0 else set())
            assert got.keys() & tensors.keys() == reached
            assert [computed(tensors, asked)] * (absent != 0) == gradients_made
            assert_step(got, expected, got.keys())


def computed(tensors, asked) -> set[str]:
    """What is to be computed: the addend has the gradient of the input or of the residual."""
    asked, dtypes = set(asked), {n: t.dtype for n, t in tensors.items()}
    if "addend" in asked:
        alike = dtypes["addend"] == dtypes["input"]
        asked = asked - {"addend"} | {"input" if alike else "residual"}
    if "residual" in asked and dtypes["residual"] == dtypes["input"]:
        asked = asked - {"residual"} | {"input"}
    return asked


@EACH_JOINED
def test_no_gradient_is_the_callers_memory(device, form):
    tensors = {n: t.requires_grad_() for n, t in tensors_of(form, 7, N, device=device).items()}
    outputs, incoming = call(form, tensors), incoming_of(tensors)
    for used in ((0, 1), (1,)):
        ys, dys = [outputs[i] for i in used], [incoming[i] for i in used]
        leaves = list(tensors.values())
        grads = torch.autograd.grad(ys, leaves, dys, allow_unused=True, retain_graph=True)
        theirs = {t.untyped_storage().data_ptr() for t in (*incoming, *outputs, *leaves)}
        assert not theirs & {g.untyped_storage().data_ptr() for g in grads if g is not None}


@EACH_JOINED
def test_derivatives_agree_with_differences(device, form):
    tensors = tensors_of(form, 2, 3, 2, dtype=F64, parameter_shape=(3, 2), device=device)

    def function(*given):
        return call(form, dict(zip(tensors, given, strict=True)), 2, 1e-3, offset=1.0)

    inputs = [t.requires_grad_() for t in tensors.values()]
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@EACH_JOINED
def test_transforms(device, form):
    tensors = tensors_of(form, 3, N, device=device)
    names = [n for n in tensors if n not in ("weight", "bias")]
    parameters = {n: tensors[n] for n in tensors if n not in names}

    def function(*rows):
        return call(form, dict(zip(names, rows, strict=True)) | parameters)

    rows = [tensors[n] for n in names]
    for found, expected in zip(torch.func.vmap(function)(*rows), function(*rows), strict=True):
        torch.testing.assert_close(found, expected)

    def loss(*rows):
        return sum((y * y).sum() for y in function(*rows))

    places = tuple(range(len(rows)))
    leaves = [t.clone().requires_grad_() for t in rows]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    for found, other in zip(torch.func.grad(loss, places)(*rows), expected, strict=True):
        torch.testing.assert_close(found, other)


LAYOUTS = {
    "rows apart": lambda t: torch.nn.functional.pad(t, (0, 8))[:, : t.shape[1]],
    "off by one": lambda t: torch.nn.functional.pad(t, (1, 7))[:, 1 : 1 + t.shape[1]],
    "transposed": lambda t: t.t().contiguous().t(),
}


@EACH_WAY
@EACH_JOINED
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_change_no_bit(device, form, layout, served):
    tensors = tensors_of(form, 6, N, device=device)
    rows = [n for n in tensors if n not in ("weight", "bias")]
    with served_by(served, device):
        expected = step(form, tensors)
        for name in rows:
            assert same(step(form, tensors | {name: LAYOUTS[layout](tensors[name])}), expected)


@EACH_JOINED
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)], ids=name_of)
def test_empty_batches(device, form, shape):
    tensors = tensors_of(form, *shape, device=device)
    got = step(form, tensors)
    assert all(torch.equal(got[n], torch.zeros_like(t)) for n, t in tensors.items())


@EACH_JOINED
def test_heads(device, form):
    tensors = tensors_of(form, 5, 3, 16, parameter_shape=(3, 16), device=device)
    got = step(form, tensors)
    for head in range(3):
        one = {n: t[head] if n in ("weight", "bias") else t[:, head] for n, t in tensors.items()}
        for y, other in zip(call(form, one), (got["output"], got["sum"]), strict=True):
            torch.testing.assert_close(y, other[:, head])
