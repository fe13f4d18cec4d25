"""(spec, target) -> configuration: the measured table where there is one, resources otherwise.

The resource rules are untimed. They start from what a kernel keeps in registers: about four float32
values an element of its tile in the backward pass, two in the forward pass, over the 128 threads
(4 warps) that the compiler gives a block without TMA.
"""

from ..spec import NormSpec
from .config import Backward, ColumnSum, Forward, Hints, Wide
from .target import Target
from .tuned import TABLES

# Elements of a row that a block without TMA keeps without spilling, by sums over rows.
GATHERED = {0: 4096, 1: 4096, 2: 2048}
# The same for a whole row in the forward pass.
FORWARD_TILE = 16384
WIDE = Wide(tile=2048, occupancy=3)


def tile_width(hidden: int) -> int:
    """The smallest power of two that holds a row."""
    return 1 << (hidden - 1).bit_length()


def forward(spec: NormSpec, target: Target) -> Forward | Wide:
    if spec.aligned and target.arch in TABLES:
        return _first(TABLES[target.arch].FORWARD[spec.item_bytes], spec.hidden)
    width = tile_width(spec.hidden)
    if width > FORWARD_TILE:
        return Wide()
    return Forward(rows=max(1, 2048 // width))


def backward(spec: NormSpec, target: Target, sums: int) -> Backward | Wide:
    """sums: how many sums over rows are needed."""
    if spec.aligned and target.arch in TABLES and spec.hidden >= 32:
        return _first(TABLES[target.arch].BACKWARD[spec.item_bytes, max(1, sums)], spec.hidden)
    width = tile_width(spec.hidden)
    if width <= GATHERED[sums]:
        rows = max(1, 2048 // width)
        return Backward((width,), rows, hints=Hints(occupancy=2))
    if width <= 8192 and target.has_tma and spec.aligned:
        return Backward((width,), tma=True, hints=Hints(1, 8))
    return WIDE


def column_sum(spec: NormSpec, target: Target) -> ColumnSum:
    """Narrow tiles while they are needed to fill the GPU: 1.5-2.5 µs from N = 256 to 16384."""
    return ColumnSum(tile=16 if spec.hidden <= 4096 else 32)


def _first(table, hidden: int):
    return next(config for largest, config in table if hidden <= largest)
