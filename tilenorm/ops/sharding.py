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
from collections.abc import Callable, Iterator, Sequence
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
Rules = tuple[tuple[str, Callable[[Given], list[Strategy]]], ...]


class Rule(NamedTuple):
    """A row of the table: the placements of what has rows, of parameters and of their gradients."""

    rows: Any
    parameters: Any
    sums: Any


def is_distributed(value: object) -> bool:
    """Whether a value is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def register_where_loaded(rules: Rules) -> None:
    """Have DTensor, where it is loaded, run ops by their rules."""
    if "torch.distributed.tensor" in sys.modules:
        _register(rules)


@cache
def _register(rules: Rules) -> None:
    from torch.distributed.tensor.experimental import register_sharding

    ops = [getattr(torch.ops.tilenorm, name).default for name, _ in rules]
    for op, (_, strategies) in zip(ops, rules, strict=True):
        register_sharding(op)(lambda *given, strategies=strategies: strategies(given))
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
    replicated, *_ = found = list(rules(x, parameters, call.options.hidden))
    return [
        (
            [rule.rows if t else replicated.rows for t in there],
            _placed(
                given,
                [*[rule.rows] * 3, *[rule.parameters] * 2],
                rule.rows,
                vector,
                replicated.rows,
            ),
        )
        for rule in found
    ]


def backward_strategies(given: Given) -> list[Strategy]:
    """What DTensor may do with a call of the op norm_backward."""
    call: Any = Backward.of(given)  # of descriptions of tensors
    x, _, *parameters = call.saved[:4]
    tensors = (call.dy, x if call.added else None, *call.saved[1:4], None, None, *call.branch)
    dtypes = tuple(t and t.tensor_meta.dtype for t in tensors)
    needs = merged_needs(dtypes, call.dsum is not None, call.mask)
    there = *needs.gradients, call.output
    replicated, *_ = found = list(rules(x, parameters, call.options.hidden))
    results = [[*[rule.rows] * 3, *[rule.sums] * 2, rule.rows] for rule in found]
    return [
        (
            [p if t else replicated.rows for t, p in zip(there, placed, strict=True)],
            _placed(
                given,
                [*[rule.rows] * 4, *[rule.parameters] * 2, *[rule.rows] * 2],
                rule.rows,
                call.layer_scale,
                replicated.rows,
            ),
        )
        for rule, placed in zip(found, results, strict=True)
    ]


def _placed(given: Given, placements: list, last: Any, vector: Any, whole: Any) -> list:
    """The placements of an op's arguments, most of whose tensors come first.

    last: the placement of the tensors behind other arguments, of which `shape` is read. vector: the
    argument of them that has no rows, whose placement is `whole`.
    """
    first = [None if t is None else p for t, p in zip(given, placements, strict=False)]
    more = [t if hasattr(t, "shape") else None for t in given[len(placements) :]]
    return first + [None if t is None else whole if t is vector else last for t in more]


RULES = (("norm", norm_strategies), ("norm_backward", backward_strategies))
