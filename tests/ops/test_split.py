"""The ops of rows in pieces, on plain tensors: pieces of a row add up to the norm of the row."""

import math
from dataclasses import replace
from itertools import product
from random import Random
from unittest.mock import patch

import pytest
import torch
from torch.library import opcheck

import tilenorm
from tests.support import cases, drawing
from tests.support.calls import NEEDS_GPU, random, slow
from tests.support.executors import Inputs
from tests.support.guarded import guarded
from tests.support.oracle import Truth
from tests.support.passes import Seen, check_decomposition
from tests.support.pieces import OPS, in_pieces
from tests.support.pretended import by, pretended_gpu
from tests.support.results import check
from tests.support.tolerance import assert_close
from tilenorm.launch.toolchain import CompileError
from tilenorm.ops.passes import cutile, registry
from tilenorm.spec import NormSpec, Options
from tilenorm.table import NORMS as NAMES

SERVED = ("reference", *cases.INTERPRETED)
EACH = pytest.mark.parametrize("served", SERVED)
LAYER = NormSpec("layer", 96, "bfloat16", "bfloat16", "float32", residual="float32")
GATED = NormSpec("rms", 96, "float32", "float32", gate="bfloat16", gate_first=True)


def widths_of(rng: Random, hidden: int) -> tuple[int, ...]:
    """One to four pieces of any width. A process may hold nothing of a row."""
    cuts = sorted(rng.choice((0, rng.randint(0, hidden))) for _ in range(rng.randint(0, 3)))
    return tuple(b - a for a, b in zip((0, *cuts), (*cuts, hidden), strict=True))


