"""Drawn calls of every function: accurate, of the same bits in any layout and with and without
gradients, and with no other gradient computed than is asked for.
"""

from random import Random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support import layouts
from tests.support.calls import (
    DTYPES,
    FAMILY,
    Form,
    assert_step,
    before,
    call,
    expected_of,
    incoming_of,
    leaves_of,
    name_of,
    rows_of,
    same,
    step,
    tensors_of,
)
from tests.support.passes import passes
from tests.support.pretended import by

EXAMPLES = 4
B, F32, F64 = torch.bfloat16, torch.float32, torch.float64
# Leading sizes and normalised sizes. Rows of one or two elements, all of whose terms cancel.
LEADS = ((), (1,), (7,), (37,), (2, 3), (0,), (2, 0))
SIZES = ((1,), (2,), (3,), (24,), (96,), (100,), (513,), (0,), (4, 6), (2, 3, 4))


class Drawn(NamedTuple):
    """A step. incoming: a gradient for each output, None for one that is not used. asked: the
    tensors whose gradients are asked for. options: of `step`.
    """

    tensors: dict[str, Tensor]
    incoming: list[Tensor | None]
    asked: list[str]
    options: dict


def drawn_dtypes(rng: Random, form: Form, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Of the tensors beside the input: all that a call takes."""
    others = (dtype, dtype, F32, B)
    if dtype == F64 or form.branch:
        others = (dtype, F32) if dtype != F64 or not form.branch else (F64,)
    return {"other": rng.choice(others), "parameter": rng.choice((dtype, dtype, F32))}


def draw(rng: Random, form: Form, dtype: torch.dtype, device: str) -> Drawn:
    lead, size = rng.choice(LEADS), rng.choice(SIZES)
    heads = rng.choice((0, 0, 1, 6))
    shape = (*lead, *([heads] if heads else []), *size)
    tensors = tensors_of(
        form,
        *shape,
        dims=len(size),
        parameter_shape=(heads, *size) if heads else None,
        dtype=dtype,
        device=device,
        **drawn_dtypes(rng, form, dtype),
    )
    if "addend" in tensors and rng.random() < 0.5:
        tensors["addend"] = tensors["addend"].to(dtype)
    for name in ("weight", "bias"):
        if rng.random() < 0.2:
            del tensors[name]
    incoming = [*incoming_of(tensors)]
    if len(incoming) == 2 and rng.random() < 0.4:
        incoming[rng.randrange(2)] = None
    names = [n for n in tensors if n != "dropout_mask"]
    if incoming[0] is None:
        names = [n for n in names if n not in ("weight", "bias")]
    asked = rng.sample(names, rng.choice((1, len(names) - 1 or 1, len(names), len(names))))
    options = {"dims": len(size), "offset": rng.choice((0.0, 1.0, -0.5))}
    options["rounding"] = rng.choice(("late", "late", "early"))
    return Drawn(tensors, incoming, asked, options)


def laid_out(rng: Random, t: Tensor | None) -> Tensor | None:
    """The same numbers elsewhere in memory: apart, not aligned, in another order or broadcast."""
    if t is None or not t.dim() or not t.numel():
        return t
    return layouts.draw(rng, tuple(t.shape), False).filled(t)


def check_elsewhere(rng: Random, form: Form, drawn: Drawn, found: dict[str, Tensor]) -> None:
    """Where the tensors lie changes no bit, and none is written to."""
    of_rows = rng.choice(([*rows_of(drawn.tensors)], ["input"], [*drawn.tensors]))
    tensors = drawn.tensors | {n: laid_out(rng, drawn.tensors[n]) for n in of_rows}
    incoming = [laid_out(rng, dy) for dy in drawn.incoming]
    got = step(form, tensors, incoming, drawn.asked, **drawn.options)
    assert same(got, found)
    assert all(t.is_contiguous() for n, t in got.items() if n in ("output", "sum"))
    assert all(torch.equal(tensors[name], t) for name, t in drawn.tensors.items())


# float64 is served by the reference.
SERVED = [(dtype, served) for dtype in DTYPES for served in ("reference", "kernels")][:-1]


@pytest.mark.parametrize("dtype, served", SERVED, ids=name_of)
def test_accuracy(device, served, form, dtype, gradients_made):
    rng = Random(f"{form} {dtype} {served}")
    for _ in range(EXAMPLES):
        drawn = draw(rng, form, dtype, device)
        tensors, incoming, asked, options = drawn
        gradients_made.clear()
        with by(served, device):
            found = step(form, tensors, incoming, asked, **options)
            if tensors["input"].numel():
                # The gradient of a sum alone needs no kernel.
                wanted = [] if incoming[0] is None else passes(tensors, asked)
                assert gradients_made == wanted, "computed other gradients than asked for"
            check_elsewhere(rng, form, drawn, found)
            check_without_gradients(form, drawn, found)
            if form.other == "residual":
                check_addition(form, drawn, found)
        wanted = {n: (tensors[n].dtype, tensors[n].shape) for n in asked}
        assert {n: (t.dtype, t.shape) for n, t in found.items() if n in tensors} == wanted
        if tensors["input"].shape[-options["dims"] :].numel():
            # A layer scale's gradient is made of rounded numbers: test_add.py holds it.
            names = found.keys() - ({"layer_scale"} if dtype.itemsize == 2 else set())
            assert_step(found, expected_of(form, tensors, incoming, **options), names)


def check_without_gradients(form: Form, drawn: Drawn, found: dict[str, Tensor]) -> None:
    with torch.no_grad():
        plain = call(form, leaves_of(drawn.tensors), **drawn.options)
    with torch.inference_mode():
        inferred = call(form, drawn.tensors, **drawn.options)
    expected = [found[name] for name in ("output", "sum") if name in found]
    for one, other, y in zip(plain, inferred, expected, strict=True):
        assert not one.requires_grad and other.is_inference()
        assert torch.equal(one, y) and torch.equal(other, y)


def apart(form: Form, tensors: dict[str, Tensor], dims: int, **options) -> tuple[Tensor, ...]:
    """What comes before the last addition by operations of PyTorch's."""
    rest = {n: t for n, t in tensors.items() if n in FAMILY[form.op].names}
    return call(FAMILY[form.op], rest | {"input": before(form, tensors)}, dims, **options)


def check_addition(form: Form, drawn: Drawn, found: dict[str, Tensor]) -> None:
    """Results have the bits of the operations one after the other. That of the layer scale, and all
    but the sum on a GPU, may be added up in another order, which tips a rounding.
    """
    tensors, incoming, asked, options = drawn
    x, residual = before(form, tensors), tensors["residual"]
    assert torch.equal(found["sum"], (x + residual).to(residual.dtype))
    if x.dtype != tensors["input"].dtype or not x.numel():
        return
    for name, other in step(form, tensors, incoming, asked, function=apart, **options).items():
        if name == "layer_scale" or (other.is_cuda and name != "sum"):
            close = {torch.float16: 2e-2, B: 1e-1, F32: 1e-4, F64: 1e-10}
            bound = max(close[other.dtype], close[found["output"].dtype])
            torch.testing.assert_close(found[name], other, rtol=bound, atol=bound)
        else:
            assert torch.equal(found[name], other), name
