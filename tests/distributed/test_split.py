"""Norms of DTensors whose rows are cut: all-reduces of a few bytes a row, and no gather."""

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import tilenorm

from ..ops.helpers import (
    ADD,
    EACH_FORM,
    FAMILY,
    GATED,
    LAYER,
    RMS,
    call,
    incoming_of,
    random,
)
from .placing import (
    P,
    R,
    Shard,
    alike,
    case,
    compare_second_derivatives,
    counted,
    device,
    mesh,
    placed,
)
from .world import NAMES, slow_but_first

EACH_MESH = pytest.mark.parametrize("name", slow_but_first(reversed(NAMES)))
ONE = NAMES[0]
# Of three dimensions the last is a row.
CUTS = {
    1: [([Shard(2)], [Shard(0)])],
    2: [
        ([Shard(0), Shard(2)], [R, Shard(0)]),
        ([Shard(2), Shard(1)], [Shard(0), R]),
        ([Shard(2), R], [Shard(0), R]),
        ([Shard(2), Shard(2)], [Shard(0), Shard(0)]),
    ],
}


class Sizes(TorchDispatchMode):
    """The name of each collective, and how many bytes a rank puts into it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        name = function.__name__.split(".")[0]
        if function.namespace == "_c10d_functional" and name[0] != "_" and "wait" not in name:
            self.seen.append((name, arguments[0].numel() * arguments[0].itemsize))
        return function(*arguments, **(named or {}))


def reductions(form, rows) -> tuple[int, int]:
    """How many all-reduces a norm takes forward and backward, where these placements cut rows."""
    cuts = sum(p == Shard(2) for p in rows)
    return cuts * (2 if "layer" in form.op else 1), cuts


def cut_rows(name, form, hidden):
    given = case(form, 4, 3, hidden)
    expected = given.alone()
    outputs = 2 if form.other == "residual" else 1
    for rows, parameters in CUTS[mesh(name).ndim]:
        there = mesh(name).size() > 1
        placements = alike(given, rows, parameters)
        found, collectives = given.on(name, placements, [rows] * outputs)
        forward, backward = reductions(form, rows)
        assert collectives == ({"all_reduce": forward + backward} if there else {})
        given.compare(found, expected, exact=False)
        for n, result in found.items():
            parameter = n in ("weight", "bias")
            wanted = [
                p if p == Shard(0) else R if q == R else P
                for p, q in zip(parameters, rows, strict=True)
            ]
            assert result.placements == tuple(wanted if parameter else rows), n
        with torch.no_grad():
            tensors = {n: placed(t, name, placements[n]) for n, t in given.tensors.items()}
            _, collectives = counted(call, form, tensors)
            assert collectives == ({"all_reduce": forward} if there else {})


@EACH_MESH
@EACH_FORM
@pytest.mark.parametrize("hidden", [32, 29])
def test_cut_rows(world, name, form, hidden):
    """One all-reduce each way for RMSNorm, two and one for LayerNorm, for each mesh dimension that
    cuts rows. Of 29 columns the ranks have different numbers.
    """
    world.run(cut_rows, name, form, hidden)


def bytes_a_row(form):
    given = case(form, 4, 3, 29, dtype=torch.bfloat16)
    rows = [Shard(2)]
    tensors = {
        n: placed(t, ONE, alike(given, rows, [Shard(0)])[n]) for n, t in given.tensors.items()
    }
    leaves = {n: t.requires_grad_() for n, t in tensors.items()}
    with Sizes() as forward:
        outputs = call(form, leaves)
    dys = [placed(dy, ONE, rows) for dy in incoming_of(given.tensors)]
    with Sizes() as backward:
        torch.autograd.backward(outputs, dys)
    if mesh(ONE).size() > 1:
        layer = "layer" in form.op
        wanted = [("all_reduce", 4 * 12), ("all_reduce", 8 * 12)][: 1 + layer]
        assert forward.seen == wanted, forward.seen
        assert backward.seen == [("all_reduce", (8 if layer else 4) * 12)], backward.seen


@pytest.mark.parametrize("form", [RMS, LAYER, ADD, GATED], ids=lambda form: form.op)
def test_bytes_of_the_all_reduces(world, form):
    world.run(bytes_a_row, form)


def pieces_without_columns():
    for hidden in (5, 3):
        given = case(LAYER, 4, 3, hidden)
        found, _ = given.on(NAMES[-2], alike(given, [Shard(2)], [Shard(0)]), [[Shard(2)]])
        given.compare(found, given.alone(), exact=False)


@pytest.mark.skipif("4" not in NAMES, reason="needs four ranks in one dimension")
def test_a_rank_without_columns(world):
    """Five columns are 2, 2, 1 and 0. DTensor cuts three among four ranks not at all."""
    world.run(pieces_without_columns)


def elsewhere(name, form):
    given = case(form, 4, 3, 32)
    expected, dims = given.alone(), mesh(name).ndim
    rows = [Shard(2)] * dims
    names = [n for n in given.tensors if n not in ("input", "weight", "bias")]
    for other in (R, Shard(0), Shard(1), P):
        placements = alike(given, rows) | {n: [other] * dims for n in names}
        outputs = 2 if form.other == "residual" else 1
        found, _ = given.on(name, placements, [[other] * dims] * outputs)
        given.compare(found, expected, exact=False)
        assert found["output"].placements == found["input"].placements == tuple(rows)
        assert found["weight"].placements == (R,) * dims


@EACH_MESH
@pytest.mark.parametrize("form", [LAYER, ADD, GATED], ids=lambda form: form.op)
def test_tensors_and_gradients_that_are_placed_otherwise(world, name, form):
    """Weights may be replicated: they are cut for nothing, and their gradients are gathered."""
    world.run(elsewhere, name, form)


def partly_asked(form):
    given = case(form, 4, 3, 32)
    placements, rows = alike(given, [Shard(2)], [Shard(0)]), [Shard(2)]
    outputs = 2 if form.other == "residual" else 1
    for asked in ([n] for n in given.tensors):
        found, collectives = given.on(ONE, placements, [rows] * outputs, asked=asked)
        given.compare(found, given.alone(asked), exact=False)
        gate_alone = asked == ["gate"] and form.options.get("norm_before_gate", True)
        through = asked[0] not in ("weight", "bias") and not gate_alone
        wanted = reductions(form, rows)[0] + through
        assert collectives == ({"all_reduce": wanted} if mesh(ONE).size() > 1 else {}), asked
    if "residual" in given.tensors:  # the sum alone has a gradient
        found, _ = given.on(ONE, placements, [None, rows], asked=["input", "residual"])
        dy = [None, incoming_of(given.tensors)[1]]
        assert torch.equal(found["input"].full_tensor(), given.alone(None, dy)["input"])


@pytest.mark.parametrize(
    "form",
    [RMS, FAMILY["add_layer_norm"], GATED, FAMILY["gated_layer_norm, gate first"]],
    ids=lambda form: f"{form.op} {form.options}",
)
def test_only_what_is_asked_for(world, form):
    """The gradient of a weight, or of a gate after the norm, needs no sum over a row."""
    world.run(partly_asked, form)


def heads_and_dims():
    by_heads = case(LAYER, 2, 3, 4, 16, parameter_shape=(4, 16))
    both = [([Shard(3)], [Shard(1)]), ([Shard(2)], [Shard(0)])]
    for rows, parameters in both:
        found, collectives = by_heads.on(ONE, alike(by_heads, rows, parameters), [rows])
        by_heads.compare(found, by_heads.alone(), exact=False)
        cut = rows == [Shard(3)] and mesh(ONE).size() > 1
        assert collectives == ({"all_reduce": 3} if cut else {})
    two = case(GATED, 2, 3, 6, 8, dims=2)
    for d in (2, 3):
        rows, parameters = [Shard(d)], [Shard(d - 2)]
        found, collectives = two.on(ONE, alike(two, rows, parameters), [rows])
        two.compare(found, two.alone(), exact=False)
        assert collectives == ({"all_reduce": 2} if mesh(ONE).size() > 1 else {})


def test_weights_by_head_and_two_normalized_dimensions(world):
    world.run(heads_and_dims)


def second_derivatives(name, form):
    given = case(form, 4, 3, 32, dtype=torch.float64)

    cuts = CUTS[mesh(name).ndim]
    compare_second_derivatives(given, name, [alike(given, *cut) for cut in cuts])


@pytest.mark.parametrize("name", slow_but_first(NAMES))
@pytest.mark.parametrize("form", [LAYER, ADD, GATED], ids=lambda form: form.op)
def test_second_derivatives(world, name, form):
    world.run(second_derivatives, name, form)


def same_everywhere(form):
    given = case(form, 4, 3, 32)
    placements, expected = alike(given, [Shard(2)], [Shard(0)]), None
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context():
            tensors = {n: placed(t, ONE, placements[n]) for n, t in given.tensors.items()}
            outputs = [y.detach().full_tensor() for y in call(form, tensors)]
            expected = expected or outputs
            assert all(map(torch.equal, outputs, expected))
    leaves = {n: t.clone().requires_grad_() for n, t in tensors.items()}
    outputs = [y.detach().full_tensor() for y in call(form, leaves)]
    assert all(map(torch.equal, outputs, expected))


@pytest.mark.parametrize("form", [RMS, LAYER, ADD], ids=lambda form: form.op)
def test_the_same_bits_with_and_without_gradients(world, form):
    world.run(same_everywhere, form)


def refused():
    x, w = placed(random(4, 32, device=device()), ONE, [Shard(1)]), random(32, device=device())
    with pytest.raises(RuntimeError, match="rms_norm: argument 'weight' takes a DTensor"):
        tilenorm.rms_norm(x, (32,), w)
    with pytest.raises(RuntimeError, match="add_rms_norm: argument 'residual' takes a DTensor"):
        tilenorm.add_rms_norm(x, random(4, 32, device=device()), (32,))


def test_plain_tensors_beside_a_cut_one(world):
    world.run(refused)
