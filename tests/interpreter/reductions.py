"""Reductions.

A reduction repeatedly adds the second half of its axis to the first half, and rounds every partial
result to the tile's dtype. The compiler may choose this order or another one. The interpreter uses
the same order in every launch.
"""

from functools import partial

import cuda.tile as ct
import torch

from . import dtypes
from .dispatch import implements
from .dtypes import is_boolean
from .elementwise import binary
from .tile import Tile, as_tile, broadcast, common_shape, constant_int, normalize_axis


def _fold(parts: list[Tile], axis: int, function) -> list[Tile]:
    """Reduce an axis to size 1 by combining its halves."""
    while (n := parts[0].shape[axis]) > 1:
        low = [Tile(p.data.narrow(axis, 0, n // 2), p.dtype) for p in parts]
        high = [Tile(p.data.narrow(axis, n // 2, n // 2), p.dtype) for p in parts]
        parts = _combine(function, low, high)
    return parts


def _combine(function, low: list[Tile], high: list[Tile]) -> list[Tile]:
    results = function(*low, *high)
    results = list(results) if isinstance(results, tuple) else [results]
    if len(results) != len(low):
        raise ct.TileTypeError(f"the function must return {len(low)} values, got {len(results)}")
    for x, result in zip(low, results, strict=True):
        if not isinstance(result, Tile) or result.dtype != x.dtype:
            raise ct.TileTypeError(f"the function must return {x.dtype} for {x.dtype}")
        result.data = result.data.expand(x.shape)
    return results


def _reduce(x, axis, function, keepdims: bool):
    """x: a tile, or a tuple of tiles that are reduced together. axis: a number, a tuple or None."""
    parts = [as_tile(p) for p in (x if isinstance(x, tuple) else (x,))]
    shape = common_shape(*(p.shape for p in parts))
    parts = [Tile(broadcast(p.data, shape, "tile"), p.dtype) for p in parts]
    if axis is None:
        axes = list(range(len(shape)))
    else:
        given = axis if isinstance(axis, tuple) else (axis,)
        axes = [normalize_axis(a, len(shape)) for a in given]
    if len(set(axes)) < len(axes):
        raise ct.TileTypeError(f"repeated reduction axis in {axes}")
    for a in sorted(axes):
        parts = _fold(parts, a, function)
    kept = [n for i, n in enumerate(parts[0].shape) if keepdims or i not in axes]
    parts = [Tile(p.data.reshape(kept), p.dtype) for p in parts]
    return tuple(parts) if isinstance(x, tuple) else parts[0]


@implements(ct.reduce)
def _reduce_by(x, axis, func, identity, *, keepdims=False):
    return _reduce(x, constant_int(axis, "axis"), func, keepdims)


def _named(fn: str, x, axis=None, *, keepdims=False, propagate_nan=False):
    """Reduce by a binary operation."""
    x = as_tile(x)
    if dtypes.is_restricted_float(x.dtype):
        raise ct.TileTypeError(f"non-arithmetic dtype {x.dtype} is unsupported here")
    if is_boolean(x.dtype):
        x = Tile(x.data.to(torch.int32), ct.int32)
    return _reduce(x, axis, partial(binary, fn, propagate_nan=propagate_nan), keepdims)


for _stub, _fn in {ct.sum: "add", ct.min: "min", ct.max: "max"}.items():
    implements(_stub)(partial(_named, _fn))
