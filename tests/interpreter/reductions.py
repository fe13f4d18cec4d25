"""Reductions.

A reduction repeatedly adds the second half of its axis to the first half, and rounds every partial
result to the tile's dtype. The compiler may choose this order or another one. The interpreter uses
the same order in every launch.
"""

from functools import partial

import cuda.tile as ct

from .dispatch import implements
from .elementwise import binary
from .shapes import reshape
from .tile import Tile


def _fold(parts: list[Tile], axis: int, function) -> list[Tile]:
    """Reduce an axis to size 1 by combining its halves."""
    while (n := parts[0].shape[axis]) > 1:
        low, high = ([_half(p, axis, start) for p in parts] for start in (0, n // 2))
        made = function(*low, *high)
        parts = list(made) if isinstance(made, tuple) else [made]
    return parts


def _half(x: Tile, axis: int, start: int) -> Tile:
    return x.reshaped(lambda data: data.narrow(axis, start, data.shape[axis] // 2))


def _reduce(x, axis, function, keepdims: bool):
    """x: a tile, or a tuple of tiles that are reduced together. axis: a number, a tuple or None."""
    parts = list(x) if isinstance(x, tuple) else [x]
    rank = parts[0].ndim
    given = range(rank) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    axes = [a % rank for a in given]
    for a in sorted(axes):
        parts = _fold(parts, a, function)
    kept = [n for i, n in enumerate(parts[0].shape) if keepdims or i not in axes]
    parts = [reshape(p, kept) for p in parts]
    return tuple(parts) if isinstance(x, tuple) else parts[0]


@implements(ct.reduce)
def _reduce_by(x, axis, func, identity, *, keepdims=False):
    return _reduce(x, axis, func, keepdims)


def _named(fn: str, x, axis=None, *, keepdims=False, propagate_nan=False):
    """Reduce by a binary operation."""
    return _reduce(x, axis, partial(binary, fn, propagate_nan=propagate_nan), keepdims)


for _stub, _fn in {ct.sum: "add", ct.min: "min", ct.max: "max"}.items():
    implements(_stub)(partial(_named, _fn))
