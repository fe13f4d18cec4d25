"""Drawn calls of every function: accurate, of the same bits in any layout and with and without
gradients, in warm calls as in cold ones, and with no other gradient computed than is asked for.
"""

from random import Random

import pytest
import torch
from torch import Tensor

from tests.support.calls import (
    DTYPES,
    FAMILY,
    PARAMETERS,
    Form,
    before,
    call,
    differing,
    leaves_of,
    messages,
    name_of,
    rows_of,
    step,
)
from tests.support.drawn import CHAINS, F32, F64, FORMS, B, Drawn, check, draw, laid_out
from tests.support.passes import passes
from tests.support.pretended import by
from tilenorm.table import NORMS

# Of plain norms, and of others.
EXAMPLES = {"reference": (4, 6), "kernels": (2, 1), "sm_80": (1, 1), "extension": (1, 1)}
# float64 is served by the reference.
SERVED = [(dtype, served) for dtype in DTYPES for served in ("reference", "kernels")][:-1]
SERVED += [(B, "sm_80"), (B, "extension")]


@pytest.mark.long
@pytest.mark.parametrize("dtype, served", SERVED, ids=name_of, indirect=["served"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_accuracy(device, served, form, dtype, gradients_made, told):
    rng = Random(f"{form} {dtype} {served}")
    for _ in range(EXAMPLES[served][form.op not in NORMS]):
        drawn = draw(rng, form, dtype, device)
        tensors, incoming, asked, options = drawn
        gradients_made.clear()
        with by(served, device):
            found = step(form, tensors, incoming, asked, **options)
            if form.op in NORMS and tensors["input"].numel() and served != "extension":
                # The gradient of a sum alone needs no kernel.
                wanted = [] if incoming[0] is None else passes(tensors, asked)
                assert gradients_made == wanted, "computed other gradients than asked for"
            check_elsewhere(rng, form, drawn, found)
            check_without_gradients(form, drawn, found)
            if form.other == "residual" and form.op in NORMS:
                check_addition(form, drawn, found)
            if form.op in CHAINS:
                check_chain(form, drawn, found)
        assert form.op in NORMS or served == "reference" or not messages(told)
        check(form, drawn, found)
        told.clear()


def check_elsewhere(rng: Random, form: Form, drawn: Drawn, found: dict[str, Tensor]) -> None:
    """Where the tensors lie changes no bit, and none is written to, also after calls of others that
    are repeated.
    """
    tensors, incoming = drawn.tensors, drawn.incoming
    of_rows = rng.choice(([*rows_of(tensors)], ["input"], [*tensors]))
    moved = tensors | {n: laid_out(rng, tensors[n]) for n in of_rows}
    dys = incoming and [laid_out(rng, dy) for dy in incoming]
    for given, dy in ((tensors, incoming), (tensors, incoming), (moved, dys)):
        got = step(form, given, dy, drawn.asked, **drawn.options)
        changed = differing(got, found)
        assert not changed, f"{changed}, where {places_of(given | by_number(dy))}"
    assert all(t.is_contiguous() for n, t in got.items() if n in ("output", "sum"))
    assert all(torch.equal(moved[name], t) for name, t in tensors.items())


def by_number(dys: list[Tensor | None] | None) -> dict[str, Tensor]:
    return {f"dy {i}": dy for i, dy in enumerate(dys or ()) if dy is not None}


def places_of(tensors: dict[str, Tensor]) -> str:
    """Where tensors lie that are not whole tensors."""
    views = {n: t for n, t in tensors.items() if t.storage_offset() or not t.is_contiguous()}
    places = [f"{n} has strides {t.stride()} from {t.storage_offset()}" for n, t in views.items()]
    return "; ".join(places) or "all tensors are whole"


def check_without_gradients(form: Form, drawn: Drawn, found: dict[str, Tensor]) -> None:
    with torch.no_grad():
        plain = call(form, leaves_of(drawn.tensors), **drawn.options)
    with torch.inference_mode():
        inferred = call(form, drawn.tensors, **drawn.options)
    expected = [found[name] for name in ("output", "sum") if name in found]
    for one, other, y in zip(plain, inferred, expected, strict=True):
        assert not one.requires_grad and other.is_inference()
        assert differing({"no_grad": one, "inference": other}, {"no_grad": y, "inference": y}) == {}


def apart(form: Form, tensors: dict[str, Tensor], dims: int, **options) -> tuple[Tensor, ...]:
    """What comes before the last addition by operations of PyTorch's."""
    rest = {n: t for n, t in tensors.items() if n in FAMILY[form.op].names}
    return call(FAMILY[form.op], rest | {"input": before(form, tensors)}, dims, **options)


def check_addition(form: Form, drawn: Drawn, found: dict[str, Tensor]) -> None:
    """Results have the bits of the operations one after the other. All but the sum on a GPU, and
    the gradients of parameters where the input is masked or scaled, may be added up in another
    order, which tips a rounding.
    """
    tensors, incoming, asked, options = drawn
    x, residual = before(form, tensors), tensors["residual"]
    assert torch.equal(found["sum"], (x + residual).to(residual.dtype))
    if x.dtype != tensors["input"].dtype or not x.numel():
        return
    for name, other in step(form, tensors, incoming, asked, function=apart, **options).items():
        of_branch = form.branch and name in PARAMETERS
        if of_branch or (other.is_cuda and name != "sum"):
            close = {torch.float16: 2e-2, B: 1e-1, F32: 1e-4, F64: 1e-10}
            bound = max(close[other.dtype], close[found["output"].dtype])
            torch.testing.assert_close(found[name], other, rtol=bound, atol=bound)
        else:
            assert torch.equal(found[name], other), name


def check_chain(form: Form, drawn: Drawn, found: dict[str, Tensor]) -> None:
    """The two functions one after the other round where the chain does. In one pass, sums in
    another order move a number by a unit in the last place, or in that of the sum.
    """
    t, how = drawn.tensors, {"eps": 1e-6} | drawn.options
    one, two = form.op.split("_add_")
    names = ({"weight": "weight", "bias": "bias"}, {"weight": "next_weight", "bias": "next_bias"})
    first, second = ({n: t[m] for n, m in pair.items() if m in t} for pair in names)
    (total,) = call(
        FAMILY[f"{one}_add"], {"input": t["input"], "skip": t["residual"]} | first, **how
    )
    (y,) = call(FAMILY[two], {"input": total} | second, **how)
    for name, other in (("output", y), ("sum", total)):
        bound = 0.0 if found[name].dtype == F64 else 4 * torch.finfo(other.dtype).eps
        torch.testing.assert_close(found[name], other, rtol=bound, atol=bound)
