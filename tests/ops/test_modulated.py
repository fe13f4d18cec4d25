"""Norms that are scaled and shifted by group, through the public functions and the ops."""

import pytest
import torch

import tilenorm
from tests.support import calls as helpers
from tests.support.calls import Form, compare, random
from tests.support.pretended import by

FORMS = {norm: Form(f"modulated_{norm}_norm") for norm in ("rms", "layer")}


def made(leading, groups, hidden=40):
    """Every tensor, by its name; those by group are chunks of one tensor."""
    chunks = random(*groups, 6 * hidden).chunk(6, -1)
    sizes = {"input": leading, "residual": leading, "weight": (), "bias": ()}
    found = {n: random(*size, hidden, seed=1 + i) for i, (n, size) in enumerate(sizes.items())}
    return found | {"scale": chunks[0], "shift": chunks[1], "gate": chunks[4]}


def call(norm, given, shape=(0,), **options):
    """The results of the public function, always as a tuple."""
    return helpers.call(FORMS[norm], given, len(shape), **options)


def test_a_call_after_one_of_other_groups(norm):
    """What is remembered of a call does not serve one whose tensors fit otherwise, or do not."""
    given, other = made((4, 6), (4, 3)), made((4, 6), (4, 6))
    wrong = {**given, **{n: other[n][:, :4] for n in ("scale", "shift", "gate")}}
    with by("sm_90"), torch.no_grad():
        for case in (given, other, given):
            compare(call(norm, case), call(norm, case, backend="reference"), 1e-5)
        with pytest.raises(RuntimeError, match="'scale' takes leading sizes"):
            call(norm, wrong)


def test_several_normalized_dimensions_and_heads():
    given = made((2, 6), (2,), 12)
    wide = {n: t.unflatten(-1, (3, 4)) for n, t in given.items()}
    with by("sm_90"):
        expected = call("layer", given)
        found = call("layer", wide, (3, 4))
        compare([t.flatten(-2) for t in found], expected, 0.0)
        by_heads = {**given, "weight": random(6, 12), "bias": random(6, 12, seed=1)}
        with pytest.warns(tilenorm.ReferenceWarning, match="a weight by heads"):
            found = call("layer", by_heads)
    compare(found, call("layer", by_heads, backend="reference"), 0.0)
