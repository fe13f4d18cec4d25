"""Tile creation, dtype conversion, and changes of shape."""

import math
from functools import cache

import cuda.tile as ct
import torch
from cuda.tile._ir.typing_support import to_dtype

from . import dtypes
from .dispatch import implements
from .dtypes import is_boolean, is_float, is_integral
from .errors import InterpreterError
from .ops_math import binary
from .tile import (
    Tile,
    as_int,
    as_tile,
    broadcast,
    constant_int,
    constant_shape,
    normalize_axis,
    operand,
)


@implements(ct.full)
def _full(shape, fill_value, dtype):
    dtype = to_dtype(dtype)
    value = operand(fill_value, dtype)
    if value.ndim:
        raise ct.TileTypeError("fill_value must be a scalar")
    return Tile(value.expand(constant_shape(shape)), dtype)


@implements(ct.zeros)
def _zeros(shape, dtype):
    return _full(shape, 0, dtype)


@implements(ct.ones)
def _ones(shape, dtype):
    return _full(shape, 1, dtype)


@cache
def _cached_arange(size: int, dtype: torch.dtype) -> torch.Tensor:
    """0, 1, ..., size - 1. Do not write to the result: it is cached."""
    return torch.arange(size).to(dtype)


@implements(ct.arange)
def _arange(size, *, dtype, start=0, step=1):
    dtype = to_dtype(dtype)
    [size] = constant_shape(size, "arange")
    index_dtype = dtype if is_integral(dtype) else ct.int32
    index = Tile(_cached_arange(size, dtypes.torch_dtype(index_dtype)), index_dtype)
    result = _astype(index, dtype)
    if not (dtypes.is_constant(step) and step == 1):
        result = binary("mul", result, _astype(step, dtype))
    if not (dtypes.is_constant(start) and start == 0):
        result = binary("add", result, _astype(start, dtype))
    return result


@implements(ct.astile)
def _astile(value, *, dtype):
    dtype = to_dtype(dtype)
    if isinstance(value, tuple):
        constant_shape(len(value), "astile tuple")
        parts = [_astile(v, dtype=dtype).data for v in value]
        if any(p.shape != parts[0].shape for p in parts):
            raise ct.TileTypeError("tuple has non-uniform inner shapes")
        return Tile(torch.stack(parts), dtype)
    if isinstance(value, Tile) and value.ndim:
        raise ct.TileTypeError(f"expected scalar elements, got {value.describe()}")
    return Tile(operand(value, dtype), dtype)


@implements(ct.astype)
def _astype(x, dtype, *, rounding_mode=None):
    dtype = to_dtype(dtype)
    if dtypes.is_constant(x) and rounding_mode is None:
        return Tile(dtypes.constant(x, dtype), dtype)
    x = as_tile(x)
    if rounding_mode is not None:
        if not (is_float(x.dtype) and is_float(dtype)):
            raise ct.TileTypeError("rounding_mode is only valid for float to float conversions")
        dtypes.ops_utils.get_ftof_rounding_min_version(x.dtype, dtype, rounding_mode)
    return Tile(dtypes.cast(x.data, x.dtype, dtype, rounding_mode), dtype)


@implements(ct.bitcast)
def _bitcast(x, dtype):
    x, dtype = as_tile(x), to_dtype(dtype)
    if is_boolean(x.dtype) or is_boolean(dtype) or x.dtype.bitwidth != dtype.bitwidth:
        raise ct.TileTypeError(f"cannot bitcast from {x.dtype} to {dtype}")
    return Tile(x.data.view(dtypes.torch_dtype(dtype)), dtype)


@implements(ct.pack_to_bytes)
def _pack_to_bytes(x):
    # torch calls a broadcast scalar contiguous, but cannot view its stride of 0 as another dtype.
    data = x.data.flatten().clone(memory_format=torch.contiguous_format)
    return Tile(data.view(torch.uint8), ct.uint8)


