"""How the ops run on DTensors: which shards of their tensors give which shards of their results.

Per mesh dimension, the ops run on any row of this table:

    rows                 x, residual, gate, dy,   weight,     y, sum, dx,         dW, dB
                         dsum, mean, rstd         bias        dresidual, dgate
    replicated           Replicate                Replicate   Replicate           Replicate
    cut in a leading     Shard(d)                 Replicate   Shard(d)            Partial
      dimension d
    cut by heads with    Shard(heads)             Shard(0)    Shard(heads)        Shard(0)
      their own weights

This follows from the dimensions of the ports: a tensor that has dimension d of the input is cut in
it, one that adds up over d is Partial, and the others are whole on each rank. So what has a row for
each group is cut in a dimension that it has as the input has it. Else its derivative is Partial: a
process then holds some rows of each group. Rows are not cut in a dimension that groups divide.

Where heads are rotated, the rows are heads, or tokens, also those of a key. Tables and positions
are cut in a dimension d that they have as the tokens have it, and else replicated.

A dimension whose size the data alone tell has a row where the input is cut in it already: DTensor
compares the sizes of each row with the number of processes.

DTensor's search takes the row that costs least, and moves what does not fit it: it reduces or
reduce-scatters a tensor that is Partial, and gathers one that is cut in a normalised dimension. The
functions do not call an op with such a tensor: sharded_rows.py computes the norm.
"""

import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import zip_longest
from typing import Any

import torch

from ...row import Op, Port
from ...table import BACKWARD, OPS
from ..passes import dims
from ..pytorch.sizes import has_value
from ..pytorch.torch_private import keep_every_argument

# Placements of the results, and of the arguments: None for one that is no tensor.
Strategy = tuple[list, list]
# Of each tensor of a call, which dimension of the input each of its dimensions is, see dims.axes.
Axes = dict[Port, Sequence[int | None]]


def register_where_loaded() -> None:
    """Have DTensor, where it is loaded, run the ops by their rules."""
    if "torch.distributed.tensor" in sys.modules:
        _register()


@cache
def _register() -> None:
    from torch.distributed.tensor.experimental import register_sharding

    from .decompositions import KINDS

    # Rows that lie in another order than the input's, as scales do, have no shards.
    rows = (*OPS.values(), *BACKWARD.values())
    names = [row.name for row in rows if not any("(...)" in port.dims for port in row.makes)]
    overloads = [getattr(torch.ops.tilenorm, name).default for name in names]
    for name, overload in zip(names, overloads, strict=True):
        kind = KINDS[name]
        register_sharding(overload)(lambda *values, kind=kind: strategies(kind, values))
    keep_every_argument(overloads)


def axes_of(row: Op, arguments: dict[str, Any], results: dict[Port, Any]) -> Axes:
    """The axes of each tensor of a call. arguments: by name. Of tensors, `shape` is read."""
    tensors = {port: arguments.get(port.name) for port in row.tensors}
    named = {port.name: tensor for port, tensor in tensors.items()}
    sizes = dims.sizes_by_hidden(named, arguments["hidden"])
    sizes = sizes._replace(swapped=bool(arguments.get("output_heads_first")))
    return {
        port: dims.axes(port, tensor, sizes)
        for port, tensor in (tensors | results).items()
        if getattr(tensor, "shape", None) is not None
    }


def rules(axes: Axes, dimensions: Sequence[int]) -> Iterator[dict[Port, Any]]:
    """Placements of the tensors of a call, whole ones first, and then cut in each of the input's
    `dimensions`: see the table above. There are none where a tensor has a divisor of a dimension.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    yield dict.fromkeys(axes, Replicate())
    for d in dimensions:
        if not any(~d in of_tensor for of_tensor in axes.values()):
            placements: dict[Port, Any] = {}
            for port, of_tensor in axes.items():
                if d in of_tensor:
                    placements[port] = Shard(of_tensor.index(d))
                else:
                    placements[port] = Partial() if port.adds else Replicate()
            yield placements


def cut_dimensions(x: Any, arguments: dict[str, Any]) -> list[int]:
    """The dimensions of the input in which it may be cut. A normalised one is none of them, because
    its sums need an all-reduce (sharded_rows.py).
    """
    from torch.distributed.tensor import Shard

    hidden = arguments["hidden"]
    count = len(dims.rows_shape(x.shape, hidden)) if hidden else 0
    return [d for d in range(count) if has_value(x.shape[d]) or Shard(d) in x.placements]


def strategies(kind: Any, values: Sequence[Any]) -> list[Strategy]:
    """What DTensor may do with a call of an op.

    values: DTensor's description of each argument: a tensor's shape, dtype and placements, or the
    value itself.
    """
    from torch.distributed.tensor import Replicate

    call = kind([getattr(value, "tensor_meta", value) for value in values])
    row, whole = call.row, Replicate()
    arguments = dict(zip(row.arguments, values, strict=False))
    results = dict(zip(row.makes, call.results(), strict=True))
    ports = {port.name: port for port in row.tensors}
    dimensions = cut_dimensions(arguments["input"], arguments)
    offered = []
    for rule in rules(axes_of(row, arguments, results), dimensions):
        placed = [
            rule.get(ports.get(name), whole) if hasattr(value, "shape") else None
            for value, name in zip_longest(values, row.arguments)
        ]
        offered.append(([rule.get(port, whole) for port in row.makes], placed))
    return offered
