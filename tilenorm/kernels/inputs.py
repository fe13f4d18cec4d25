"""Stage: what is normalised, and its gradients: x, x + residual, or x · act(gate)."""

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from .activation import activated, slope
from .opaque import rematerialize
from .tiles import write


@dataclass(frozen=True)
class Row:
    """What is normalised, and the gate.

    x: segments of x, or of x + residual as rounded to the sum's dtype. gate: segments, or ().
    """

    x: Any
    gate: Any
    norm: Any
    PACKED: bool

    def values(self):
        """The segments that are normalised, in float32."""
        found = ()
        for j, x in ct.static_iter(enumerate(self.x)):
            x = x.astype(ct.float32)
            if self.norm.GATED and self.norm.GATE_FIRST:
                x = x * activated(self.gate[j].astype(ct.float32), self.norm)
            found += (x,)
        return found

    def rematerialized(self, number):
        """The same, converted to float32 once more if PACKED, after `number` is known."""
        xs = ()
        for x in ct.static_iter(self.x):
            xs += (rematerialize(x, number) if self.PACKED else x,)
        return Row(xs, self.gate, self.norm, self.PACKED).values()


def inputs_of(a, norm):
    """The arrays that a forward pass reads by rows, in the order in which row_of takes tiles."""
    inputs = (a.X,)
    if norm.ADD:
        inputs += (a.RESIDUAL,)
    if norm.GATED:
        inputs += (a.GATE,)
    return inputs


def row_of(a, norm, tiles, PACKED):
    """What is normalised, from the tiles of inputs_of."""
    gate = tiles[-1] if norm.GATED else ()
    if not norm.ADD:
        return Row(tiles[0], gate, norm, PACKED)
    totals = ()
    for j, x in ct.static_iter(enumerate(tiles[0])):
        residual = tiles[1][j].astype(ct.float32)
        totals += ((x.astype(ct.float32) + residual).astype(a.SUM.dtype),)
    return Row(totals, gate, norm, PACKED)


def is_exact(a, norm):
    """Whether an input has more than 16 bits, so that a mean needs its correction."""
    return a.X.dtype == ct.float32 or (norm.ADD and a.SUM.dtype == ct.float32)


def write_sum(a, norm, tile, row, STORE):
    """Write x + residual, which the next layer and the backward pass read."""
    if norm.ADD:
        for j, x in ct.static_iter(enumerate(row.x)):
            write(a.SUM, tile.at(j), x, STORE)


@dataclass(frozen=True)
class Saved:
    """What the backward pass reads of a segment: x (the sum, where a residual was added), dy, gate
    and dsum, and the rows' statistics. What a constant excludes is an empty tuple."""

    x: Any
    dy: Any
    gate: Any
    dsum: Any
    rstd: Any
    mean: Any

    def unpacked(self):
        """The same with x and dy in float32."""
        x, dy = self.x.astype(ct.float32), self.dy.astype(ct.float32)
        return Saved(x, dy, self.gate, self.dsum, self.rstd, self.mean)

    def rematerialized(self, number):
        """The same with x and dy to be converted to float32 once more after `number` is known."""
        x, dy = rematerialize(self.x, number), rematerialize(self.dy, number)
        return Saved(x, dy, self.gate, self.dsum, self.rstd, self.mean)


def saved_inputs_of(a, norm, needs):
    """The arrays that a backward pass reads by rows, and those with one number a row."""
    inputs = (a.X, a.DY)
    if norm.GATED:
        inputs += (a.GATE,)
    if needs.DSUM:
        inputs += (a.DSUM,)
    return inputs, (a.RSTD, a.MEAN) if norm.LAYER else (a.RSTD,)


def saved_of(norm, needs, tiles, numbers):
    """What the backward pass reads of each segment, from the tiles of saved_inputs_of."""
    found = ()
    for j, x in ct.static_iter(enumerate(tiles[0])):
        gate = tiles[2][j] if norm.GATED else ()
        dsum = tiles[-1][j] if needs.DSUM else ()
        found += (Saved(x, tiles[1][j], gate, dsum, numbers[0], numbers[-1]),)
    return found


def x_hat_of(saved, norm):
    """x̂ of an unpacked segment."""
    x = saved.x
    if norm.GATED and norm.GATE_FIRST:
        x = x * activated(saved.gate.astype(ct.float32), norm)
    return (x - saved.mean) * saved.rstd if norm.LAYER else x * saved.rstd


def input_gradient(a, norm, needs, at, saved, dx, STORE):
    """The gradient of the input, from that of the row that is normalised.

    Writes the gradient of a gate before the norm, and adds the gradient of the sum.
    """
    if norm.GATED and norm.GATE_FIRST:
        gate = saved.gate.astype(ct.float32)
        if needs.DGATE:
            dgate = dx * saved.x.astype(ct.float32) * slope(gate, norm)
            write(a.DGATE, at, dgate, STORE)
        dx = dx * activated(gate, norm)
    if needs.DSUM:
        dx = dx + saved.dsum.astype(ct.float32)
    return dx
