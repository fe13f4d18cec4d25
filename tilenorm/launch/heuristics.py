"""(spec, target) -> configuration: the measured table where there is one, resources otherwise.

The resource rules are untimed. They start from what a kernel keeps in registers: about four float32
values an element of its tile in the backward pass, two in the forward pass, over the 128 threads
(4 warps) that the compiler gives a block without TMA.
"""

from ..spec import NormSpec
from .config import Backward, ColumnSum, Forward, Hints, Wide
from .target import Target
from .tuned import TABLES

# A block without TMA keeps at most this many elements of a row without spilling.
GATHER_BACKWARD = 4096
# What rows whose starts are not on 16 bytes can hold: element-wise loads take more addresses.
UNALIGNED_FORWARD = 16384


def tile_width(hidden: int) -> int:
    """The smallest power of two that holds a row."""
    return 1 << (hidden - 1).bit_length()


def forward(spec: NormSpec, target: Target) -> Forward | Wide:
    width = tile_width(spec.hidden)
    if not spec.aligned:
        if width > UNALIGNED_FORWARD:
            return Wide()
        return Forward(rows=max(1, 2048 // width))
    if target.arch in TABLES:
        table = TABLES[target.arch].FORWARD[spec.item_bytes]
        return _first(table, spec.hidden) or Wide()
    if width > 16384:
        return Wide()
    return Forward(rows=max(1, 2048 // width))


def backward(spec: NormSpec, target: Target) -> Backward | Wide:
    width = tile_width(spec.hidden)
    if spec.aligned and target.arch in TABLES:
        table = TABLES[target.arch].BACKWARD[spec.item_bytes]
        return _first(table, spec.hidden) or Wide()
    if width <= GATHER_BACKWARD:
        rows = max(1, min(64, 2048 // width))
        return Backward((width,), rows, hints=Hints(occupancy=2 if width == 4096 else 3))
    if width <= 8192 and target.has_tma and spec.aligned:
        return Backward((width,), tma=True, hints=Hints(1, 8))
    return Wide()


def column_sum(spec: NormSpec, target: Target) -> ColumnSum:
    """Narrow tiles while they are needed to fill the GPU: 1.5-2.5 µs from N = 256 to 16384."""
    return ColumnSum(tile=16 if spec.hidden <= 4096 else 32)


def _first(table, hidden: int):
    return next((config for largest, config in table if hidden <= largest), None)
