"""Tile creation, dtype conversion, changes of shape, block indices and static expressions."""

from functools import cache

import cuda.tile as ct
import torch
from cuda.tile._ir.typing_support import to_dtype

from . import dtypes
from .dispatch import current, implements
from .errors import InterpreterError
from .tile import LoopIndex, Tile, as_int, operand, scalar


@implements(ct.full)
def _full(shape, fill_value, dtype):
    dtype = to_dtype(dtype)
    return Tile(operand(fill_value, dtype).expand(shape), dtype)


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
    return Tile(_cached_arange(size, dtypes.TORCH_DTYPE[dtype]), dtype)


@implements(ct.astype)
def _astype(x, dtype, *, rounding_mode=None):
    dtype = to_dtype(dtype)
    if rounding_mode is not None:
        raise NotImplementedError(f"the interpreter does not implement {rounding_mode}")
    if dtype == x.dtype:
        return Tile(x.data, dtype, x.product)
    return Tile(dtypes.cast(x.data, x.dtype, dtype), dtype)


@implements(ct.bitcast)
def _bitcast(x, dtype):
    dtype = to_dtype(dtype)
    return Tile(x.data.view(dtypes.TORCH_DTYPE[dtype]), dtype)


@implements(ct.reshape)
def reshape(x, shape):
    return x.reshaped(lambda data: data.reshape(shape))


@implements(ct.Tile.item)
def _item(x):
    return reshape(x, ())


@implements(ct.cat)
def _cat(tiles, axis):
    return Tile(torch.cat([t.data for t in tiles], axis), tiles[0].dtype)


def _subtile(x: Tile, index, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The slices of x that the subtile with this index covers."""
    index = index if isinstance(index, tuple) else (index,)
    window = []
    for i, n, size in zip(map(as_int, index), shape, x.shape, strict=True):
        if not 0 <= i < size // n:
            raise InterpreterError(f"subtile index {i} is outside [0, {size // n})")
        window.append(slice(i * n, (i + 1) * n))
    return tuple(window)


@implements(ct.extract)
def _extract(x, index, shape):
    shape = shape if isinstance(shape, tuple) else (shape,)
    window = _subtile(x, index, shape or (1,) * x.ndim)
    return x.reshaped(lambda data: data[window].reshape(shape))


@implements(ct.bid)
def _bid(axis):
    return scalar(current().block[axis], ct.int32)


@implements(ct.num_blocks)
def _num_blocks(axis):
    return scalar(current().grid[axis], ct.int32)


@implements(ct.grid_dependency_control_wait)
def _grid_dependency_control_wait():
    current().waited = True


@implements(ct.grid_dependency_control_launch_dependents)
def _grid_dependency_control_launch_dependents():
    """The next kernel relies on the wait of this one, see kernels/turns.py."""
    current().check_turn("starts", "the next kernel")


@implements(ct.static_eval)
def unwrap_loop_indices(value):
    """Turn loop indices into Python integers, as the compiler does in static expressions."""
    if isinstance(value, LoopIndex):
        return int(value.data)
    if isinstance(value, tuple):
        return tuple(unwrap_loop_indices(v) for v in value)
    return value
