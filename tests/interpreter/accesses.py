"""Accesses to arrays: whole tiles, elements by index, and atomic updates.

Blocks run one after another, so an atomic update is a plain read, computation and write.
"""

from functools import partial

import cuda.tile as ct
import torch

from . import dtypes
from .dispatch import current, implements
from .elementwise import compute
from .errors import InterpreterError
from .memory import Array, indexable
from .tile import Tile, as_int, as_tile, common_shape, operand

# The names in elementwise.py of atomic updates, None for an exchange.
ATOMICS = {ct.atomic_add: "add", ct.atomic_max: "max", ct.atomic_or: "or_", ct.atomic_xchg: None}


def _window(array: Array, index, shape):
    """The offsets of the elements that a tile covers, and the slices of the tile that they are."""
    index = index if isinstance(index, tuple) else (index,)
    offsets, covered = torch.tensor(0), []
    lies = zip(array.data.shape, array.data.stride(), strict=True)
    for i, n, (extent, stride) in zip(index, shape, lies, strict=True):
        start = as_int(i) * n
        low, high = max(start, 0), min(start + n, extent)
        if low >= high:
            raise InterpreterError(
                f"tile {tuple(map(as_int, index))} of shape {shape} lies outside"
                f" '{array.name}' of shape {tuple(array.data.shape)}"
            )
        offsets = offsets[..., None] + torch.arange(low, high) * stride
        covered.append(slice(low - start, high - start))
    return offsets, tuple(covered)


def _padding(mode, dtype) -> torch.Tensor:
    """A 0-d tensor of the value that a padding mode gives elements outside the array."""
    if mode is ct.PaddingMode.UNDETERMINED:
        return current().undefined(dtype)
    if mode is not ct.PaddingMode.ZERO:
        raise NotImplementedError(f"the interpreter does not implement {mode}")
    return dtypes.constant(0.0, dtype)


@implements(ct.load)
def _load(array, index, shape, *, padding_mode=ct.PaddingMode.UNDETERMINED, allow_tma=None):
    shape = shape if isinstance(shape, tuple) else (shape,)
    full = shape or (1,) * array.ndim
    offsets, covered = _window(array, index, full)
    values = array.load(offsets)
    if offsets.shape != full:
        padded = _padding(padding_mode, array.dtype).repeat(full)
        padded[covered] = values
        values = padded
    return Tile(values.reshape(shape), array.dtype)


@implements(ct.store)
def _store(array, index, tile, *, allow_tma=None):
    data = operand(tile, array.dtype)
    shape = tuple(data.shape) or (1,) * array.ndim
    offsets, covered = _window(array, index, shape)
    array.store(offsets, data.reshape(shape)[covered])


def _elements(array: Array, indices, mask, check_bounds: bool):
    """The indexed elements' offsets from the array's first one, and a mask of those to access."""
    indices = indices if isinstance(indices, tuple) else (indices,)
    tiles = list(map(as_tile, indices))
    shape = common_shape(*(t.shape for t in tiles))
    # The compiler also widens indices to 64 bits before it multiplies them by strides.
    offsets, inside = torch.tensor(0), torch.tensor(True)
    for tile, extent, stride in zip(tiles, array.data.shape, array.data.stride(), strict=True):
        wide = tile.data.to(torch.int64)
        inside = inside & ((wide >= 0) & (wide < extent))
        offsets = offsets + wide * stride
    offsets, inside = offsets.expand(shape), inside.expand(shape)
    if mask is not None:
        mask = as_tile(mask).data.expand(shape)
    if check_bounds:
        return offsets, inside if mask is None else inside & mask
    active = torch.ones_like(inside) if mask is None else mask
    if (active & ~inside).any():
        raise InterpreterError(f"unchecked access outside '{array.name}'")
    return offsets, active


@implements(ct.gather)
def _gather(array, indices, *, mask=None, padding_value=0, check_bounds=True):
    offsets, active = _elements(array, indices, mask, check_bounds)
    values = operand(padding_value, array.dtype).expand(offsets.shape)
    if active.all():
        return Tile(array.load(offsets), array.dtype)
    values = values.clone()
    loaded = array.load(offsets[active])
    indexable(values)[active] = indexable(loaded)
    return Tile(values, array.dtype)


@implements(ct.scatter)
def _scatter(array, indices, value, *, mask=None, check_bounds=True):
    offsets, active = _elements(array, indices, mask, check_bounds)
    values = operand(value, array.dtype).expand(offsets.shape)
    stored = indexable(values)[active].view(values.dtype)
    array.store(offsets[active], stored)


def _update(
    op: str | None,
    array,
    indices,
    update,
    *,
    check_bounds=True,
    memory_order=ct.MemoryOrder.ACQ_REL,
    memory_scope=ct.MemoryScope.DEVICE,
):
    """Update the active elements; the result is undefined at the other elements."""
    offsets, active = _elements(array, indices, None, check_bounds)

    def apply(old, new):
        return compute(op, array.dtype, old, new) if op else new

    values = operand(update, array.dtype).expand(offsets.shape)
    old = current().undefined(array.dtype).repeat(offsets.shape)
    old[active] = array.update(offsets[active], apply, values[active])
    return Tile(old, array.dtype)


for _stub, _op in ATOMICS.items():
    implements(_stub)(partial(_update, _op))
