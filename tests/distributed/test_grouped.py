"""Modulated norms and rotated heads of DTensors: cut by tokens, and by groups or heads or not."""

from itertools import product

import pytest
import torch
from torch.distributed.tensor import Shard

from tests.support.calls import call, compare, random
from tests.support.drawn import heads_of

from ..ops import test_modulated as modulated
from ..ops import test_rope as rotated
from .placing import R, counted, placed
from .world import NAMES, mesh, on_every_rank, slow_but_first

BY_GROUP = ("scale", "shift", "gate")
BATCH, TOKENS, HEADS = 0, 1, 2
LEAVES = rotated.LEAVES
REFUSED = pytest.raises(NotImplementedError, match="'input' takes no DTensor that is cut")


def step(function, given, leaves, dys):
    """The results, and the gradient of each of the leaves, in one list."""
    given = {n: t.detach() for n, t in given.items()}
    asked = [given[n].requires_grad_() for n in leaves]
    results = function(given)
    return [*results, *torch.autograd.grad(results, asked, dys)]


def check(name, function, given, at, leaves, dys, rows) -> dict:
    """Results on a mesh are those of one process. Returns the collectives that they took.

    at: the placements of each tensor. rows: those of the gradients of the results.
    """
    expected = step(function, given, leaves, dys)
    on_mesh = {n: placed(t, name, at[n]) for n, t in given.items()}
    incoming = [placed(t, name, rows) for t in dys]
    found, collectives = counted(step, function, on_mesh, leaves, incoming)
    compare([t.full_tensor().cpu() for t in found], expected, 1e-5)
    return collectives


@pytest.mark.parametrize("groups", [(), (5,), (5, 1), (5, 3), (5, 6)], ids=str)
@on_every_rank
def test_modulated_rows(groups):
    """No collective where the groups are cut as the rows are, or where each rank has rows of every
    group. Where tokens are cut that groups divide, DTensor gathers the rows.
    """
    given, name = modulated.made((5, 6), groups, 16), NAMES[-1]
    dys = [random(5, 6, 16, seed=30 + i) for i in range(2)]
    for rows in product((R, Shard(0), Shard(1)), repeat=mesh(name).ndim):
        cut = [p.dim if p.is_shard() else None for p in rows]
        along = [d is not None and d < len(groups) and groups[d] == (5, 6)[d] for d in cut]
        at = dict.fromkeys(("input", "residual"), rows)
        at |= {n: [p if c else R for p, c in zip(rows, along, strict=True)] for n in BY_GROUP}
        at |= {n: [R] * len(rows) for n in ("weight", "bias")}
        found = check(name, lambda t: modulated.call("layer", t), given, at, [*given], dys, rows)
        if 1 not in cut or groups != (5, 3):
            assert not found, (rows, found)


def rotated_tensors(with_positions: bool) -> dict:
    """Queries and keys, and tables for every sequence, or positions that all sequences share."""
    given = heads_of((4, 6), (4, 4), 16, 16)
    given |= {name: given[name].contiguous() for name in LEAVES[:2]}
    if with_positions:
        return given | {"positions": torch.arange(6).flip(0)}
    return given | {name: random(4, 6, 16, seed=20 + i) for i, name in enumerate(("cos", "sin"))}


@pytest.mark.parametrize("with_positions", slow_but_first([False, True]))
@on_every_rank
def test_rotated_heads(with_positions):
    """No collective, whatever is cut; the outputs have heads before tokens."""
    given, name = rotated_tensors(with_positions), NAMES[-1]
    dys = [random(4, 4, 6, 16, seed=30 + i) for i in range(2)]
    for dims in product((None, BATCH, TOKENS, HEADS), repeat=mesh(name).ndim):
        if len(set(dims)) < len(dims) and dims != (None,) * len(dims):
            continue

        def cut(which: dict, dims=dims):
            return [Shard(which[d]) if d in which else R for d in dims]

        at = dict.fromkeys(LEAVES[:2], cut({d: d for d in (BATCH, TOKENS, HEADS)}))
        along = {} if with_positions else {BATCH: 0, TOKENS: 1}
        at |= dict.fromkeys(("cos", "sin"), cut(along))
        at |= dict.fromkeys(LEAVES[2:], cut({})) | {"positions": cut({TOKENS: 0})}
        rows = cut({BATCH: 0, TOKENS: 2, HEADS: 1})
        found = check(name, heads_first, given, at, LEAVES, dys, rows)
        assert not found, (dims, found)


def heads_first(given):
    return call(rotated.ROPE, given, output_heads_first=True)


def of_whole_tokens(given):
    return call(rotated.ROPE, given, normalized_shape=(4, 16))


@on_every_rank
def test_rotated_heads_of_whole_tokens():
    """Tokens are cut without a collective; heads that are normalised together are refused."""
    given, name = rotated_tensors(False), NAMES[0]
    given |= {n: random(4, 16, seed=i) for i, n in enumerate(LEAVES[2:])}
    dys = [random(4, 6, 4, 16, seed=30 + i) for i in range(2)]
    rows, cut, whole = ([p] * mesh(name).ndim for p in (Shard(TOKENS), Shard(HEADS), R))
    at = dict.fromkeys(given, whole) | dict.fromkeys(LEAVES[:2], rows)
    assert not check(name, of_whole_tokens, given, at, LEAVES, dys, rows)
    at |= dict.fromkeys(LEAVES[:2], cut)
    with REFUSED:
        of_whole_tokens({n: placed(t, name, at[n]) for n, t in given.items()})
