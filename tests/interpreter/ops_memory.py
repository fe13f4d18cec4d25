"""Tile loads and stores, tiled views and slices of arrays."""

import cuda.tile as ct
import torch
from cuda.tile._ir.ops import TileLoad, TileStore
from cuda.tile._ir.ops_utils import validate_memory_order_and_scope

from . import dtypes
from .array import Array, TiledView
from .dispatch import current, implements
from .errors import OutOfBoundsError
from .ops_math import binary
from .tile import (
    Tile,
    as_int,
    as_tile,
    broadcast,
    constant_shape,
    loose_dtype,
    normalize_axis,
    operand,
    scalar,
)

_WEAK = ct.MemoryOrder.WEAK
_PADDING = {
    ct.PaddingMode.ZERO: 0.0,
    ct.PaddingMode.NEG_ZERO: -0.0,
    ct.PaddingMode.NAN: float("nan"),
    ct.PaddingMode.POS_INF: float("inf"),
    ct.PaddingMode.NEG_INF: -float("inf"),
}


def padding_of(mode, dtype) -> torch.Tensor:
    """A 0-d tensor of the value that a padding mode gives elements outside the array."""
    if mode is ct.PaddingMode.UNDETERMINED:
        return current().undefined(dtype)
    if not dtypes.is_float(dtype) and mode is not ct.PaddingMode.ZERO:
        raise ct.TileTypeError(f"{mode} is not defined for {dtype}")
    return dtypes.constant(_PADDING[mode], dtype)


def axis_order(order, ndim: int) -> tuple[int, ...]:
    """The permutation of axes that the `order` argument of ct.load means."""
    if isinstance(order, str):
        if order not in ("C", "F"):
            raise ct.TileTypeError(f"expected 'C' or 'F', got {order!r}")
        return tuple(range(ndim))[:: 1 if order == "C" else -1]
    order = tuple(normalize_axis(a, ndim) for a in order)
    if sorted(order) != list(range(ndim)):
        raise ct.TileTypeError(f"order {order} is not a permutation of {ndim} axes")
    return order


def check_hints(latency, allow_tma) -> None:
    """Raise for values of the performance hints that the compiler rejects."""
    if latency is not None and not 1 <= latency <= 10:
        raise ct.TileValueError(f"latency must be between 1 and 10, got {latency}")
    if allow_tma is not None and not isinstance(allow_tma, bool):
        raise ct.TileTypeError(f"allow_tma must be a boolean, got {allow_tma}")


def tile_window(array: Array, index, shape, steps, order, check_bounds: bool):
    """The part of an array that a tile overlaps, and the slices of the tile inside the array."""
    data = array.data.permute(axis_order(order, array.ndim))
    index = index if isinstance(index, tuple) else (index,)
    if len(index) != array.ndim:
        raise ct.TileTypeError(f"{len(index)} indices do not match the rank {array.ndim}")
    inside, covered = [], []
    for i, n, step, extent in zip(index, shape, steps, data.shape, strict=True):
        start = as_int(i, "index") * step
        low, high = max(start, 0), min(start + n, extent)
        if low >= high:
            raise OutOfBoundsError(
                f"tile {_ints(index)} of shape {shape} lies outside '{array.buffer.name}'"
                f" of shape {tuple(data.shape)}"
            )
        inside.append(slice(low, high))
        covered.append(slice(low - start, high - start))
    window = data[tuple(inside)]
    if not check_bounds and tuple(window.shape) != shape:
        raise OutOfBoundsError(
            f"tile {_ints(index)} of shape {shape} crosses the edge of '{array.buffer.name}'"
            f" of shape {tuple(data.shape)} with check_bounds=False"
        )
    return array.window(window), tuple(covered)


def _ints(index) -> tuple[int, ...]:
    return tuple(as_int(i, "index") for i in index)


def _load_tile(array, index, shape, steps, order, padding_mode, check_bounds, memory_order=_WEAK):
    full = shape or (1,) * array.ndim
    region, covered = tile_window(array, index, full, steps or full, order, check_bounds)
    values = array.buffer.load(region, memory_order)
    if region.size != full:
        padded = padding_of(padding_mode, array.dtype).repeat(full)
        padded[covered] = values
        values = padded
    return Tile(values.reshape(shape), array.dtype)


