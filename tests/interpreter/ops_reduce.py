"""Reductions, scans and matrix products.

A reduction repeatedly adds the second half of its axis to the first half, and rounds every partial
result to the tile's dtype. The compiler may choose this order or another one. The interpreter uses
the same order in every launch.
"""

import cuda.tile as ct
import torch
from cuda.tile._datatype import _resolve_mma_supported_dtype

from . import dtypes
from .dispatch import implements
from .dtypes import is_boolean, is_float
from .ops_math import binary, check_modes
from .tile import Tile, as_tile, broadcast, common_shape, constant_int, normalize_axis


def _fold(parts: list[Tile], axis: int, function) -> list[Tile]:
    """Reduce an axis to size 1 by combining its halves."""
    while (n := parts[0].shape[axis]) > 1:
        low = [Tile(p.data.narrow(axis, 0, n // 2), p.dtype) for p in parts]
        high = [Tile(p.data.narrow(axis, n // 2, n // 2), p.dtype) for p in parts]
        parts = _combine(function, low, high)
    return parts


def _prefix(parts: list[Tile], axis: int, function) -> list[Tile]:
    """The inclusive scan along an axis."""
    n, distance = parts[0].shape[axis], 1
    while distance < n:
        before = [Tile(p.data.narrow(axis, 0, n - distance), p.dtype) for p in parts]
        after = [Tile(p.data.narrow(axis, distance, n - distance), p.dtype) for p in parts]
        sums = _combine(function, before, after)
        parts = [
            Tile(torch.cat([p.data.narrow(axis, 0, distance), s.data], axis), p.dtype)
            for p, s in zip(parts, sums, strict=True)
        ]
        distance *= 2
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


def _broadcast_parts(x) -> list[Tile]:
    parts = [as_tile(p) for p in (x if isinstance(x, tuple) else (x,))]
    shape = common_shape(*(p.shape for p in parts))
    return [Tile(broadcast(p.data, shape, "tile"), p.dtype) for p in parts]


def _reduce(x, axis, function, keepdims: bool):
    parts = _broadcast_parts(x)
    ndim = parts[0].ndim
    if axis is None:
        axes = list(range(ndim))
    else:
        axes = [normalize_axis(a, ndim) for a in (axis if isinstance(axis, tuple) else (axis,))]
    if len(set(axes)) < len(axes):
        raise ct.TileTypeError(f"repeated reduction axis in {axes}")
    for a in sorted(axes):
        parts = _fold(parts, a, function)
    kept = [n for i, n in enumerate(parts[0].shape) if keepdims or i not in axes]
    parts = [Tile(p.data.reshape(kept), p.dtype) for p in parts]
    return tuple(parts) if isinstance(x, tuple) else parts[0]


def _named_operation(fn: str, x, **modes):
    """x as a tile, and the binary operation `fn` with the given modes, for a reduction or scan."""
    x = as_tile(x)
    if dtypes.is_restricted_float(x.dtype):
        raise ct.TileTypeError(f"non-arithmetic dtype {x.dtype} is unsupported here")
    check_modes(fn, x.dtype, modes.get("rounding_mode"), modes.get("flush_to_zero", False))
    if is_boolean(x.dtype):
        x = Tile(x.data.to(torch.int32), ct.int32)
    return x, lambda a, b: binary(fn, a, b, **modes)


def _register():
    def reduction(fn):
        def run(x, axis=None, *, keepdims=False, **modes):
            x, function = _named_operation(fn, x, **modes)
            return _reduce(x, axis, function, keepdims)

        return run

    def prefix(fn):
        def run(x, axis=0, *, reverse=False, **modes):
            x, function = _named_operation(fn, x, **modes)
            return _scan(x, axis, function, None, reverse=reverse)

        return run

    for stub, fn in {ct.sum: "add", ct.prod: "mul", ct.min: "min", ct.max: "max"}.items():
        implements(stub)(reduction(fn))
    for stub, fn in {ct.cumsum: "add", ct.cumprod: "mul"}.items():
        implements(stub)(prefix(fn))


@implements(ct.reduce)
def _reduce_by(x, axis, func, identity, *, keepdims=False):
    return _reduce(x, constant_int(axis, "axis"), func, keepdims)


@implements(ct.scan)
def _scan(x, axis, func, identity, *, reverse=False):
    parts = _broadcast_parts(x)
    axis = normalize_axis(axis, parts[0].ndim)

    def flip(tiles):
        return [Tile(t.data.flip(axis), t.dtype) for t in tiles] if reverse else tiles

    parts = flip(_prefix(flip(parts), axis, func))
    return tuple(parts) if isinstance(x, tuple) else parts[0]


_register()


@implements(ct.argmax)
def _argmax(x, axis=None, *, keepdims=False, propagate_nan=False):
    return _arg_extremum(torch.gt, x, axis, keepdims, propagate_nan)


@implements(ct.argmin)
def _argmin(x, axis=None, *, keepdims=False, propagate_nan=False):
    return _arg_extremum(torch.lt, x, axis, keepdims, propagate_nan)


def _arg_extremum(better, x, axis, keepdims: bool, propagate_nan: bool):
    x = as_tile(x)
    shape = (1,) * x.ndim
    if axis is None:
        x, axis = Tile(x.data.reshape(-1), x.dtype), 0
    else:
        axis = normalize_axis(axis, x.ndim)
        shape = tuple(1 if i == axis else n for i, n in enumerate(x.shape))
    # Every narrower dtype has the same order after conversion to float64 or int64.
    wide = x.data.to(torch.float64 if is_float(x.dtype) else torch.int64)
    index = torch.arange(wide.shape[axis], dtype=torch.int32)
    index = index.reshape([-1 if i == axis else 1 for i in range(wide.ndim)])

    def pick(value, i, other, j):
        v, w = value.data, other.data
        v_nan, w_nan = v.isnan(), w.isnan()
        wins = better(v, w) | (v_nan & ~w_nan if propagate_nan else w_nan & ~v_nan)
        wins |= ((v == w) | (v_nan & w_nan)) & (i.data < j.data)
        return (
            Tile(torch.where(wins, v, w), value.dtype),
            Tile(torch.where(wins, i.data, j.data), ct.int32),
        )

    pair = (Tile(wide, dtypes.TILE_DTYPE[wide.dtype]), Tile(index, ct.int32))
    _, result = _reduce(pair, axis, pick, False)
    return Tile(result.data.reshape(shape), ct.int32) if keepdims else result


def _product(x: torch.Tensor, y: torch.Tensor, dtype) -> torch.Tensor:
    # Sums of integer products are exact in float64 if K is below 2^20.
    wide = torch.float64 if dtype in (ct.int32, ct.float64) else torch.float32
    return torch.matmul(x.to(wide), y.to(wide))


@implements(ct.mma)
def _mma(x, y, acc, *, use_fast_acc=False):
    if x.ndim < 2 or y.ndim < 2:
        raise ct.TileTypeError("mma() needs tiles of at least two dimensions")
    _resolve_mma_supported_dtype(x.dtype, y.dtype, acc.dtype)
    product = _product(x.data, y.data, acc.dtype)
    if product.shape != acc.data.shape:
        raise ct.TileTypeError(f"acc must have shape {tuple(product.shape)}, got {acc.shape}")
    total = product + acc.data.to(product.dtype)
    return Tile(total.to(dtypes.torch_dtype(acc.dtype)), acc.dtype)


@implements(ct.matmul)
def _matmul(x, y):
    dtype = dtypes.promote(x.dtype, y.dtype)
    acc = _resolve_mma_supported_dtype(dtype, dtype, None)
    a, b = (dtypes.cast(t.data, t.dtype, dtype) for t in (x, y))
    product = _product(a, b, acc).to(dtypes.torch_dtype(acc))
    return Tile(dtypes.cast(product, acc, dtype), dtype)
