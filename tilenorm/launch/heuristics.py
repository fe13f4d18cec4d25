"""(spec, target) -> configuration: the measured table where there is one, resources otherwise.

The resource rules are untimed. They start from what a kernel keeps in registers: about four float32
values an element of its tile in the backward pass, two in the forward pass, over the 128 threads
(4 warps) that the compiler gives a block without TMA.
"""

from ..spec import NormSpec
from .config import Backward, ColumnSum, Forward, Hints, Wide
from .target import Target
from .tuned import TABLES

# Elements of a row that a block without TMA keeps without spilling, by sums over rows, where it
# reads x and dy; half of them where it reads a third input.
GATHERED = {0: 4096, 1: 4096, 2: 2048}
# The same for a whole row in the forward pass.
FORWARD_TILE = 16384
WIDE = Wide(tile=2048, occupancy=3)


def tile_width(hidden: int) -> int:
    """The smallest power of two that holds a row."""
    return 1 << (hidden - 1).bit_length()


def forward(spec: NormSpec, target: Target) -> Forward | Wide:
    inputs = 1 + (spec.residual is not None) + (spec.gate is not None)
    found = _tabled(spec, target, "FORWARD", (spec.widest_item, inputs))
    if found:
        return found
    width = tile_width(spec.hidden)
    if width > FORWARD_TILE // inputs:
        return Wide()
    return Forward(rows=max(1, 2048 // width))


def backward(spec: NormSpec, target: Target, needs) -> Backward | Wide:
    """needs: which gradients (plan.Needs)."""
    inputs = 2 + (spec.gate is not None) + needs.dsum
    width = tile_width(spec.hidden)
    found = _tabled(spec, target, "BACKWARD", (spec.widest_item, inputs, max(1, needs.sums)))
    if found and width >= 32:  # no table has a tile for narrower rows
        return found
    gathered = GATHERED[needs.sums] * 2 // inputs
    if width <= gathered:
        rows = max(1, 2048 // width)
        return Backward((width,), rows, hints=Hints(occupancy=2))
    if width <= 8192 and target.has_tma and spec.aligned:
        return Backward((width,), tma=True, hints=Hints(1, 8))
    return WIDE


def column_sum(spec: NormSpec, target: Target) -> ColumnSum:
    """Narrow tiles while they are needed to fill the GPU: 1.5-2.5 µs from N = 256 to 16384."""
    return ColumnSum(tile=16 if spec.hidden * (spec.heads or 1) <= 4096 else 32)


def _tabled(spec: NormSpec, target: Target, direction: str, key: tuple):
    """What the table of an architecture has, if there is one, for rows of whole vectors."""
    if not spec.aligned or target.arch not in TABLES:
        return None
    table = getattr(TABLES[target.arch], direction).get(key, ())
    return next((config for largest, config in table if spec.hidden <= largest), None)
