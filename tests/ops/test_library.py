"""The torch.library ops: their contracts, and what tracers make of them."""

import itertools
from functools import partial

import pytest
import torch
from torch.library import opcheck
from torch.testing._internal.two_tensor import TwoTensor

from tilenorm.spec import Options

from .helpers import (
    ADD,
    CALLS,
    EPS,
    GATED,
    LAYER,
    RMS,
    arguments_by_port,
    by_inductor,
    leaves_of,
    op_arguments,
    op_call,
    random,
    step,
    tensors_of,
)
from .passes import Seen, check_decomposition

OPS = torch.ops.tilenorm
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def forward_arguments(form, tensors, save=True, offset=1.0, **options):
    """The arguments of the op of a form."""
    given = arguments_by_port(tensors)
    hidden, options = tensors["input"].shape[-1], {"offset": offset, **form.options, **options}
    return op_arguments(form.op, given, hidden, save, **options)


def op_of(form):
    return getattr(OPS, form.op).default


def backward_arguments(form, tensors, **changes):
    """Those with which a step calls norm_backward. changes: of some, by their names."""
    with Seen() as seen:
        step(form, tensors, offset=1.0)
    op, arguments = seen.calls[-1]
    given = {argument.name: argument.default_value for argument in op._schema.arguments}
    return tuple((given | dict(zip(given, arguments, strict=False)) | changes).values())


INPUTS = {
    "matrix": lambda device: random(3, 40, device=device),
    "bfloat16": lambda device: random(3, 40, dtype=BF16, device=device),
    "float64": lambda device: random(3, 40, dtype=F64, device=device),
    "three dimensions": lambda device: random(2, 3, 40, device=device),
    "one row": lambda device: random(40, device=device),
    "no rows": lambda device: random(0, 40, device=device),
    "no elements": lambda device: random(3, 0, device=device),
    "transposed": lambda device: random(40, 3, device=device).t(),
    "rows apart": lambda device: random(3, 48, device=device)[:, :40],
}
# form, shape, and what is not of the input's dtype or shape.
FORMS = {name: (form, (3, 40), {}) for name, form in CALLS.items() if form is not RMS} | {
    "residual float32": (ADD, (3, 40), {"dtype": BF16, "other": F32}),
    "masked, residual float32": (
        CALLS["add_rms_norm, masked"],
        (3, 40),
        {"dtype": BF16, "other": F32},
    ),
    "residual float64": (ADD, (3, 40), {"other": F64}),
    "gate float32": (GATED, (3, 40), {"dtype": BF16, "other": F32, "parameter": F32}),
    "heads": (LAYER, (2, 3, 8), {"parameter_shape": (3, 8)}),
}
ABSENT = ("weight",)
MASKS = [[*m] for m in itertools.product((True, False), repeat=5) if sum(m) == 1]


def made(case, device, drop=()):
    """A form and its tensors, which require grad, of a case of INPUTS or FORMS."""
    if case in INPUTS:
        form, x = RMS, INPUTS[case](device)
        tensors = tensors_of(RMS, x.shape[-1], dtype=x.dtype, device=device)
        tensors |= {"input": x.detach()}
    else:
        form, shape, options = FORMS[case]
        tensors = tensors_of(form, *shape, device=device, **options)
    return form, leaves_of({n: t for n, t in tensors.items() if n not in drop})


@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize("case", [*INPUTS, *FORMS])
def test_opcheck_forward(device, case, save):
    form, tensors = made(case, device)
    if not save:
        tensors = {n: t.detach() for n, t in tensors.items()}
    arguments = forward_arguments(form, tensors, save)
    assert save or op_of(form)(*arguments)[-1].shape == (0,)
    opcheck(op_of(form), arguments)


