"""The backward pass of rows that are modulated by group (modulation.py).

Two sums over the rows of a group suffice: A = Σ dy · x̂ and B = Σ dy, as in a plain backward pass.
Then dscale = w · A + b · B and dshift = B. The sums over all groups are dW = Σ (1 + scale) · A and
dB = Σ (1 + scale) · B. The gradient that goes through the norm is g = dy · (1 + scale) · w. Where a
gate by group has multiplied x, its gradient is C = Σ ds · x. There ds is the gradient of the sum.

A block walks over a contiguous span of tiles, each with rows of one group, and keeps
(1 + scale) · w of the group in registers.
"""

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from .arrays import BackwardArrays, given
from .backward import add_up, write_dx, zeros
from .constants import Constants, Grouped, How, Norm
from .inputs import input_gradient, saved_inputs_of, saved_of
from .opaque import opaque_zero
from .outputs import scale as with_offset
from .statistics import Order
from .tiles import Cut, Tile, columns, gather_numbers, gather_parameter, gather_tiles
from .turns import take_turn


@ct.kernel
def group_backward(
    ARRAYS: tuple,
    rows: int,
    NORM: Constants[Norm],
    CUT: Constants[Cut],
    HOW: Constants[How],
    SUMS: Constants[Grouped],
):
    """The formula of norm_backward with g = dy · (1 + scale) · (w + offset), and sums by group.

    With a gate by group, ds is the gradient of the sum, dresidual = ds, and dx = gate · ds.

    The tiles are split into spans of consecutive tiles, one for each block. The numbers of tiles of
    two spans differ by at most one. Block b writes its sums of group g to slot b + g. From tile to
    tile b and g only grow. So each pair (b, g) has a slot of its own, and the slots of a group
    follow each other. There are blocks + groups − 1 slots. With SUMS.WHOLE a span has whole groups,
    and the block writes their gradients itself.
    """
    this, sums = pass_of(ARRAYS, rows, NORM, CUT, HOW, SUMS), Grouped(*SUMS)
    cut, first, end = this.cut, this.first, this.end
    dws = zeros_of_row(cut) if sums.DW else ()
    dbs = zeros_of_row(cut) if sums.DB else ()
    take_turn(this.how.OVERLAP)
    ahead = this.gather(first)
    for group in range(first // this.per, ct.cdiv(end, this.per)):
        factors, gates = this.factors(group), this.gates(group)
        a_sums = zeros(cut) if sums.A else ()
        b_sums = zeros(cut) if sums.B else ()
        c_sums = zeros(cut) if sums.C else ()
        start = group * this.per
        for i in range(ct.maximum(first, start), ct.minimum(end, start + this.per)):
            tiles, numbers, inputs = ahead
            ahead = this.gather(ct.minimum(i + 1, end - 1))  # perhaps of the next group
            row = saved_of(tiles, numbers)
            pairs, dots, a_sums, b_sums = add_up(this, row, factors, i, a_sums, b_sums)
            if this.THROUGH:
                c_sums = write_gradients(this, i, row, pairs, dots, gates, inputs, c_sums)
        totals = of_one_row(a_sums), of_one_row(b_sums), of_one_row(c_sums)
        if sums.WHOLE:
            write_group(this, group, totals)
        else:
            write_slots(this, group, totals)
        dws = plus_weighted(this, group, dws, totals[0])
        dbs = plus_weighted(this, group, dbs, totals[1])
    if sums.DW:
        write_row(this, this.a.PARTIALS, this.b, dws)
    if sums.DB:
        write_row(this, this.a.PARTIALS, this.b + (this.blocks if sums.DW else 0), dbs)


@dataclass(frozen=True)
class Factors:
    """(1 + scale) · (w + offset) of a group, by segments, in float32, in the place of Weights."""

    kept: Any

    def times(self, tile, j, number):
        return tile * self.kept[j]


@dataclass(frozen=True)
class GroupPass:
    """A backward pass by group, with the fields of backward.Pass that add_up reads."""

    a: BackwardArrays
    norm: Norm
    cut: Cut
    how: How
    order: Any
    THROUGH: bool
    home: Any  # a tile with the columns of a row
    tokens: Any  # how many rows a group has
    per: Any  # how many tiles a group has
    b: Any  # the number of this block
    blocks: Any  # how many blocks there are
    first: Any  # the first tile of the block's span
    end: Any  # the tile behind the last one of the span

    def tile(self, i):
        """Tile i: rows of one group. The last tile of a group may have fewer than the others."""
        ROWS, group = self.cut.ROWS, i // self.per
        row = (i - group * self.per) * ROWS + ct.arange(ROWS, dtype=ct.int32)[:, None]
        mask = None if ROWS == 1 else row < self.tokens
        return Tile((group * self.tokens + row,), mask, 0, self.home.segments)

    def gather(self, i):
        """The tiles of the inputs, the numbers of the rows, and the tile of x before the gate."""
        a, tile = self.a, self.tile(i)
        tiles = gather_tiles(saved_inputs_of(a), self.cut, tile)
        inputs = gather_tiles((a.INPUT,), self.cut, tile)[0]
        return tiles, gather_numbers((a.RSTD, a.MEAN), tile), inputs

    def factors(self, group):
        products = ()
        scales = self.scales(group)  # static_iter takes no call of a tile function
        for j, factor in ct.static_iter(enumerate(scales)):
            products += (factor * self.weight(j) if given(self.a.W) else factor,)
        return Factors(products)

    def scales(self, group):
        """1 + scale of a group, by segments."""
        factors = ()
        scales = self.of_group(self.a.MOD_SCALE, group)
        for scale in ct.static_iter(scales):
            factors += (1.0 + scale,)
        return factors

    def gates(self, group):
        return self.of_group(self.a.MOD_GATE, group) if given(self.a.MOD_GATE) else ()

    def of_group(self, P, group):
        """The row of a group, by segments, in float32."""
        tiles = ()
        for segment in ct.static_iter(self.home.segments):
            index = (group, segment.cols())
            tile = ct.gather(P, index, mask=segment.mask, check_bounds=False)
            tiles += (tile.astype(ct.float32),)
        return tiles

    def weight(self, j):
        """w + offset of segment j."""
        return with_offset(self.parameter(self.a.W, j), self.norm.OFFSET)

    def parameter(self, W, j):
        segment = self.home.segments[j]
        return gather_parameter(W, self.home, segment.cols(), segment.mask).astype(ct.float32)


def pass_of(ARRAYS, rows, NORM, CUT, HOW, SUMS):
    """The pass of a kernel with these parameters."""
    a, cut, sums = BackwardArrays(*ARRAYS), Cut(*CUT), Grouped(*SUMS)
    # The compiler may copy the inner loop, and would choose another order in each copy.
    order = Order(opaque_zero(rows), SETTLED=True, FUSED=True)
    through = given(a.DX) or given(a.DRESIDUAL) or sums.C
    groups = a.MOD_SCALE.shape[0]
    tokens = rows // groups
    per = ct.cdiv(tokens, cut.ROWS)
    b, blocks = ct.bid(0), ct.num_blocks(0)
    first, end = span(b, blocks, groups if sums.WHOLE else groups * per)
    if sums.WHOLE:
        first, end = first * per, end * per
    where = cut.home(a.X, 0, 0), tokens, per, b, blocks, first, end
    return GroupPass(a, Norm(*NORM), cut, How(*HOW), order, through, *where)


def span(b, blocks, total):
    """Where the span of block b begins and ends, of `total` tiles or groups.

    A span has total // blocks of them, or one more.
    """
    size, rest = total // blocks, total % blocks
    first = b * size + ct.minimum(b, rest)
    return first, first + size + ct.where(b < rest, 1, 0)


def block_of(i, blocks, total):
    """The block whose span has i."""
    size, rest = total // blocks, total % blocks
    longer = rest * (size + 1)
    return ct.where(i < longer, i // (size + 1), rest + (i - longer) // size)


def write_gradients(this, i, row, pairs, dots, gates, inputs, c_sums):
    """Write dx and dresidual. Returns the sums of ds · x so far."""
    tile, sums = this.tile(i), ()
    for j, saved in ct.static_iter(enumerate(row)):
        at = tile.at(j)
        x_hat, g = pairs[j]
        LAYER, order = this.norm.LAYER, this.order
        ds = dots.through_norm(x_hat, g, saved.rstd, this.cut.N, LAYER, order)
        ds = input_gradient(this, at, saved, ds)
        if len(c_sums) > 0:
            sums += (c_sums[j] + ds * inputs[j].astype(ct.float32),)
        write_dx(this, at, ds * gates[j] if len(gates) > 0 else ds, ds)
    return sums


def zeros_of_row(cut):
    tiles = ()
    for width in ct.static_iter(cut.WIDTHS):
        tiles += (ct.zeros((1, width), dtype=ct.float32),)
    return tiles


def of_one_row(tiles):
    """The sums over the rows of tiles."""
    rows = ()
    for tile in ct.static_iter(tiles):
        rows += (ct.sum(tile, axis=0, keepdims=True) if tile.shape[0] > 1 else tile,)
    return rows


def plus_weighted(this, group, totals, sums):
    """The totals of (1 + scale) · sum over the groups, and this group added; () of no totals."""
    updated = ()
    if len(totals) > 0:
        scales = this.scales(group)
        for j, total in ct.static_iter(enumerate(totals)):
            updated += (total + scales[j] * sums[j],)
    return updated


def write_slots(this, group, sums):
    """Write A, B and C, as far as they are needed, to the block's slot of the group."""
    slots, slot = this.blocks + this.a.MOD_SCALE.shape[0] - 1, this.b + group
    for tiles in ct.static_iter(sums):
        if len(tiles) > 0:
            write_row(this, this.a.GROUP_SUMS, slot, tiles)
            slot = slot + slots


def write_group(this, group, sums):
    """Write the gradients by group, from A, B and C of the whole group."""
    a = this.a
    a_sums, b_sums, c_sums = sums
    if given(a.DSCALE):
        scales = ()
        for j, total in ct.static_iter(enumerate(a_sums)):
            if given(a.W):
                total = total * this.weight(j)
            if given(a.B):
                total = total + b_sums[j] * this.parameter(a.B, j)
            scales += (total,)
        write_row(this, a.DSCALE, group, scales)
    if given(a.DSHIFT):
        write_row(this, a.DSHIFT, group, b_sums)
    if given(a.DMOD_GATE):
        write_row(this, a.DMOD_GATE, group, c_sums)


def write_row(this, P, row, tiles):
    """Write the segments of a row of P."""
    for j, segment in ct.static_iter(enumerate(this.home.segments)):
        values = tiles[j].astype(P.dtype)
        ct.scatter(P, (row, segment.cols()), values, mask=segment.mask, check_bounds=False)


@ct.kernel
def group_sum(
    ARRAYS: tuple,
    rows: int,
    blocks: int,
    NORM: Constants[Norm],
    SUMS: Constants[Grouped],
    ROWS: ct.Constant[int],
    TILE_ROWS: ct.Constant[int],
    TILE: ct.Constant[int],
    OVERLAP: ct.Constant[bool],
):
    """The gradients of group bid(1), from the sums that the blocks of group_backward have left.

    dscale = (w + offset) · A + b · B, dshift = B and dgate = C, added up in one fixed order.
    blocks: how many blocks group_backward had. ROWS: how many rows its tiles had. OVERLAP: see
    take_turn.
    """
    a, norm, sums = BackwardArrays(*ARRAYS), Norm(*NORM), Grouped(*SUMS)
    take_turn(OVERLAP)
    group, groups = ct.bid(1), a.MOD_SCALE.shape[0]
    per = ct.cdiv(rows // groups, ROWS)
    first = block_of(group * per, blocks, per * groups)
    count = block_of(group * per + per - 1, blocks, per * groups) + 1 - first
    first = first + group
    cols = columns(ct.bid(0) * TILE, TILE)
    totals = ()
    for ASKED in ct.static_iter((sums.A, sums.B, sums.C)):
        totals += (ct.zeros((TILE_ROWS, TILE), dtype=ct.float32) if ASKED else (),)
    for i in range(ct.cdiv(count, TILE_ROWS)):
        row = i * TILE_ROWS + ct.arange(TILE_ROWS, dtype=ct.int32)[:, None]
        slot, added = first, ()
        for total in ct.static_iter(totals):
            if given(total):
                total = total + ct.gather(a.GROUP_SUMS, (slot + row, cols), mask=row < count)
                slot = slot + blocks + groups - 1
            added += (total,)
        totals = added
    merged = ()
    for total in ct.static_iter(totals):
        merged += (ct.sum(total, axis=0, keepdims=True) if given(total) else (),)
    if given(a.DSCALE):
        dscale = merged[0]
        if given(a.W):
            dscale = dscale * with_offset(ct.gather(a.W, (cols,)), norm.OFFSET)
        if given(a.B):
            dscale = dscale + merged[1] * ct.gather(a.B, (cols,)).astype(ct.float32)
        ct.scatter(a.DSCALE, (group, cols), dscale.astype(a.DSCALE.dtype))
    if given(a.DSHIFT):
        ct.scatter(a.DSHIFT, (group, cols), merged[1].astype(a.DSHIFT.dtype))
    if given(a.DMOD_GATE):
        ct.scatter(a.DMOD_GATE, (group, cols), merged[2].astype(a.DMOD_GATE.dtype))
