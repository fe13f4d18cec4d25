"""A norm, an addition and a norm as one call, which rounds where the two functions do."""

from itertools import product
from random import Random

import pytest
import torch

import tilenorm
from tests import layouts
from tilenorm.launch import kernel
from tilenorm.launch.plan import chain_refused
from tilenorm.launch.target import Target
from tilenorm.ops import cutile
from tilenorm.spec import NormSpec

from .helpers import random
from .pretended import by

B, H, F, D = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = ((B, B), (F, F), (H, H), (B, F), (F, B), (D, D))
SERVED = ("reference", "sm_90", "sm_100")


def chain(norm, rows, shape, parameters, **options):
    function = getattr(tilenorm, f"{norm}_norm_add_{norm}_norm")
    return function(*rows, shape, *parameters, **options)


def apart(norm, rows, shape, parameters, **options):
    end = len(parameters) // 2
    before, after = (getattr(tilenorm, f"{norm}_norm{last}") for last in ("_add", ""))
    total = before(*rows, shape, *parameters[:end], **options)
    return after(total, shape, *parameters[end:], **options), total


def made(norm, *shape, dtypes=(B, B), weights=(B, F)):
    """The tensors that have rows, and the weight, and bias if it has one, of each norm."""
    rows = [random(*shape, dtype=d, seed=i) for i, d in enumerate(dtypes)]
    each = [d for d in weights for _ in range(2 if norm == "layer" else 1)]
    return rows, [random(shape[-1], dtype=d, seed=7 + i) for i, d in enumerate(each)]


def compare(found, expected, equal=True):
    """Sums in another order move a number by a unit in the last place, or in that of the sum."""
    for one, other in zip(found, expected, strict=True):
        bound = 0.0 if equal else 4 * torch.finfo(one.dtype).eps
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)


@pytest.fixture
def passes(monkeypatch):
    """What was launched in one pass."""
    found, bind = [], cutile.bind_forward

    def bound(plan, *arguments):
        run = bind(plan, *arguments)
        return (lambda *a: found.append(a) or run(*a)) if plan.spec.inner else run

    monkeypatch.setattr(cutile, "bind_forward", bound)
    return found


@pytest.mark.parametrize("served", SERVED)
def test_drawn_calls(served, norm, passes):
    """In one pass where the kernels serve, with and without gradients, to the same bits."""
    rng = Random(f"{served} {norm}")
    with by(served):
        for dtypes, save in product(DTYPES, (False, True)):
            hidden = rng.choice((7, 40, 128, 1024, 2304, 5376))
            shape = rng.choice(((1, hidden), (5, hidden), (2, 3, hidden), (0, hidden)))
            weights = rng.choice(dtypes), rng.choice((H, F))
            rows, parameters = made(norm, *shape, dtypes=dtypes, weights=weights)
            if shape[0]:
                rows[0] = layouts.draw(rng, shape, False).filled(rows[0])
            rows[0].requires_grad_(save)
            parameters = [rng.choice((w, w, None)) for w in parameters]
            options = {"offset": rng.choice((0.0, 1.0)), "rounding": rng.choice(("late", "early"))}
            options |= rng.choice(({}, {"eps": 1e-3}))
            arguments = norm, rows, (hidden,), parameters
            passes.clear()
            found, expected = chain(*arguments, **options), apart(*arguments, **options)
            again = chain(*arguments, **options)
            in_one = served != "reference" and dtypes in DTYPES[:3]  # of one dtype, not float64
            assert len(passes) == (2 if in_one else 0)
            assert all(t.dtype == dtypes[1] and t.is_contiguous() for t in found)
            assert all(map(torch.equal, found, again))
            compare(found, expected, equal=served == "reference")


def test_a_kernel_that_does_not_compile(monkeypatch):
    calls = []

    def fail(*arguments):
        calls.append(arguments)
        raise kernel.CompileError("no")

    rows, parameters = made("rms", 3, 40)
    with by("sm_100"):
        expected = apart("rms", rows, (40,), parameters)
        bind = cutile.bind_forward
        monkeypatch.setattr(
            cutile, "bind_forward", lambda plan, run: fail if plan.spec.inner else bind(plan, run)
        )
        for _ in range(2):
            found = chain("rms", rows, (40,), parameters)
            assert all(map(torch.equal, found, expected))
    assert len(calls) == 1


def test_what_one_pass_refuses():
    before, after = (NormSpec("rms", 65536, "bfloat16", skip=s) for s in ("bfloat16", None))
    refused = chain_refused(NormSpec.chained(before, after), Target.of("sm_90"))
    assert "blocks share a row" in refused


def test_explained(capsys):
    rows, weights = made("rms", 3, 40)
    found = tilenorm.explain("rms_norm_add_rms_norm", *rows, (40,), *weights)
    assert (found.before.spec.skip, found.after.spec.weight) == ("bfloat16", "float32")
    assert found.refused in capsys.readouterr().out
