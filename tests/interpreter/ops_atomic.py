"""Atomic operations. Blocks run one after another, so each is a plain read, compute and write."""

import cuda.tile as ct
import torch
from cuda.tile._ir.ops import (
    _ATOMIC_RMW_SPECS,
    TileAtomicCAS,
    TileAtomicRMW,
    int_float_32_64_dtypes,
)
from cuda.tile._ir.ops_utils import validate_memory_order_and_scope
from cuda.tile._stub import RawArrayMemory

from . import dtypes
from .array import Array
from .dispatch import current, implements
from .ops_gather import broadcast_value, element_offsets, raw_offsets
from .ops_math import compute
from .ops_memory import tile_window
from .tile import Tile, as_tile, loose_dtype, operand

_COMPUTE = {"and": "and_", "or": "or_"}


def _update(op: str, array: Array, value, offsets, active, order) -> Tile:
    """Update the active elements; the result is undefined at the other elements."""
    spec = _ATOMIC_RMW_SPECS[op]
    if array.dtype not in spec.supported_dtypes:
        raise ct.TileTypeError(f"atomic_{op} does not support {array.dtype}")
    if spec.bitwise and as_tile(value).dtype != array.dtype:
        raise ct.TileTypeError(f"atomic_{op} needs an update of dtype {array.dtype}")

    def apply(old, new):
        if op == "xchg":
            return new
        return compute(_COMPUTE.get(op, op), array.dtype, old, new)

    values = broadcast_value(array, value, offsets.shape, "update")
    old = current().undefined(array.dtype).repeat(offsets.shape)
    old[active] = array.buffer.update(offsets[active], apply, values[active], order=order)
    return Tile(old, array.dtype)


def _compare_and_swap(array: Array, expected, desired, offsets, active, order) -> Tile:
    if array.dtype not in int_float_32_64_dtypes:
        raise ct.TileTypeError(f"atomic_cas does not support {array.dtype}")
    old = broadcast_value(array, expected, offsets.shape, "expected value").clone()
    desired = broadcast_value(array, desired, offsets.shape, "desired value")
    old[active] = array.buffer.update(
        offsets[active],
        lambda actual, expected, new: torch.where(actual == expected, new, actual),
        old[active],
        desired[active],
        order=order,
    )
    return Tile(old, array.dtype)


@implements(ct.atomic_cas)
def _atomic_cas(
    array,
    indices,
    expected,
    desired,
    *,
    check_bounds=True,
    memory_order=ct.MemoryOrder.ACQ_REL,
    memory_scope=ct.MemoryScope.DEVICE,
):
    validate_memory_order_and_scope(memory_order, memory_scope, TileAtomicCAS)
    offsets, active = element_offsets(array, indices, None, check_bounds)
    return _compare_and_swap(array, expected, desired, offsets, active, memory_order)


@implements(RawArrayMemory.atomic_cas_offset)
def _atomic_cas_offset(
    raw,
    offset,
    expected,
    desired,
    *,
    mask=None,
    memory_order=ct.MemoryOrder.ACQ_REL,
    memory_scope=ct.MemoryScope.DEVICE,
):
    validate_memory_order_and_scope(memory_order, memory_scope, TileAtomicCAS)
    offsets, active = raw_offsets(raw, offset, mask)
    return _compare_and_swap(raw.array, expected, desired, offsets, active, memory_order)


def _view_update(op: str, view, index, value) -> None:
    array = view.array
    shape = view.tile_shape or (1,) * array.ndim
    dtypes.require_implicit_cast(loose_dtype(value), array.dtype, "update")
    data = operand(value, array.dtype).expand(shape)
    region, covered = tile_window(array, index, shape, view.traversal_steps, "C", True)
    offsets = region.read(torch.arange(array.buffer.span))
    value = value if dtypes.is_constant(value) else Tile(data[covered], array.dtype)
    active = torch.ones(offsets.shape, dtype=torch.bool)
    _update(op, array, value, offsets, active, ct.MemoryOrder.RELAXED)


def _register(op: str) -> None:
    def atomic(
        array,
        indices,
        update,
        *,
        check_bounds=True,
        memory_order=ct.MemoryOrder.ACQ_REL,
        memory_scope=ct.MemoryScope.DEVICE,
    ):
        validate_memory_order_and_scope(memory_order, memory_scope, TileAtomicRMW)
        offsets, active = element_offsets(array, indices, None, check_bounds)
        return _update(op, array, update, offsets, active, memory_order)

    def atomic_offset(
        raw,
        offset,
        update,
        *,
        mask=None,
        memory_order=ct.MemoryOrder.ACQ_REL,
        memory_scope=ct.MemoryScope.DEVICE,
    ):
        validate_memory_order_and_scope(memory_order, memory_scope, TileAtomicRMW)
        offsets, active = raw_offsets(raw, offset, mask)
        return _update(op, raw.array, update, offsets, active, memory_order)

    implements(getattr(ct, f"atomic_{op}"))(atomic)
    implements(getattr(RawArrayMemory, f"atomic_{op}_offset"))(atomic_offset)
    if op != "xchg":
        implements(getattr(ct.TiledView, f"atomic_store_{op}"))(
            lambda view, index, update: _view_update(op, view, index, update)
        )


for _op in _ATOMIC_RMW_SPECS:
    _register(_op)