@implements(ct.unpack_from_bytes)
def _unpack_from_bytes(x, dtype):
    dtype = to_dtype(dtype)
    if x.dtype != ct.uint8 or x.ndim != 1:
        raise ct.TileTypeError(f"unpack_from_bytes needs a 1D uint8 tile, got {x.describe()}")
    return Tile(x.data.contiguous().view(dtypes.torch_dtype(dtype)), dtype)


@implements(ct.reshape)
def reshape(x, shape):
    x = as_tile(x)
    shape = tuple(constant_int(n, "dimension of shape") for n in shape)
    explicit_size = math.prod(n for n in shape if n > 0)
    size = x.data.numel()
    if min(shape, default=1) < -1 or shape.count(-1) > 1 or size % explicit_size:
        raise ct.TileTypeError(f"cannot reshape {x.shape} to {shape}")
    shape = tuple(size // explicit_size if n == -1 else n for n in shape)
    if -1 not in shape and size != torch.Size(shape).numel():
        raise ct.TileTypeError(f"cannot reshape {x.shape} to {shape}")
    return Tile(x.data.reshape(constant_shape(shape)), x.dtype)


@implements(ct.Tile.item)
def _item(x):
    return reshape(x, ())


@implements(ct.expand_dims)
def _expand_dims(x, axis):
    return Tile(x.data.unsqueeze(normalize_axis(axis, x.ndim + 1)), x.dtype)


@implements(ct.broadcast_to)
def _broadcast_to(x, shape):
    x = as_tile(x)
    return Tile(broadcast(x.data, constant_shape(shape), "tile"), x.dtype)


@implements(ct.permute)
def _permute(x, axes):
    axes = tuple(normalize_axis(a, x.ndim) for a in axes)
    if sorted(axes) != list(range(x.ndim)):
        raise ct.TileTypeError(f"{axes} is not a permutation of the axes of {x.describe()}")
    return Tile(x.data.permute(axes), x.dtype)


@implements(ct.transpose)
def _transpose(x, axis0=None, axis1=None):
    if axis0 is None and axis1 is None and x.ndim == 2:
        axis0, axis1 = 0, 1
    if axis0 is None or axis1 is None:
        raise ct.TileTypeError(f"transpose of {x.describe()} needs both axes")
    axes = normalize_axis(axis0, x.ndim), normalize_axis(axis1, x.ndim)
    return Tile(x.data.transpose(*axes), x.dtype)


@implements(ct.cat)
def _cat(tiles, axis):
    if not 1 <= len(tiles) <= 2:
        raise ct.TileTypeError(f"cat() takes one or two tiles, got {len(tiles)}")
    first = tiles[0]
    axis = normalize_axis(axis, first.ndim)
    if any(t.dtype != first.dtype or t.shape != first.shape for t in tiles):
        raise ct.TileTypeError("cat() needs tiles of one shape and dtype")
    return Tile(torch.cat([t.data for t in tiles], axis), first.dtype)


def _subtile(x: Tile, index, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The slices of x that the subtile with this index covers."""
    index = index if isinstance(index, tuple) else (index,)
    if len(index) != x.ndim or len(shape) != x.ndim:
        raise ct.TileTypeError(
            f"{len(index)} indices and shape {shape} do not match {x.describe()}"
        )
    window = []
    for i, n, size in zip(index, shape, x.shape, strict=True):
        i = as_int(i, "index")
        if size % n:
            raise ct.TileTypeError(f"shape {x.shape} is not divisible by {shape}")
        if not 0 <= i < size // n:
            raise InterpreterError(f"subtile index {i} is outside [0, {size // n})")
        window.append(slice(i * n, (i + 1) * n))
    return tuple(window)


@implements(ct.extract)
def _extract(x, index, shape):
    shape = constant_shape(shape, rank=x.ndim)
    data = x.data[_subtile(x, index, shape or (1,) * x.ndim)]
    return Tile(data.reshape(shape), x.dtype)


@implements(ct.insert)
def _insert(x, index, value):
    if x.dtype != value.dtype:
        raise ct.TileTypeError(f"cannot insert {value.dtype} into {x.dtype}")
    data = x.data.clone()
    data[_subtile(x, index, value.shape or (1,) * x.ndim)] = value.data
    return Tile(data, x.dtype)
