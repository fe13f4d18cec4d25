"""Modulated norms of DTensors: rows are cut in a leading dimension, and groups with them or not."""

from itertools import product

import pytest
import torch
from torch.distributed.tensor import Shard

import tilenorm

from ..ops.helpers import random
from ..ops.test_modulated import call, compare, made
from .placing import R, counted, placed
from .world import EACH_MESH, NAMES, mesh, on_every_rank

BY_GROUP = ("scale", "shift", "gate")


def step(given, dys):
    """The results, and the gradient of each tensor, in one list."""
    leaves = {n: t.detach().requires_grad_() for n, t in given.items()}
    results = call("layer", leaves)
    return [*results, *torch.autograd.grad(results, list(leaves.values()), dys)]


@EACH_MESH
@pytest.mark.parametrize("groups", [(), (5,), (5, 1), (5, 3), (5, 6)], ids=str)
@on_every_rank
def test_rows_alike(name, groups):
    """No collective where the groups are cut as the rows are, or where each rank has rows of every
    group. Where tokens are cut that groups divide, DTensor gathers the rows.
    """
    given = made((5, 6), groups, 16)
    dys = [random(5, 6, 16, seed=30 + i) for i in range(2)]
    expected = step(given, dys)
    for rows in product((R, Shard(0), Shard(1)), repeat=mesh(name).ndim):
        cut = [p.dim if p.is_shard() else None for p in rows]
        along = [d is not None and d < len(groups) and groups[d] == (5, 6)[d] for d in cut]
        at = dict.fromkeys(("input", "residual"), rows)
        at |= {n: [p if c else R for p, c in zip(rows, along, strict=True)] for n in BY_GROUP}
        at |= {n: [R] * len(rows) for n in ("weight", "bias")}
        found, collectives = counted(
            step,
            {n: placed(t, name, at[n]) for n, t in given.items()},
            [placed(t, name, rows) for t in dys],
        )
        if 1 not in cut or groups != (5, 3):
            assert not collectives, (rows, collectives)
        compare([t.full_tensor().cpu() for t in found], expected, 1e-5)


@on_every_rank
def test_cut_rows_are_refused():
    given = made((5, 6), (5,), 16)
    name = NAMES[0]
    at = dict.fromkeys(given, [R] * mesh(name).ndim)
    at["input"] = [Shard(2)] * mesh(name).ndim
    with pytest.raises(NotImplementedError, match="'input' takes no DTensor that is cut"):
        tilenorm.modulated_rms_norm(
            placed(given["input"], name, at["input"]),
            (16,),
            placed(given["scale"], name, at["scale"]),
        )
