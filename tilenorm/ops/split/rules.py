"""How the ops of rows in pieces run on DTensors.

Per mesh dimension, on the rows of the table in sharding.py, with what has a number a row placed as
x is, and on one more:

    rows                 x, gate, dy,    weight, bias,    part, own,       whole, mean, rstd,
                         y, dx, …        dW, dB           their sums       dots, added up
    cut in a normalised  Shard(d)        Shard(d')        Partial          Replicate
      dimension d

d' is the parameter's dimension that lies on x's dimension d. `own` is what a piece alone knows. It
is Partial by name, and nothing adds it up: row_center reads it where row_sums left it.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from ...table import PIECES, Piece
from ..sharding import Given, Rule, Strategy, described, letters_of, strategies_of
from .library import Call


def piece_rules(x: Any, parameters: list, dims: int) -> Iterator[Rule]:
    """The rows of the table for x and its parameters, of which `shape` is read."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    whole, part = Replicate(), Partial()
    yield Rule(*[whole] * 5)
    rank = len(x.shape)
    of_parameters = max((len(p.shape) for p in parameters if p is not None), default=0)
    for d in range(rank):
        along = d - rank + of_parameters  # the parameters' dimension that lies on x's
        p, derivative = (Shard(along),) * 2 if along >= 0 else (whole, part)
        if d < rank - dims:
            yield Rule(Shard(d), p, derivative, Shard(d), Shard(d))
        else:
            yield Rule(Shard(d), p, derivative, whole, part)


def strategies(piece: Piece, given: Given) -> list[Strategy]:
    """What DTensor may do with a call of an op."""
    call = Call.of(piece, [described(t) for t in given])
    parameters = [t for t, port in zip(given, piece.takes, strict=False) if port.lies == "affine"]
    rules = piece_rules(given[0], parameters, call.given["dims"])
    there = [shape is not None for shape, _ in call.results()]
    return strategies_of(rules, letters_of(piece.takes), given, letters_of(piece.makes), there)


STRATEGIES = {piece.name: partial(strategies, piece) for piece in PIECES}
