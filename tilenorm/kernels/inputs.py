"""Stage: what is normalised, and its gradients: x, x + residual, (x + addend) + residual,
x · mask · scale + residual, or x · act(gate)."""

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from .activation import activated, slope
from .opaque import opaque_zero, rematerialize
from .tiles import gather_parameter, write


@dataclass(frozen=True)
class Row:
    """What is normalised, and what else the forward pass reads by rows.

    x: segments of x, or of x + residual as rounded to the sum's dtype. gate, skip: segments, or ().
    """

    x: Any
    gate: Any
    skip: Any
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
        return Row(xs, self.gate, self.skip, self.norm, self.PACKED).values()


def inputs_of(a, norm):
    """The arrays that a forward pass reads by rows, in the order in which row_of takes tiles."""
    inputs = (a.X,)
    if norm.ADD:
        inputs += (a.RESIDUAL,)
    if norm.ADDEND:
        inputs += (a.ADDEND,)
    if norm.GATED:
        inputs += (a.GATE,)
    if norm.SKIP:
        inputs += (a.SKIP,)
    if norm.DROPOUT:
        inputs += (a.DROPOUT_MASK,)
    return inputs


def row_of(a, norm, tile, tiles, PACKED):
    """What is normalised, from the tiles of inputs_of; tile: where they lie."""
    gate = tiles[-1] if norm.GATED else ()
    skip = tiles[-1] if norm.SKIP else ()
    if not norm.ADD:
        return Row(tiles[0], gate, skip, norm, PACKED)
    xs = tiles[0]
    if norm.ADDEND:
        xs = added(xs, tiles[2], a.ADDEND.dtype)
    if norm.BRANCHES:
        xs = branch(a, norm, tile, xs, tiles[-1])
    return Row(added(xs, tiles[1], a.SUM.dtype), gate, skip, norm, PACKED)


def added(xs, others, dtype):
    """The segments of x + other, rounded to dtype."""
    totals = ()
    for j, x in ct.static_iter(enumerate(xs)):
        other = others[j].astype(ct.float32)
        totals += ((x.astype(ct.float32) + other).astype(dtype),)
    return totals


def branch(a, norm, tile, xs, masks):
    """The segments of x as they are added to the residual: x · mask · scale, rounded to x's dtype,
    and then x · layer scale, rounded again. masks: the segments of the mask, with DROPOUT."""
    zero = opaque_zero(tile.place[0])
    found = ()
    for j, x in ct.static_iter(enumerate(xs)):
        if norm.DROPOUT:
            x = dropped(x, masks[j], norm, zero)
        if norm.LAYER_SCALE:
            x = times(x, layer_scale_of(a, tile, j), zero)
        found += (x,)
    return found


def branch_gradient(a, norm, tile, j, saved, dx):
    """The gradient of x of segment j, from that of the sum: branch backwards."""
    zero = opaque_zero(tile.place[0])
    dx = dx.astype(a.DX.dtype)
    if norm.LAYER_SCALE:
        dx = times(dx, layer_scale_of(a, tile, j), zero)
    if norm.DROPOUT:
        dx = dropped(dx, saved.mask, norm, zero)
    return dx


def dropped(x, mask, norm, zero):
    return times(x, mask.astype(ct.float32) * norm.DROPOUT_SCALE, zero)


def layer_scale_of(a, tile, j):
    """The layer scale of segment j."""
    segment = tile.segments[j]
    return gather_parameter(a.LAYER_SCALE, tile, segment.cols(), segment.mask).astype(ct.float32)


def times(x, factor, zero):
    """The product, rounded to x's dtype. zero: opaque; without it the compiler would not round a
    float32 product before the next addition."""
    product = x.astype(ct.float32) * factor
    return product + zero if x.dtype == ct.float32 else product.astype(x.dtype)


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
    """What the backward pass reads of a segment: x (the sum, where a residual was added), dy, gate,
    dsum and mask, and the rows' statistics. What a constant excludes is an empty tuple."""

    x: Any
    dy: Any
    gate: Any
    dsum: Any
    mask: Any
    rstd: Any
    mean: Any

    def unpacked(self):
        """The same with x and dy in float32."""
        x, dy = self.x.astype(ct.float32), self.dy.astype(ct.float32)
        return Saved(x, dy, self.gate, self.dsum, self.mask, self.rstd, self.mean)

    def rematerialized(self, number):
        """The same with x and dy to be converted to float32 once more after `number` is known."""
        x, dy = rematerialize(self.x, number), rematerialize(self.dy, number)
        return Saved(x, dy, self.gate, self.dsum, self.mask, self.rstd, self.mean)


def saved_inputs_of(a, norm, needs):
    """The arrays that a backward pass reads by rows, and those with one number a row."""
    inputs = (a.X,) + a.DY
    if norm.GATED:
        inputs += (a.GATE,)
    if norm.DROPOUT:  # where there is no gate
        inputs += (a.DROPOUT_MASK,)
    if needs.DSUM:
        inputs += (a.DSUM,)
    return inputs, (a.RSTD, a.MEAN) if norm.LAYER else (a.RSTD,)


def saved_of(norm, needs, tiles, numbers):
    """What the backward pass reads of each segment, from the tiles of saved_inputs_of."""
    found = ()
    dys = sum_of_terms(tiles[1 : 1 + needs.TERMS])
    for j, x in ct.static_iter(enumerate(tiles[0])):
        gate = tiles[1 + needs.TERMS][j] if norm.GATED else ()
        mask = tiles[1 + needs.TERMS][j] if norm.DROPOUT else ()
        dsum = tiles[-1][j] if needs.DSUM else ()
        found += (Saved(x, dys[j], gate, dsum, mask, numbers[0], numbers[-1]),)
    return found


def sum_of_terms(terms):
    """The segments of dy: its terms are added from left to right, and each sum is rounded to their
    dtype, as autograd's own sums of gradients are."""
    totals = terms[0]
    for term in ct.static_iter(terms[1:]):
        added = ()
        for j, total in ct.static_iter(enumerate(totals)):
            more = term[j].astype(ct.float32)
            added += ((total.astype(ct.float32) + more).astype(total.dtype),)
        totals = added
    return totals


def x_hat_of(saved, norm, zero=0.0):
    """x̂ of an unpacked segment. zero: an opaque zero, where a gate comes before the norm.

    The forward pass subtracts the mean from the rounded product x · act(gate). Without the zero the
    compiler would subtract it from the exact product, and x̂ of equal products would not be 0.
    """
    x = saved.x
    if norm.GATED and norm.GATE_FIRST:
        x = x * activated(saved.gate.astype(ct.float32), norm)
        if norm.LAYER:
            x = x + zero
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
