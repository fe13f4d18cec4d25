"""Element accesses by index or by offset: gather, scatter, raw memory, advanced indexing."""

import cuda.tile as ct
import torch
from cuda.tile._stub import RawArrayMemory

from . import dtypes
from .array import Array, RawMemory
from .dispatch import current, implements
from .dtypes import is_boolean, is_integral
from .errors import OutOfBoundsError
from .memory import Scattered, indexable
from .ops_memory import check_hints, padding_of
from .tile import (
    Tile,
    as_int,
    as_tile,
    broadcast,
    common_shape,
    constant_shape,
    loose_dtype,
    operand,
)


def element_offsets(array: Array, indices, mask, check_bounds: bool):
    """The indexed elements' offsets from the buffer's base, and a mask of those to access."""
    indices = indices if isinstance(indices, tuple) else (indices,)
    if len(indices) != array.ndim:
        raise ct.TileTypeError(f"{len(indices)} indices do not match the rank {array.ndim}")
    tiles = [as_tile(i, "index") for i in indices]
    for tile in tiles:
        if not is_integral(tile.dtype):
            raise ct.TileTypeError(f"an index must be an integer, got {tile.describe()}")
    shape = common_shape(*(t.shape for t in tiles))
    # The compiler also widens indices to 64 bits before it multiplies them by strides.
    offsets = torch.tensor(array.data.storage_offset() - array.buffer.base)
    inside = torch.tensor(True)
    for tile, extent, stride in zip(tiles, array.data.shape, array.data.stride(), strict=True):
        wide = tile.data.to(torch.int64)
        inside = inside & ((wide >= 0) & (wide < extent))
        offsets = offsets + wide * stride
    return offsets.expand(shape), _active(array, mask, inside.expand(shape), check_bounds)


def _active(array: Array, mask, inside: torch.Tensor, check_bounds: bool) -> torch.Tensor:
    """A mask of the elements to access: inside the array and selected by the kernel's mask."""
    if mask is not None:
        mask = as_tile(mask, "mask")
        if not is_boolean(mask.dtype):
            raise ct.TileTypeError(f"mask must be boolean, got {mask.describe()}")
        mask = broadcast(mask.data, tuple(inside.shape), "mask")
    if check_bounds:
        return inside if mask is None else inside & mask
    active = torch.ones_like(inside) if mask is None else mask
    if (active & ~inside).any():
        raise OutOfBoundsError(f"unchecked access outside '{array.buffer.name}'")
    return active


def raw_offsets(raw: RawMemory, offset, mask):
    """Like element_offsets(), for offsets from an array's base pointer."""
    tile = as_tile(offset, "offset")
    if not is_integral(tile.dtype):
        raise ct.TileTypeError(f"an offset must be an integer, got {tile.describe()}")
    buffer = raw.array.buffer
    offsets = tile.data.to(torch.int64) + (raw.array.data.storage_offset() - buffer.base)
    inside = (offsets >= 0) & (offsets < buffer.span)
    return offsets, _active(raw.array, mask, inside, check_bounds=False)


def broadcast_value(array: Array, value, shape, name: str) -> torch.Tensor:
    """A value cast to the array's dtype by the compiler's rules, and broadcast to a shape."""
    dtypes.require_implicit_cast(loose_dtype(value), array.dtype, name)
    return broadcast(operand(value, array.dtype), tuple(shape), name)


def _load_elements(array: Array, offsets, active, padding: torch.Tensor) -> Tile:
    if active.all():
        return Tile(array.buffer.load(Scattered(offsets)), array.dtype)
    values = padding.expand(offsets.shape).clone()
    loaded = array.buffer.load(Scattered(offsets[active]))
    indexable(values)[active] = indexable(loaded)
    return Tile(values, array.dtype)


def _store_elements(array: Array, offsets, active, values: torch.Tensor) -> None:
    values = values.expand(offsets.shape)
    stored = indexable(values)[active].view(values.dtype)
    array.buffer.store(Scattered(offsets[active]), stored)


@implements(ct.gather)
def _gather(array, indices, *, mask=None, padding_value=0, check_bounds=True, latency=None):
    check_hints(latency, None)
    offsets, active = element_offsets(array, indices, mask, check_bounds)
    padding = broadcast_value(array, padding_value, offsets.shape, "padding value")
    return _load_elements(array, offsets, active, padding)


@implements(ct.scatter)
def _scatter(array, indices, value, *, mask=None, check_bounds=True, latency=None):
    check_hints(latency, None)
    offsets, active = element_offsets(array, indices, mask, check_bounds)
    _store_elements(array, offsets, active, broadcast_value(array, value, offsets.shape, "value"))


@implements(ct.Array.get_raw_memory)
def _get_raw_memory(array):
    return RawMemory(array)


@implements(RawArrayMemory.load_offset)
def _load_offset(raw, offset, *, mask=None, padding_value=0, latency=None):
    offsets, active = raw_offsets(raw, offset, mask)
    if padding_value is None:
        padding = current().undefined(raw.dtype)
    else:
        padding = broadcast_value(raw.array, padding_value, offsets.shape, "padding value")
    return _load_elements(raw.array, offsets, active, padding)


@implements(RawArrayMemory.store_offset)
def _store_offset(raw, offset, value, *, mask=None, latency=None):
    offsets, active = raw_offsets(raw, offset, mask)
    _store_elements(
        raw.array, offsets, active, broadcast_value(raw.array, value, offsets.shape, "value")
    )


@implements(ct.Slice.__init__)
def _slice_index(self, start, length):
    self.start, self.length = start, length


def _advanced_offsets(array: Array, indices):
    """Like element_offsets(), for one tile of indices and ct.Slice in the other dimensions."""
    if array.ndim < 2 or len(indices) != array.ndim:
        raise ct.TileTypeError(
            "advanced indexing needs two or more dimensions and one index for each"
        )
    if sum(isinstance(i, Tile) for i in indices) != 1:
        raise ct.TileTypeError("exactly one index must be a 1-D integer tile")
    parts = []
    for dim, index in enumerate(indices):
        if isinstance(index, Tile):
            if index.ndim != 1:
                raise ct.TileTypeError(f"the sparse index must be 1-D, got {index.describe()}")
            positions = index.data.to(torch.int64)
        else:
            [length] = constant_shape(index.length, "ct.Slice")
            positions = as_int(index.start, "start of ct.Slice") + torch.arange(length)
        parts.append(positions.reshape([-1 if d == dim else 1 for d in range(array.ndim)]))
    offsets, active = element_offsets(array, tuple(Tile(p, ct.int64) for p in parts), None, True)
    if not active.any():
        raise OutOfBoundsError(f"the tile lies outside '{array.buffer.name}'")
    return offsets, active


@implements(ct.load_advanced_indexing)
def _load_advanced(
    array, indices, *, padding_mode=ct.PaddingMode.UNDETERMINED, latency=None, allow_tma=None
):
    check_hints(latency, allow_tma)
    offsets, active = _advanced_offsets(array, indices)
    return _load_elements(array, offsets, active, padding_of(padding_mode, array.dtype))


@implements(ct.store_advanced_indexing)
def _store_advanced(array, indices, tile, *, latency=None, allow_tma=None):
    check_hints(latency, allow_tma)
    offsets, active = _advanced_offsets(array, indices)
    if as_tile(tile).shape != tuple(offsets.shape):
        raise ct.TileTypeError(f"a tile of shape {as_tile(tile).shape} does not match the indices")
    _store_elements(array, offsets, active, broadcast_value(array, tile, offsets.shape, "tile"))
