"""How the ops run on DTensors: which shards of their tensors give which shards of their results.

Per mesh dimension, the ops run on any row of this table:

    rows                 x, residual, gate, dy,   weight,     y, sum, dx,         dW, dB
                         dsum, mean, rstd         bias        dresidual, dgate
    replicated           Replicate                Replicate   Replicate           Replicate
    cut in a leading     Shard(d)                 Replicate   Shard(d)            Partial
      dimension d
    cut by heads with    Shard(heads)             Shard(0)    Shard(heads)        Shard(0)
      their own weights

What lies by group is cut in a dimension d that it has as the input has it, and so is its
derivative. Else it is replicated, and its derivative is Partial: a process then holds some rows of
each group. Rows are not cut in a dimension that groups divide.

Where heads are rotated, the rows are heads, or tokens, also those of a key. Tables and positions
are cut in a dimension d that they have as the tokens have it, and else replicated.

A dimension whose size the data alone tell has a row where the input is cut in it already: DTensor
compares the sizes of each row with the number of processes.

DTensor's search takes the row that costs least, and moves what does not fit it: it reduces or
reduce-scatters a tensor that is Partial, and gathers one that is cut in a normalised dimension. The
functions do not call an op with such a tensor: sharded_rows.py computes the norm.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import zip_longest
from operator import eq
from typing import Any

import torch

from ...table import QUANTIZED_NORMS, InternalOp, Op
from ..passes.reading import leading_groups, rows_shape
from ..pytorch.sizes import has_value, known
from ..pytorch.torch_private import keep_every_argument

# Placements of the results, and of the arguments: None for one that is no tensor.
Strategy = tuple[list, list]
# A row of a table: placements of ports by how they lie. A port that lies otherwise is whole on each
# rank.
Rule = dict[str, Any]


def register_where_loaded() -> None:
    """Have DTensor, where it is loaded, run the ops by their rules."""
    if "torch.distributed.tensor" in sys.modules:
        _register()


@cache
def _register() -> None:
    from torch.distributed.tensor.experimental import register_sharding

    from .decompositions import KINDS

    # The scales of a quantised norm lie in no order that a shard's would have.
    kinds = {name: kind for name, kind in KINDS.items() if name not in QUANTIZED_NORMS}
    overloads = [getattr(torch.ops.tilenorm, name).default for name in kinds]
    for overload, kind in zip(overloads, kinds.values(), strict=True):
        register_sharding(overload)(lambda *given, kind=kind: strategies(kind, given))
    keep_every_argument(overloads)


def rules_of(row: Op | InternalOp, given: dict[str, Any]) -> Iterator[Rule]:
    """The rows of the table for a call of an op. given: its arguments by name; of tensors, `shape`
    is read.
    """
    by_role = {port.role: given.get(port.name) for port in row.tensors}
    parameters = [given.get(port.name) for port in row.tensors if port.lies == "affine"]
    x, hidden = by_role["x"], given["hidden"]
    if "mod_scale" in by_role:
        return rules_by_group(x, parameters, by_role["mod_scale"], hidden)
    if "cos" in by_role:
        tables = by_role["cos"], by_role["positions"]
        first = given["output_heads_first"]
        return rules_rotated(x, *tables, by_role["weight"], hidden, first)
    return rules(x, parameters, hidden)


def rules(x: Any, parameters: Sequence[Any], hidden: int) -> Iterator[Rule]:
    """The rows of the table for an input and its parameters, of which `shape` is read."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    yield {}
    if not hidden:
        return
    leading = len(rows_shape(x.shape, hidden))
    firsts = {_heads_of(x, p, hidden, leading) for p in parameters if p is not None}
    before = min({leading, *firsts})
    for d in range(before):
        if has_value(x.shape[d]) or Shard(d) in x.placements:
            yield _cut(Shard(d), Replicate(), Partial())
    # No shard of heads fits both a parameter by heads and one that all heads share.
    if before < leading and len(firsts) == 1 and _ends(x, *parameters):
        yield _cut(Shard(before), Shard(0), Shard(0))
    # A cut normalised dimension has no row: its sums need an all-reduce (sharded_rows.py).


