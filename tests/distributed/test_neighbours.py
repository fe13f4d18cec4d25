"""DTensors in calls of norms with what surrounds them in few models."""

import pytest
import torch

from ..ops.helpers import EACH_JOINED, JOINED, call
from ..ops.test_branch import KINDS, made
from ..ops.test_branch import call as call_of_branch
from .placing import (
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

N = 32
EACH_MESH = pytest.mark.parametrize("name", slow_but_first(reversed(NAMES)))
ONE = NAMES[0]


def rows_alike(name, form):
    given = case(form, 5, 6, N)
    expected = given.alone()
    dims = mesh(name).ndim
    for cut in (R, Shard(0), Shard(1)):
        rows = [cut] * dims
        found, collectives = given.on(name, alike(given, rows), [rows] * given.outputs)
        assert not collectives
        given.compare(found, expected)


@EACH_MESH
@EACH_JOINED
def test_rows_alike(world, name, form):
    """Rows cut in a leading dimension: no collective, the same bits."""
    world.run(rows_alike, name, form)


def cut_rows(form, hidden):
    given = case(form, 4, 3, hidden)
    rows = [Shard(2)]
    found, collectives = given.on(ONE, alike(given, rows, [Shard(0)]), [rows] * given.outputs)
    each = 2 if "layer" in form.op else 1
    assert collectives == ({"all_reduce": each + 1} if mesh(ONE).size() > 1 else {})
    given.compare(found, given.alone(), exact=False)


@EACH_JOINED
@pytest.mark.parametrize("hidden", slow_but_first([29, 32]))
def test_cut_rows(world, form, hidden):
    """Operations of their own do what the ops of pieces of rows do not."""
    world.run(cut_rows, form, hidden)


def wider_addend():
    form = JOINED["add_rms_norm, two residuals"]
    given = case(form, 4, 3, N, dtype=torch.bfloat16, other=torch.float32)
    tensors = {
        n: placed(t, ONE, [Shard(2 if t.dim() > 1 else 0)]) for n, t in given.tensors.items()
    }
    with pytest.raises(RuntimeError, match=r"'residual\[0\]' takes the input's dtype .* are cut"):
        call(form, tensors)
    mixed = tensors | {"addend": given.tensors["addend"]}
    with pytest.raises(RuntimeError, match=r"'residual\[0\]' takes a DTensor"):
        call(form, mixed)


def test_what_is_refused_where_rows_are_cut(world):
    world.run(wider_addend)


def second_derivatives(form):
    given = case(form, 4, 6, N, dtype=torch.float64)
    cuts = [alike(given, [cut]) for cut in (R, Shard(0))]
    compare_second_derivatives(given, ONE, [*cuts, alike(given, [Shard(2)], [Shard(0)])])


@EACH_JOINED
def test_second_derivatives(world, form):
    world.run(second_derivatives, form)


def without_gradients(form):
    given, rows = case(form, 4, 6, N), [Shard(1)]
    expected = call(form, given.tensors)
    with torch.no_grad():
        tensors = {n: placed(t, ONE, alike(given, rows)[n]) for n, t in given.tensors.items()}
        found, collectives = counted(call, form, tensors)
    assert not collectives
    for result, other in zip(found, expected, strict=True):
        assert result.placements == tuple(rows) and torch.equal(result.full_tensor(), other)


@EACH_JOINED
def test_without_gradients(world, form):
    world.run(without_gradients, form)


def masked_and_scaled(op, cut, vector):
    tensors = made(KINDS["both"], 4, 6, N, device=device())
    at = {n: [vector if t.dim() == 1 else cut] for n, t in tensors.items()}
    results = []
    for given in (tensors, {n: placed(t, ONE, at[n]) for n, t in tensors.items()}):
        leaves = {n: t.detach().requires_grad_(n != "dropout_mask") for n, t in given.items()}
        y, total = call_of_branch(op, leaves)
        asked = [t for t in leaves.values() if t.requires_grad]
        grads = torch.autograd.grad((y * y).sum() + (total * total).sum(), asked)
        results.append((y, total, *grads))
    for whole, distributed in zip(*results, strict=True):
        torch.testing.assert_close(distributed.full_tensor(), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cut, vector", [(Shard(0), R), (Shard(2), Shard(0)), (R, R)], ids=str)
@pytest.mark.parametrize("op", ["add_rms_norm", "add_layer_norm"])
def test_a_mask_and_a_layer_scale(world, op, cut, vector):
    world.run(masked_and_scaled, op, cut, vector)
