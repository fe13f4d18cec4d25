"""Rotated heads of DTensors: cut by tokens, or by heads where each has a norm of its own."""

from itertools import product

import pytest
import torch
from torch.distributed.tensor import Shard

from ..ops.helpers import random
from ..ops.test_rope import LEAVES, call, compare, made
from .placing import R, counted, placed
from .world import EACH_MESH, NAMES, mesh, on_every_rank, slow_but_first

BATCH, TOKENS, HEADS = 0, 1, 2


def step(given, dys, **options):
    """The results, and the gradients, in one list."""
    given = {n: t.detach() for n, t in given.items()}
    leaves = [given[n].requires_grad_() for n in LEAVES if n in given]
    results = call(given, **options)
    return [*results, *torch.autograd.grad(results, leaves, dys)]


def drawn(with_positions: bool) -> dict:
    """Queries and keys, and tables for every sequence, or positions that all sequences share."""
    given = made((4, 6), (4, 4), 16, 16)
    given |= {name: given[name].contiguous() for name in LEAVES[:2]}
    if with_positions:
        return given | {"positions": torch.arange(6).flip(0)}
    return given | {name: random(4, 6, 16, seed=20 + i) for i, name in enumerate(("cos", "sin"))}


@EACH_MESH
@pytest.mark.parametrize("with_positions", slow_but_first([False, True]))
@on_every_rank
def test_tokens_and_heads(name, with_positions):
    """No collective, whatever is cut; the outputs have heads before tokens."""
    given, options = drawn(with_positions), {"output_heads_first": True}
    dys = [random(4, 4, 6, 16, seed=30 + i) for i in range(2)]
    expected = step(given, dys, **options)
    for dims in product((None, BATCH, TOKENS, HEADS), repeat=mesh(name).ndim):
        if len(set(dims)) < len(dims) and dims != (None,) * len(dims):
            continue

        def cut(which: dict, dims=dims):
            return [Shard(which[d]) if d in which else R for d in dims]

        at = dict.fromkeys(LEAVES[:2], cut({d: d for d in (BATCH, TOKENS, HEADS)}))
        along = {} if with_positions else {BATCH: 0, TOKENS: 1}
        at |= dict.fromkeys(("cos", "sin"), cut(along))
        at |= dict.fromkeys(LEAVES[2:], cut({})) | {"positions": cut({TOKENS: 0})}
        found, collectives = counted(
            step,
            {n: placed(t, name, at[n]) for n, t in given.items()},
            [placed(t, name, cut({BATCH: 0, TOKENS: 2, HEADS: 1})) for t in dys],
            **options,
        )
        assert not collectives, (dims, collectives)
        compare([t.full_tensor().cpu() for t in found], expected, 1e-5)


@on_every_rank
def test_heads_of_whole_tokens():
    """Tokens are cut without a collective; heads that are normalised together are refused."""
    given, name = drawn(False), NAMES[0]
    given |= {n: random(4, 16, seed=i) for i, n in enumerate(LEAVES[2:])}
    dys = [random(4, 6, 4, 16, seed=30 + i) for i in range(2)]
    options = {"normalized_shape": (4, 16)}
    expected = step(given, dys, **options)
    for d in (TOKENS, HEADS):
        rows, whole = [Shard(d)] * mesh(name).ndim, [R] * mesh(name).ndim
        at = dict.fromkeys(given, whole) | dict.fromkeys(LEAVES[:2], rows)
        on_mesh = {n: placed(t, name, at[n]) for n, t in given.items()}
        if d == HEADS:
            with pytest.raises(NotImplementedError, match="'input' takes no DTensor that is cut"):
                call(on_mesh, **options)
            continue
        found = step(on_mesh, [placed(t, name, rows) for t in dys], **options)
        compare([t.full_tensor().cpu() for t in found], expected, 1e-5)
