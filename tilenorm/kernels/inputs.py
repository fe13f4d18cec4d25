"""Stage: what is normalised, and its gradients.

That is x, x + residual, (x + addend) + residual, x · mask · scale + residual, residual + gate · x
with a gate by group, or x · act(gate).
"""

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from .activation import activated, slope
from .arrays import given
from .modulation import gated_sum, modulation_of
from .opaque import opaque_zero, rematerialize
from .tiles import gather_parameter, write


@dataclass(frozen=True)
class Row:
    """What is normalised, and what else the forward pass reads by rows."""

    x: Any  # segments of x, or of x + residual, rounded to the dtype of the sum
    gate: Any  # segments, or ()
    skip: Any  # segments, or ()
    norm: Any
    PACKED: bool
    modulation: Any  # see modulation_of

    def values(self):
        """The segments that are normalised, in float32."""
        tiles = ()
        for j, x in ct.static_iter(enumerate(self.x)):
            x = x.astype(ct.float32)
            if self.norm.GATE_FIRST:
                x = x * activated(self.gate[j].astype(ct.float32), self.norm)
            tiles += (x,)
        return tiles

    def rematerialized(self, number):
        """What values() returns. If PACKED, it is converted anew, after `number` is known."""
        xs = ()
        for x in ct.static_iter(self.x):
            xs += (rematerialize(x, number) if self.PACKED else x,)
        return Row(xs, self.gate, self.skip, self.norm, self.PACKED, self.modulation).values()


def inputs_of(a):
    """The arrays that a forward pass reads by rows, in the order in which row_of takes tiles."""
    return a.X, a.RESIDUAL, a.ADDEND, a.GATE, a.SKIP, a.DROPOUT_MASK


def row_of(this, tile, tiles):
    """What is normalised, from the tiles of inputs_of; tile: where they lie."""
    x, residual, addend, gate, skip, mask = tiles
    modulation = modulation_of(this.a, tile, this.rows)
    if not given(residual):
        return Row(x, gate, skip, this.norm, this.how.PACKED, modulation)
    xs = x
    if given(addend):
        xs = added(xs, addend, this.a.ADDEND.dtype)
    if given(this.a.MOD_GATE):
        xs = gated_sum(this, tile, xs, residual)
    else:
        xs = added(branch(this, tile, xs, mask), residual, this.a.SUM.dtype)
    return Row(xs, gate, skip, this.norm, this.how.PACKED, modulation)


def added(xs, others, dtype):
    """The segments of x + other, rounded to dtype.

    The sum of two numbers of 16 bits, added in 16 bits, has the bits of their rounded float32 sum,
    and takes a third of the instructions.
    """
    totals = ()
    for j, x in ct.static_iter(enumerate(xs)):
        if ct.static_eval(x.dtype == dtype and others[j].dtype == dtype):
            totals += (x + others[j],)
        else:
            totals += (added_in_float32(x, others[j], dtype),)
    return totals


def added_in_float32(x, other, dtype):
    other = other.astype(ct.float32)
    return (x.astype(ct.float32) + other).astype(dtype)


def branch(this, tile, xs, masks):
    """The segments of x as they are added to the residual.

    That is x · mask · scale, rounded to x's dtype, and this times the layer scale, rounded again.
    """
    zero = opaque_zero(tile.place[0])
    tiles = ()
    for j, x in ct.static_iter(enumerate(xs)):
        if given(masks):
            x = dropped(x, masks[j], this.norm, zero)
        if given(this.a.LAYER_SCALE):
            x = times(x, layer_scale_of(this.a, tile, j), zero)
        tiles += (x,)
    return tiles


def branch_gradient(this, tile, j, saved, dx):
    """The gradient of x in segment j, from dx, the gradient of the sum: `branch` backwards."""
    a = this.a
    zero = opaque_zero(tile.place[0])
    if given(a.LAYER_SCALE) or given(saved.mask):
        dx = dx.astype(a.DX.dtype)
    if given(a.LAYER_SCALE):
        dx = times(dx, layer_scale_of(a, tile, j), zero)
    if given(saved.mask):
        dx = dropped(dx, saved.mask, this.norm, zero)
    return dx


def dropped(x, mask, norm, zero):
    return times(x, mask.astype(ct.float32) * norm.DROPOUT_SCALE, zero)


def layer_scale_of(a, tile, j):
    """The layer scale of segment j."""
    segment = tile.segments[j]
    return gather_parameter(a.LAYER_SCALE, tile, segment.cols(), segment.mask).astype(ct.float32)