def _heads_of(x: Any, parameter: Any, hidden: int, leading: int) -> int:
    """How many dimensions of the input come before the heads that have rows of a parameter.

    `hidden` does not tell which dimension the heads are: sizes of 1 that belong to a row stand
    behind it. The parameter's shape tells it, because the input's shape ends in that shape. One
    that lies otherwise has an answer of 0, so that no dimension is cut.
    """
    if known(math.prod(parameter.shape) == hidden):  # all heads share it
        return leading
    return len(x.shape) - len(parameter.shape) if _ends(x, parameter) else 0


def _ends(x: Any, *parameters: Any) -> bool:
    """Whether the input's shape ends in the shape of each parameter that there is."""
    shapes = [tuple(p.shape) for p in parameters if p is not None]
    ends = [(x.shape[max(0, len(x.shape) - len(s)) :], s) for s in shapes]
    return all(len(a) == len(b) and all(map(known, map(eq, a, b))) for a, b in ends)


def _cut(rows: Any, affine: Any, derivative: Any) -> Rule:
    placed = dict.fromkeys(("rows", "mask", "number", "key", "heads"), rows)
    return placed | {"affine": affine, "derivative": derivative}


def rules_by_group(x: Any, parameters: Sequence[Any], scale: Any, hidden: int) -> Iterator[Rule]:
    """The rows of the table where a tensor lies by group."""
    from torch.distributed.tensor import Partial, Shard

    dims = len(x.shape) - len(rows_shape(x.shape, hidden)) if hidden else 1  # normalised ones
    groups = leading_groups(scale.shape, dims)
    for rule in rules(x, parameters, hidden):
        d = rule["rows"].dim if rule else -1
        if d >= len(groups):
            yield rule | {"group derivative": Partial()}
        elif d < 0:
            yield rule
        elif known(groups[d] == x.shape[d]):
            yield rule | {"group": Shard(d), "group derivative": Shard(d)}


def rules_rotated(
    x: Any, cos: Any, positions: Any, weight: Any, hidden: int, heads_first: bool
) -> Iterator[Rule]:
    """The rows of the table where heads are rotated."""
    from torch.distributed.tensor import Shard

    tokens = len(x.shape) - 2
    lies, sizes = ("table", cos.shape[:-1]) if positions is None else ("tokens", positions.shape)
    for rule in rules(x, [weight], hidden):
        if rule:
            d = rule["rows"].dim
            own = d - tokens + len(sizes)  # the dimension that lies on the tokens' d
            if d < tokens and own >= 0 and not known(sizes[own] == 1):
                rule |= {lies: Shard(own)}
            if heads_first:
                rule |= {"heads": Shard({1: 2, 2: 1}.get(d, d))}
        yield rule


def strategies(kind: Any, given: Sequence[Any]) -> list[Strategy]:
    """What DTensor may do with a call of an op.

    given: DTensor's description of each argument: a tensor's shape, dtype and placements, or the
    value itself.
    """
    from torch.distributed.tensor import Replicate

    call = kind([getattr(argument, "tensor_meta", argument) for argument in given])
    row, whole, found = call.row, Replicate(), []
    lies = {port.name: port.lies for port in row.tensors}
    made = list(zip(row.makes, call.results(), strict=True))
    for rule in rules_of(row, dict(zip(row.arguments, given, strict=False))):
        placed = [
            rule.get(lies.get(name), whole) if hasattr(t, "shape") else None
            for t, name in zip_longest(given, row.arguments)
        ]
        there = [whole if of.shape is None else rule.get(port.lies, whole) for port, of in made]
        found.append((there, placed))
    return found