@pytest.mark.any_torch
@pytest.mark.parametrize("served", [*SERVED, pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize("op", [op for op in NAMES if not op.endswith("_add")])
def test_drawn_pieces(served, op):
    rng, device = Random(f"{served} {op}"), "cuda" if served == "cuda" else "cpu"
    widest, rows = (9000, 129) if device == "cuda" else (1500, 9)
    for seed, dtype in product(range(4), cases.DTYPES):
        # Operations of their own do what only whole rows have.
        spec = drawing.spec(rng, op, dtype, drawing.hidden(rng, widest)).without_joins
        inputs = Inputs.random(spec, rng.randint(0, rows), device, seed)
        widths, needs = widths_of(rng, spec.hidden), rng.choice(cases.some_needs(spec))
        if not needs.dsum:
            inputs = replace(inputs, dsum=None)
        with by(served, device), guarded():
            found = in_pieces(spec, inputs, widths, needs, copied=rng.choice((False, True)))
        check(spec, inputs, found)
        sums = {name for name in ("dx", "dresidual", "dgate", "dw", "db") if getattr(needs, name)}
        assert sums <= found.keys(), (spec, widths)


WIDE = [(LAYER, (33001, 17)), (GATED, (20000, 40000))]
WIDE += slow((GATED, (33001, 17)), (LAYER, (20000, 40000)))


@pytest.mark.any_torch
@pytest.mark.parametrize("spec, widths", WIDE, ids=cases.label)
def test_pieces_wider_than_a_block(spec, widths):
    """By vectors and by elements. A block takes the chunks of a row one after the other."""
    spec = replace(spec, hidden=sum(widths))
    inputs = Inputs.random(spec, 1, "cpu")
    with pretended_gpu("sm_80"), guarded():
        found = in_pieces(spec, inputs, widths)
    check(spec, inputs, found)


@EACH
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_means_that_are_far_apart(served, dtype):
    """A mean a thousand times the standard deviation, and one piece's far from the others'."""
    spec = NormSpec("layer", 60, dtype, dtype)
    for apart in ((1000, 1000, 1000), (0, 100, -1000), (1e6, -1e6, 0)):
        inputs = Inputs.random(spec, 7, "cpu")
        x = inputs.x.float()
        for column, shift in zip((0, 10, 30), apart, strict=True):
            x[:, column:] += shift
        inputs = replace(inputs, x=x.to(inputs.x.dtype))
        with by(served):
            found = in_pieces(spec, inputs, (10, 20, 30))
        check(spec, inputs, found)


@EACH
@pytest.mark.parametrize("spec", [LAYER, GATED], ids=cases.label)
def test_a_row_has_the_same_bits_anywhere(served, spec):
    """In another place, among other rows, of contiguous pieces and of strided ones."""
    # Whole vectors: the CPU computes the silu of what fills none by other code, to other bits.
    inputs, order = Inputs.random(spec, 64, "cpu"), torch.arange(64).flip(0)[3:35]
    rows = ("x", "residual", "gate", "dy", "dsum")
    moved = {n: getattr(inputs, n)[order] for n in rows if getattr(inputs, n) is not None}
    with by(served):
        whole = in_pieces(spec, inputs, (24, 72))
        some = in_pieces(spec, replace(inputs, **moved), (24, 72), copied=True)
    for name in whole.keys() - {"dw", "db"}:
        assert torch.equal(whole[name][order], some[name]), name


@EACH
def test_two_normalized_dimensions_cut_in_the_last(served, norm):
    x, w = random(3, 5, 4, 6), random(4, 6, seed=1)
    last, cuts = (*Options(24, norm), 2), (slice(0, 2), slice(2, 6))
    with by(served):
        pieces = [x[..., cut] for cut in cuts]
        sums = [OPS.row_sums(piece, None, None, *last) for piece in pieces]
        whole, centered = sum(part for part, *_ in sums), None
        assert whole.shape == (3, 5)
        if norm == "layer":
            own = zip(pieces, (numbers for _, numbers, _ in sums), strict=True)
            centered = sum(OPS.row_center(piece, whole, numbers, *last) for piece, numbers in own)
        more = whole, centered, *last, 1e-6, x.dtype, False
        ys = [OPS.row_apply(x[..., cut], None, w[:, cut], None, *more)[0] for cut in cuts]
    function = tilenorm.layer_norm if norm == "layer" else tilenorm.rms_norm
    expected = function(x.double(), (4, 6), w.double(), eps=1e-6)
    own = function(x, (4, 6), w, eps=1e-6)
    assert_close("y", torch.cat(ys, -1), Truth(expected, expected.abs() + 1), own)


@pytest.mark.parametrize("spec", [LAYER, GATED], ids=cases.label)
def test_contracts_of_the_ops(spec):
    """Schema, fake, aliasing and tracing, with real and with symbolic shapes; decompositions."""
    with Seen() as seen:
        in_pieces(spec, Inputs.random(spec, 3, "cpu"), (40, 56))
    calls = dict(seen.calls)  # one piece is enough
    for op, arguments in calls.items():
        saves = {OPS.row_apply.default: (True, False)}.get(op, arguments[-1:])
        for last in saves:
            opcheck(op, (*arguments[:-1], last))
            check_decomposition(op, (*arguments[:-1], last))


def test_wrong_arguments():
    x, w = random(3, 8), random(9)
    options = (*Options(16, "rms"),)
    with pytest.raises(RuntimeError, match="argument 'weight' takes a shape that ends in"):
        OPS.row_apply(x, None, w, None, x[:, 0], None, *options, 1, 1e-6, x.dtype, True)
    with pytest.raises(RuntimeError, match="argument 'dims' takes 1 to 2, got 3"):
        OPS.row_sums(x, None, None, *options, 3)
    with pytest.raises(ValueError, match="backend"):
        OPS.row_sums(x, None, None, *options, 1, "unknown")
    with pytest.raises(RuntimeError, match="backend 'cutile' was asked for"):
        OPS.row_sums(x, None, None, *options, 1, "cutile")


def test_a_kernel_that_does_not_compile_is_replaced(no_memory):
    """The reference serves the op, and a warning names the kernel once."""
    inputs = Inputs.random(LAYER, 3, "cpu")

    def fails(stream, launches, arrays):
        raise CompileError("its kernel row_sums does not compile")

    with pretended_gpu(), patch.object(cutile, "launch", fails):
        with pytest.warns(tilenorm.ReferenceWarning, match="row_sums does not compile"):
            found = in_pieces(LAYER, inputs, (40, 56))
        assert {name for name, *_ in registry.failures()} == {"cutile"}
    expected = in_pieces(LAYER, inputs, (40, 56))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert math.isfinite(found["y"].sum())
