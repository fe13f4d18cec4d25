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

Where rows are in pieces (see split/library.py), the ops run on the rows of the table, with what has
a number a row placed as x is, and on one more:

    rows                 x, gate, dy,    weight, bias,    part, own,       whole, mean, rstd,
                         y, dx, …        dW, dB           their sums       dots, added up
    cut in a normalised  Shard(d)        Shard(d')        Partial          Replicate
      dimension d

d' is the parameter's dimension that lies on x's dimension d. `own` is what a piece alone knows. It
is Partial by name, and nothing adds it up: row_center reads it where row_sums left it.

Where heads are rotated, the rows are heads, or tokens, also those of a key. Tables and positions
are cut in a dimension d that they have as the tokens have it, and else replicated.

DTensor's search takes the row that costs least, and moves what does not fit it: it gathers a tensor
that is cut in a normalised dimension, which the functions give to the ops of pieces, and
reduces or reduce-scatters one that is Partial.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from ..table import OPS, Op, Port
from .layout import leading_groups, rows_shape
from .torch_private import keep_every_argument

# DTensor's description of an argument: a tensor's shape, dtype and placements, or the value itself.
Given = Sequence[Any]
# Placements of the results, and of the arguments: None for one that is no tensor.
Strategy = tuple[list, list]


class Rule(NamedTuple):
    """A row of a table, as placements: of what has (r)ows, of (p)arameters and of their
    (d)erivatives; for pieces of rows, also of (n)umbers of whole rows and of (s)ums of a piece; of
    what lies by (g)roup and of its d(e)rivatives; and where heads are rotated of (t)ables, of
    pos(i)tions, and of (o)utputs.
    """

    r: Any
    p: Any
    d: Any
    n: Any = None
    s: Any = None
    g: Any = None
    e: Any = None
    t: Any = None
    i: Any = None
    o: Any = None


def is_distributed(value: object) -> bool:
    """Whether a value is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def register_where_loaded() -> None:
    """Have DTensor, where it is loaded, run the ops by their rules."""
    if "torch.distributed.tensor" in sys.modules:
        _register()


@cache
def _register() -> None:
    from torch.distributed.tensor.experimental import register_sharding

    from .backward import KINDS
    from .split import library as split

    ops: dict[str, Callable] = {
        # The scales of a quantised norm lie in no order that a shard's would have.
        name: partial(op_strategies, op)
        for name, op in OPS.items()
        if not op.quantized
    }
    inner = {**KINDS, **split.KINDS}
    ops |= {name: partial(inner_strategies, kind) for name, kind in inner.items()}
    overloads = [getattr(torch.ops.tilenorm, name).default for name in ops]
    for overload, tell in zip(overloads, ops.values(), strict=True):
        register_sharding(overload)(lambda *given, tell=tell: tell(given))
    keep_every_argument(overloads)


def rules_of(
    ports: Sequence[Port], tensors: Iterable[Any], hidden: int, heads_first: bool
) -> Iterator[Rule]:
    """The rows of the table for the tensors of an op, of which `shape` is read."""
    each = list(zip(ports, tensors, strict=True))
    parameters = [t for port, t in each if port.lies == "affine"]
    given = {port.role: t for port, t in each}
    x = given["x"]
    if "mod_scale" in given:
        return rules_by_group(x, parameters, given["mod_scale"], hidden)
    if "cos" in given:
        tables = given["cos"], given["positions"]
        return rules_rotated(x, *tables, given["weight"], hidden, heads_first)
    return rules(x, parameters, hidden)


def rules(x: Any, parameters: Sequence[Any], hidden: int) -> Iterator[Rule]:
    """The rows of the table for an input and its parameters, of which `shape` is read."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    yield Rule(Replicate(), Replicate(), Replicate())
    if not hidden:
        return
    leading = len(rows_shape(x.shape, hidden))
    by_heads = {math.prod(p.shape) != hidden for p in parameters if p is not None}
    for d in range(leading):
        if True in by_heads and d == leading - 1:
            if False in by_heads:  # no rule for a shard of heads fits both
                return
            yield Rule(Shard(d), Shard(0), Shard(0))
        else:
            yield Rule(Shard(d), Replicate(), Partial())
    # A cut normalised dimension has no row: its sums need an all-reduce (split/norm.py).


def rules_by_group(x: Any, parameters: Sequence[Any], scale: Any, hidden: int) -> Iterator[Rule]:
    """The rows of the table where a tensor lies by group."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    dims = len(x.shape) - len(rows_shape(x.shape, hidden)) if hidden else 1  # normalised ones
    groups = leading_groups(scale.shape, dims)
    for rule in rules(x, parameters, hidden):
        placed, d = (Replicate(), Replicate()), getattr(rule.r, "dim", None)
        if d is not None:
            if d < len(groups) and groups[d] != x.shape[d]:
                continue
            placed = (Shard(d), Shard(d)) if d < len(groups) else (Replicate(), Partial())
        yield rule._replace(g=placed[0], e=placed[1])


def rules_rotated(
    x: Any, cos: Any, positions: Any, weight: Any, hidden: int, heads_first: bool
) -> Iterator[Rule]:
    """The rows of the table where heads are rotated."""
    from torch.distributed.tensor import Replicate, Shard

    tokens = len(x.shape) - 2
    for rule in rules(x, [weight], hidden):
        d = getattr(rule.r, "dim", None)

        def along(sizes: Sequence[int], d=d) -> Any:
            """Where what broadcasts to the tokens is, if these are cut in d."""
            own = -1 if d is None or d >= tokens else d - tokens + len(sizes)
            return Shard(own) if own >= 0 and sizes[own] != 1 else Replicate()

        table = along(cos.shape[:-1]) if positions is None else Replicate()
        made = Shard({1: 2, 2: 1}.get(d, d)) if heads_first and d is not None else rule.r
        placed = positions if positions is None else along(positions.shape)
        yield rule._replace(t=table, i=placed, o=made)


def rules_of_pieces(x: Any, parameters: Sequence[Any], dims: int) -> Iterator[Rule]:
    """The rows of the table where rows are in pieces."""
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


# The letter of Rule for each way in which a port lies. "w" is whole on each rank.
LETTERS = {"rows": "r", "mask": "r", "affine": "p", "vector": "w", "number": "r", "group": "g"}
LETTERS |= {"whole": "n", "part": "s", "derivative": "d"}
LETTERS |= {"key": "r", "table": "t", "tokens": "i", "heads": "o", "group derivative": "e"}


def letters_of(ports: Sequence[Port]) -> str:
    return "".join(LETTERS[port.lies] for port in ports)


def op_strategies(op: Op, given: Given) -> list[Strategy]:
    """What DTensor may do with a call of an op."""
    from .library import Called

    called = Called.of(op, given)
    heads_first = op.rotated and called.option("output_heads_first")
    found = rules_of(op.takes, called.tensors, called.options[0], heads_first)
    made = [called.makes(port) for port in op.makes]
    return strategies_of(found, letters_of(op.takes), given, letters_of(op.makes), made)


def inner_strategies(kind: Any, given: Given) -> list[Strategy]:
    """What DTensor may do with a call of an op of inner.py."""
    call, row = kind([described(t) for t in given]), kind.ROW
    letters = {port.name: LETTERS[port.lies] for port in row.tensors}
    taken = "".join([letters.get(name, "w") for name in row.arguments])
    there = [result.shape is not None for result in call.results()]
    return strategies_of(call.rules(), taken, given, letters_of(row.makes), there)


def described(argument: Any) -> Any:
    """A tensor's shape and dtype, given DTensor's description; any other argument as it is."""
    return getattr(argument, "tensor_meta", argument)


def strategies_of(
    rules: Iterable[Rule],
    arguments: str,
    given: Given,
    results: str,
    there: Sequence[bool],
) -> list[Strategy]:
    """What DTensor may do with a call by rules.

    arguments, results: for each argument and for each result, the letter of Rule, or "w" for what
    is whole on each rank. there: which results are no empty tensors.
    """
    from torch.distributed.tensor import Replicate

    whole, found = Replicate(), []
    for rule in rules:
        by_letter = {**rule._asdict(), "w": whole}
        placed = [
            by_letter[letter] if hasattr(t, "shape") else None
            for t, letter in zip_longest(given, arguments, fillvalue="w")
        ]
        made = zip(there, results, strict=True)
        found.append(([by_letter[letter] if t else whole for t, letter in made], placed))
    return found
