"""How the ops run on DTensors: which shards of their tensors give which shards of their results.

Per mesh dimension, the ops run on any row of this table:

    rows                 x, residual, gate, dy,   weight,     y, sum, dx,         dW, dB
                         dsum, mean, rstd         bias        dresidual, dgate
    replicated           Replicate                Replicate   Replicate           Replicate
    cut in a leading     Shard(d)                 Replicate   Shard(d)            Partial
      dimension d
    cut by heads with    Shard(heads)             Shard(0)    Shard(heads)        Shard(0)
      their own weights

DTensor's search takes the row that costs least, and moves what does not fit it: it gathers a tensor
that is cut in a normalised dimension, which the functions give to other ops (split/rules.py), and
reduces or reduce-scatters one that is Partial.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from ..spec import PLAIN
from .layout import rows_shape
from .schemas import Backward, Forward
from .tensors import merged_needs
from .torch_private import keep_every_argument

# DTensor's description of an argument: a tensor's shape, dtype and placements, or the value itself.
Given = Sequence[Any]
# Placements of the results, and of the arguments: None for one that is no tensor.
Strategy = tuple[list, list]
# The names of ops, each with a function that tells what DTensor may do with a call of the op.
Strategies = tuple[tuple[str, Callable[[Given], list[Strategy]]], ...]


class Rule(NamedTuple):
    """A row of a table, as placements: of what has (r)ows, of (p)arameters and of their
    (d)erivatives; for pieces of rows, also of (n)umbers of whole rows and of (s)ums of a piece.
    """

    r: Any
    p: Any
    d: Any
    n: Any = None
    s: Any = None


def is_distributed(value: object) -> bool:
    """Whether a value is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def register_where_loaded(strategies: Strategies) -> None:
    """Have DTensor, where it is loaded, run ops by their rules."""
    if "torch.distributed.tensor" in sys.modules:
        _register(strategies)


@cache
def _register(strategies: Strategies) -> None:
    from torch.distributed.tensor.experimental import register_sharding

    ops = [getattr(torch.ops.tilenorm, name).default for name, _ in strategies]
    for op, (_, tell) in zip(ops, strategies, strict=True):
        register_sharding(op)(lambda *given, tell=tell: tell(given))
    keep_every_argument(ops)


def rules(x: Any, parameters: Sequence[Any], hidden: int) -> Iterator[Rule]:
    """The rows of the table for an input and its parameters, of which `shape` is read."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    yield Rule(Replicate(), Replicate(), Replicate())
    if not hidden:
        return
    leading = len(rows_shape(x.shape, hidden))
    by_heads = any(p is not None and math.prod(p.shape) != hidden for p in parameters)
    for d in range(leading):
        if by_heads and d == leading - 1:
            yield Rule(Shard(d), Shard(0), Shard(0))
        else:
            yield Rule(Shard(d), Replicate(), Partial())
    # A cut normalised dimension has no row: its sums need an all-reduce (split/norm.py).


def norm_strategies(given: Given) -> list[Strategy]:
    """What DTensor may do with a call of the op norm."""
    call = Forward.of(given)
    x, residual, _, *parameters = call.tensors[:PLAIN]
    vector = call.tensors[-1] if len(call.tensors) > PLAIN else None
    layer = call.options.norm == "layer"
    there = (True, residual is not None, call.save and layer, call.save)
    found = rules(x, parameters, call.options.hidden)
    return strategies_of(found, "rrrpp", given, "rrrr", there, vector)


def backward_strategies(given: Given) -> list[Strategy]:
    """What DTensor may do with a call of the op norm_backward."""
    call: Any = Backward.of(given)  # of descriptions of tensors
    x, _, *parameters = call.saved[:4]
    tensors = (call.dy, x if call.added else None, *call.saved[1:4], None, None, *call.branch)
    dtypes = tuple(t and t.tensor_meta.dtype for t in tensors)
    there = *merged_needs(dtypes, call.dsum is not None, call.mask).gradients, call.output
    found = rules(x, parameters, call.options.hidden)
    return strategies_of(found, "rrrrpprr", given, "rrrddr", there, call.layer_scale)


def strategies_of(
    rules: Iterable[Rule],
    arguments: str,
    given: Given,
    results: str,
    there: Sequence[bool],
    vector: Any = None,
) -> list[Strategy]:
    """What DTensor may do with a call by rules.

    arguments, results: for each of the first arguments, and for each result, the letter of Rule.
    Tensors behind these arguments have rows, except `vector`. there: which results are no empty
    tensors.
    """
    from torch.distributed.tensor import Replicate

    whole, found = Replicate(), []
    last = [t if hasattr(t, "shape") else None for t in given[len(arguments) :]]
    for rule in rules:
        pairs = zip(given, arguments, strict=False)
        placed = [None if t is None else getattr(rule, letter) for t, letter in pairs]
        placed += [None if t is None else whole if t is vector else rule.r for t in last]
        made = zip(there, results, strict=True)
        found.append(([getattr(rule, letter) if t else whole for t, letter in made], placed))
    return found


STRATEGIES = (("norm", norm_strategies), ("norm_backward", backward_strategies))