def times(x, factor, zero):
    """The product, rounded to x's dtype.

    zero: an opaque zero. Without it the compiler would not round a float32 product before the next
    addition.
    """
    product = x.astype(ct.float32) * factor
    return product + zero if x.dtype == ct.float32 else product.astype(x.dtype)


def is_exact(a):
    """Whether an input has more than 16 bits, so that a mean needs its correction."""
    return a.X.dtype == ct.float32 or (given(a.SUM) and a.SUM.dtype == ct.float32)


def write_sum(this, tile, row):
    """Write x + residual, which the next layer and the backward pass read."""
    if given(this.a.SUM):
        for j, x in ct.static_iter(enumerate(row.x)):
            write(this.a.SUM, tile.at(j), x, this.how.STORE)


@dataclass(frozen=True)
class Saved:
    """What the backward pass reads of a segment. What is absent is an empty tuple."""

    x: Any  # the sum, where a residual was added
    dy: Any
    gate: Any
    mask: Any  # the dropout mask
    dsum: Any  # the gradient of the sum
    rstd: Any  # the statistics of the rows
    mean: Any

    def unpacked(self):
        """The same with x and dy in float32."""
        x, dy = self.x.astype(ct.float32), self.dy.astype(ct.float32)
        return Saved(x, dy, self.gate, self.mask, self.dsum, self.rstd, self.mean)

    def rematerialized(self, number):
        """The same. x and dy will be converted to float32 anew, after `number` is known."""
        x, dy = rematerialize(self.x, number), rematerialize(self.dy, number)
        return Saved(x, dy, self.gate, self.mask, self.dsum, self.rstd, self.mean)


def saved_inputs_of(a):
    """The arrays that a backward pass reads by rows, in the order in which saved_of takes tiles."""
    return (a.X,) + a.DY + (a.GATE, a.DROPOUT_MASK, a.DSUM)


def saved_of(tiles, numbers):
    """What the backward pass reads of each segment, from the tiles of saved_inputs_of.

    numbers: a tuple of numbers for each row. The first is rstd, and the last is the mean.
    """
    dys = sum_of_terms(tiles[1:-3])
    segments = ()
    for j, x in ct.static_iter(enumerate(tiles[0])):
        gate, mask = segment_of(tiles[-3], j), segment_of(tiles[-2], j)
        dsum = segment_of(tiles[-1], j)
        segments += (Saved(x, dys[j], gate, mask, dsum, numbers[0], numbers[-1]),)
    return segments


def segment_of(tiles, j):
    """Segment j, or () where an array is absent."""
    return tiles[j] if len(tiles) > 0 else ()


def sum_of_terms(terms):
    """The segments of dy, which is the sum of its terms.

    Terms are added from left to right. Each sum is rounded to their dtype, as autograd rounds its
    own sums of gradients. Added in 16 bits, as in `added`, some kernels would spill 16 bytes more.
    """
    total = terms[0]
    for term in ct.static_iter(terms[1:]):
        sums = ()
        for j, x in ct.static_iter(enumerate(total)):
            sums += (added_in_float32(x, term[j], x.dtype),)
        total = sums
    return total


def x_hat_of(saved, norm, zero=0.0):
    """x̂ of an unpacked segment. zero: an opaque zero, where a gate comes before the norm.

    The forward pass subtracts the mean from the rounded product x · act(gate). Without the zero the
    compiler would subtract it from the exact product, and x̂ of equal products would not be 0.
    """
    x = saved.x
    if norm.GATE_FIRST:
        x = x * activated(saved.gate.astype(ct.float32), norm)
        if norm.LAYER:
            x = x + zero
    return (x - saved.mean) * saved.rstd if norm.LAYER else x * saved.rstd


def input_gradient(this, at, saved, dx):
    """The gradient of the input, from dx, the gradient of the row that is normalised.

    It adds the gradient of the sum. It also writes the gradient of a gate that comes before the
    norm.
    """
    if this.norm.GATE_FIRST:
        gate = saved.gate.astype(ct.float32)
        if given(this.a.DGATE):
            dgate = dx * saved.x.astype(ct.float32) * slope(gate, this.norm)
            write(this.a.DGATE, at, dgate, this.how.STORE)
        dx = dx * activated(gate, this.norm)
    if given(saved.dsum):
        dx = dx + saved.dsum.astype(ct.float32)
    return dx
