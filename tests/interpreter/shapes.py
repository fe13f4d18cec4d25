"""Tile creation, dtype conversion, changes of shape, block indices and static expressions."""

import math
from functools import cache

import cuda.tile as ct
import torch
from cuda.tile._ir.typing_support import to_dtype

from . import dtypes
from .dispatch import current, implements
from .dtypes import is_boolean, is_integral
from .errors import InterpreterError
from .tile import (
    LoopIndex,
    Tile,
    as_int,
    as_tile,
    constant_int,
    constant_shape,
    normalize_axis,
    operand,
    scalar,
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


@cache
def _cached_arange(size: int, dtype: torch.dtype) -> torch.Tensor:
    """0, 1, ..., size - 1. Do not write to the result: it is cached."""
    return torch.arange(size).to(dtype)


@implements(ct.arange)
def _arange(size, *, dtype):
    dtype = to_dtype(dtype)
    [size] = constant_shape(size, "arange")
    index_dtype = dtype if is_integral(dtype) else ct.int32
    return _astype(Tile(_cached_arange(size, dtypes.torch_dtype(index_dtype)), index_dtype), dtype)


@implements(ct.astype)
def _astype(x, dtype, *, rounding_mode=None):
    dtype = to_dtype(dtype)
    if rounding_mode is not None:
        raise NotImplementedError(f"the interpreter does not implement {rounding_mode}")
    if dtypes.is_constant(x):
        return Tile(dtypes.constant(x, dtype), dtype)
    x = as_tile(x)
    return Tile(dtypes.cast(x.data, x.dtype, dtype), dtype)


@implements(ct.bitcast)
def _bitcast(x, dtype):
    x, dtype = as_tile(x), to_dtype(dtype)
    if is_boolean(x.dtype) or is_boolean(dtype) or x.dtype.bitwidth != dtype.bitwidth:
        raise ct.TileTypeError(f"cannot bitcast from {x.dtype} to {dtype}")
    return Tile(x.data.view(dtypes.torch_dtype(dtype)), dtype)


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


def _axis(axis) -> int:
    if constant_int(axis, "axis") not in (0, 1, 2):
        raise ct.TileTypeError(f"axis must be 0, 1 or 2, got {axis}")
    return axis


@implements(ct.bid)
def _bid(axis):
    return scalar(current().block[_axis(axis)], ct.int32)


@implements(ct.num_blocks)
def _num_blocks(axis):
    return scalar(current().grid[_axis(axis)], ct.int32)


@implements(ct.grid_dependency_control_wait)
@implements(ct.grid_dependency_control_launch_dependents)
def _grid_dependency_control():
    return None


@implements(ct.static_eval)
def unwrap_loop_indices(value):
    """Turn loop indices into Python integers, as the compiler does in static expressions."""
    if isinstance(value, LoopIndex):
        return int(value.data)
    if isinstance(value, tuple):
        return tuple(unwrap_loop_indices(v) for v in value)
    return value


@implements(ct.print)
def _print(*args, sep=" ", end="\n"):
    print(*args, sep=sep, end=end)
