"""Drawn calls on DTensors: any op, shape, placements, options and gradients asked for."""

import random

import pytest
import torch
from torch.distributed.tensor import Shard

from tests.support.calls import FAMILY
from tilenorm.table import OPS

from .placing import P, R, case
from .world import NAMES, mesh, on_every_rank

N = 32  # whole vectors, as in test_calls
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def drawn(draw: random.Random, mesh_dims: int):
    """A case, the placements of its tensors and of its outputs' gradients, and what is asked for.

    A weight of 16 bits would have gradients that each rank rounds to 16 bits before they are added
    up, which the budget of one process does not allow for.
    """
    form = draw.choice([*FAMILY.values()])
    row = draw.choice([(N,), (2, N // 2), (1, N), (N, 1)])
    leading = [draw.randint(1, 7) for _ in range(draw.randint(1, 3))]
    by_heads = len(row) == 1 and len(leading) > 1 and draw.random() < 0.4
    dtype = draw.choice(DTYPES)
    options = {"offset": draw.choice([0.0, 1.0]), "rounding": draw.choice(["late", "early"])}
    if "out_dtype" in OPS[form.op].options:
        options["out_dtype"] = draw.choice([None, None, torch.float32, torch.bfloat16])
    given = case(
        form,
        *leading,
        *row,
        dims=len(row),
        parameter_shape=(leading[-1], N) if by_heads else row,
        options=options,
        dtype=dtype,
        parameter=torch.float32 if dtype == torch.bfloat16 else dtype,
    )
    drop = draw.choice([(), (), ("bias",), ("weight",), ("weight", "bias")])
    given = given._replace(tensors={n: t for n, t in given.tensors.items() if n not in drop})
    dims = len(leading) + len(row)
    usual = [_placement(draw, len(leading)) for _ in range(mesh_dims)]

    def of_rows() -> list:
        return (
            usual if draw.random() < 0.6 else [_placement(draw, dims, P) for _ in range(mesh_dims)]
        )

    parameters = [R if draw.random() < 0.8 else Shard(0) for _ in range(mesh_dims)]
    placements = {n: parameters if n in ("weight", "bias") else of_rows() for n in given.tensors}
    incoming = [of_rows() for n in ("input", "residual") if n in given.tensors]
    if len(incoming) == 2 and draw.random() < 0.4:
        incoming[draw.randrange(2)] = None
    asked = draw.sample([*given.tensors], draw.randint(1, len(given.tensors)))
    if incoming[0] is None and not {"input", "residual"} & {*asked}:
        asked.append("input")  # the sum has a gradient for no other tensor
    return given, placements, incoming, asked


def _placement(draw: random.Random, dims: int, *others):
    return draw.choice([R, *others, *map(Shard, range(dims))])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "seed, number", [(0, 20), *(pytest.param(s, 60, marks=pytest.mark.slow) for s in (1, 2))]
)
@on_every_rank
def test_drawn_calls(name, seed, number):
    for i in range(number):
        draw = random.Random(f"{name} {seed} {i}")
        given, placements, incoming, asked = what = drawn(draw, mesh(name).ndim)
        try:
            found, _ = given.on(name, placements, incoming, asked=asked)
            there = [dy if p else None for dy, p in zip(given.incoming, incoming, strict=True)]
            expected = given.alone(asked, there)
            leading = given.tensors["input"].dim() - given.dims
            cut = any(p.is_shard() and p.dim >= leading for p in placements["input"])
            there = [None if dy is None else dy.cpu() for dy in there]
            given.compare(found, expected, there, exact=not cut)
            if given.dims == 1 and {*placements["input"]} == {Shard(leading)}:
                assert found["output"].placements == tuple(placements["input"])
        except Exception as error:
            shape = tuple(given.tensors["input"].shape)
            how = (given.form, shape, given.options, *what[1:])
            raise AssertionError(f"draw {i} of seed {seed} on {name}: {how}") from error