ROWS = {  # an input's shape, how long its rows are, and the leading sizes
    "matrix": ((3, 40), 40, (3,)),
    "three dimensions": ((2, 3, 40), 40, (2, 3)),
    "two of them normalised": ((2, 3, 40), 120, (2,)),
    "one row": ((40,), 40, ()),
    "one row of two dimensions": ((3, 40), 120, ()),
    "a dimension of 1 before the rows": ((2, 1, 40), 40, (2, 1)),
    "a dimension of 1 after": ((2, 40, 1), 40, (2,)),
    "rows of one element": ((2, 3, 1), 1, (2, 3)),
    "no rows": ((2, 0, 40), 40, (2, 0)),
    "no elements": ((3, 0), 0, (0,)),
}


@pytest.mark.parametrize("case", ROWS)
def test_statistics_have_the_shape_of_the_rows(device, case, norm):
    """In the op, in its fake and in what Inductor's code calls; and the backward pass takes it."""
    shape, hidden, rows = ROWS[case]
    x = random(*shape, device=device)
    name, taken = f"{norm}_norm", op_arguments(f"{norm}_norm", {"input": x}, hidden)
    op, numbers = getattr(OPS, name), 2 if norm == "layer" else 1
    found, meta = op(*taken), op(x.to("meta"), *taken[1:])
    for results in (found, meta, by_inductor(name)(*taken)):
        assert [t.shape for t in results[1:]] == [rows] * numbers
        assert all(t.is_contiguous() for t in results[1:])
    mean, rstd = found[1] if norm == "layer" else None, found[-1]
    last = (*Options(hidden, norm), EPS, False, [True, False, False, False, False])
    saved = (x, None, None, None, mean, rstd)
    (dx, *_) = OPS.norm_backward(x, None, *saved, *last)
    flat = (*saved[:4], mean if mean is None else mean.reshape(-1), rstd.reshape(-1))
    assert torch.equal(dx, OPS.norm_backward(x, None, *flat, *last)[0])
    assert torch.equal(dx, by_inductor("norm_backward")(x, None, *saved, *last)[0])


@pytest.mark.parametrize("x", [random(3, 40), random(0, 40), torch.empty(3, 40, device="meta")])
def test_a_row_length_that_no_dimensions_hold_is_refused(x):
    with pytest.raises(RuntimeError, match=r"argument 'hidden' takes .* got 20 for an input of"):
        op_call("rms_norm", {"input": x}, 20)


@pytest.mark.parametrize("grad", [True, False])
def test_modes_and_subclasses_see_the_op(device, grad):
    form, tensors = made("matrix", device)
    arguments = forward_arguments(form, tensors)
    with torch.set_grad_enabled(grad):
        alone = OPS.rms_norm(*arguments)
        with Seen() as seen:
            found = OPS.rms_norm(*arguments)
        assert seen.ops[0] is OPS.rms_norm.default
        assert all(map(torch.equal, found, alone))
        assert found[0].requires_grad is grad
        inner = TwoTensor(arguments[0].detach(), arguments[0].detach())
        assert type(OPS.rms_norm(inner, *arguments[1:])[0]) is TwoTensor


@pytest.mark.parametrize("case", [*INPUTS, *FORMS])
def test_opcheck_backward(device, case):
    opcheck(OPS.norm_backward.default, backward_arguments(*made(case, device)))


@pytest.mark.parametrize("case", ["matrix", "residual float32", "gate float32"])
def test_decompositions_of_norm_backward(case):
    """Of one gradient, of none, and of several terms with the output."""
    check = partial(check_decomposition, OPS.norm_backward.default)
    for mask in (*MASKS, [False] * 5):
        check(backward_arguments(*made(case, "cpu"), grad_sum=None, output_mask=mask))
    if case == "matrix":
        terms = {f"grad_output_{i}": random(3, 40, seed=20 + i) for i in (2, 3)}
        check(backward_arguments(*made(case, "cpu"), **terms, output=True))
        check(backward_arguments(*made(case, "cpu", ABSENT)))


def test_a_backward_pass_without_rstd_says_so():
    x = random(3, 8).requires_grad_()
    y = OPS.rms_norm(*forward_arguments(RMS, {"input": x}, save=False))[0]
    with pytest.raises(RuntimeError, match="save was False, its backward needs it; pass True"):
        y.sum().backward()