def _store_tile(array, index, value, steps, order, check_bounds, memory_order=_WEAK):
    dtypes.require_implicit_cast(loose_dtype(value), array.dtype, "stored tile")
    data = operand(value, array.dtype)
    shape = tuple(data.shape) or (1,) * array.ndim
    if len(shape) != array.ndim:
        raise ct.TileTypeError(f"a tile of shape {shape} cannot be stored at rank {array.ndim}")
    region, covered = tile_window(array, index, shape, steps or shape, order, check_bounds)
    array.buffer.store(region, data.reshape(shape)[covered], memory_order)


@implements(ct.load)
def _load(
    array,
    index,
    shape,
    *,
    order="C",
    padding_mode=ct.PaddingMode.UNDETERMINED,
    check_bounds=True,
    latency=None,
    allow_tma=None,
    memory_order=_WEAK,
    memory_scope=ct.MemoryScope.NONE,
):
    check_hints(latency, allow_tma)
    validate_memory_order_and_scope(memory_order, memory_scope, TileLoad)
    shape = constant_shape(shape, rank=array.ndim)
    return _load_tile(array, index, shape, None, order, padding_mode, check_bounds, memory_order)


@implements(ct.store)
def _store(
    array,
    index,
    tile,
    *,
    order="C",
    check_bounds=True,
    latency=None,
    allow_tma=None,
    memory_order=_WEAK,
    memory_scope=ct.MemoryScope.NONE,
):
    check_hints(latency, allow_tma)
    validate_memory_order_and_scope(memory_order, memory_scope, TileStore)
    _store_tile(array, index, tile, None, order, check_bounds, memory_order)


@implements(ct.num_tiles)
def _num_tiles(array, axis, shape, order="C"):
    shape = constant_shape(shape, rank=array.ndim) or (1,) * array.ndim
    extents = array.data.permute(axis_order(order, array.ndim)).shape
    axis = normalize_axis(axis, array.ndim)
    return scalar(-(-extents[axis] // shape[axis]), ct.int32)


@implements(ct.Array.tiled_view)
def _tiled_view(
    array, tile_shape, *, padding_mode=ct.PaddingMode.UNDETERMINED, traversal_steps=None
):
    shape = constant_shape(tile_shape, "tile_shape", array.ndim)
    steps = shape or (1,) * array.ndim
    if traversal_steps is not None:
        steps = constant_shape(traversal_steps, "traversal_steps", array.ndim, power_of_two=False)
    return TiledView(array, shape, steps, padding_mode)


@implements(ct.TiledView.num_tiles)
def _view_num_tiles(view, axis):
    axis = normalize_axis(axis, view.array.ndim)
    return scalar(-(-view.array.data.shape[axis] // view.traversal_steps[axis]), ct.int32)


@implements(ct.TiledView.load)
def _view_load(view, index, *, check_bounds=True, latency=None, allow_tma=None):
    check_hints(latency, allow_tma)
    steps, mode = view.traversal_steps, view.padding_mode
    return _load_tile(view.array, index, view.tile_shape, steps, "C", mode, check_bounds)


@implements(ct.TiledView.store)
def _view_store(view, index, tile, *, check_bounds=True, latency=None, allow_tma=None):
    check_hints(latency, allow_tma)
    if isinstance(tile, Tile):
        tile = Tile(broadcast(tile.data, view.tile_shape, "tile"), tile.dtype)
    else:
        dtypes.require_implicit_cast(tile, view.dtype, "stored tile")
        tile = Tile(operand(tile, view.dtype).expand(view.tile_shape), view.dtype)
    _store_tile(view.array, index, tile, view.traversal_steps, "C", check_bounds)


@implements(ct.Array.slice)
def _slice(array, axis, start, stop):
    axis = normalize_axis(axis, array.ndim)
    low, high = as_int(start, "start"), as_int(stop, "stop")
    extent = array.data.shape[axis]
    if not (0 <= low <= high <= extent and (low < extent or low == high)):
        raise OutOfBoundsError(f"slice [{low}, {high}) of '{array.buffer.name}' of extent {extent}")
    offset = binary("mul", start, array.strides[axis])
    if int(as_tile(offset).data) != low * array.data.stride(axis):
        raise OverflowError(
            f"slice of '{array.buffer.name}' at {low}: the offset overflows {offset.dtype.name}"
        )
    return Array(array.buffer, array.data.narrow(axis, low, high - low), array.annotation)


@implements(ct.Array.from_foreign)
def _from_foreign(pointer, shape, strides):
    extents = tuple(as_int(n, "shape") for n in shape)
    steps = tuple(as_int(n, "stride") for n in strides)
    data = pointer.data.as_strided(extents, steps, pointer.data.storage_offset())
    return Array(pointer.buffer, data, ct.ArrayAnnotation())
