"""The backward pass of heads that are normalised and then rotated (rotation.py)."""

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from .arrays import HeadsBack, RopeBackwardArrays, given
from .constants import Constants, How, Norm, Rope
from .rotation import Rotary, couples_of
from .statistics import fused_add
from .turns import take_turn


@ct.kernel
def rope_backward(
    ARRAYS: tuple,
    batches: int,
    tokens: int,
    NORM: Constants[Norm],
    ROPE: Constants[Rope],
    HOW: Constants[How],
    DW: ct.Constant[bool],
    KEY_DW: ct.Constant[bool],
):
    """dx = rstd · (g − x̂ · mean(g · x̂)), g = a · (w + offset), x̂ = x · rstd, with
    (a1, a2) = (dy1 · cos + dy2 · sin', dy2 · cos' − dy1 · sin); the mean is over a head, or over
    all heads of a token. dW = Σ a · x̂ over tokens, and over heads that share a weight.

    Block b takes item b, and then every item that is a multiple of the grid's size further on: an
    item is a group of heads for a tile of tokens of a sequence, or all heads of a token. All items
    of the input come first, and then those of the key.
    """
    arrays, rotary = RopeBackwardArrays(*ARRAYS), Rotary(Rope(*ROPE), Norm(*NORM), tokens >> 31)
    take_turn(How(*HOW).OVERLAP)
    if len(arrays.INPUT) > 0:
        walk(Pass(HeadsBack(*arrays.INPUT), arrays, rotary, batches, tokens, DW, 0), ct.bid(0))
    if len(arrays.KEY) > 0:
        slot = ct.bid(0) + (ct.num_blocks(0) if DW else 0)
        walk(Pass(HeadsBack(*arrays.KEY), arrays, rotary, batches, tokens, KEY_DW, 1), slot)


@dataclass(frozen=True)
class Pass:
    """A backward pass of the input's heads, or of the key's."""

    a: HeadsBack
    arrays: RopeBackwardArrays
    rotary: Rotary
    batches: Any
    tokens: Any
    DW: bool  # PARTIALS gets dW of these heads
    NUMBER: int  # 0: the input's heads, 1: the key's

    @property
    def WHOLE(self):
        return self.rotary.rope.spanned(self.NUMBER)

    @property
    def COUNT(self):
        """How many elements a norm spans."""
        return self.rotary.rope.HEAD * max(self.WHOLE, 1)

    def tiles(self, item):
        """The tiles of an item."""
        rotary, X = self.rotary, self.a.X
        groups = rotary.groups(X)
        return rotary.tiles(item // groups, item % groups, self.tokens, X.shape[2], self.WHOLE)

    def items(self):
        return self.batches * self.rotary.parts(self.tokens) * self.rotary.groups(self.a.X)


def walk(this, slot):
    """A block's way over its items, and its part of dW."""
    rotary, WHOLE, ws, sums = this.rotary, this.WHOLE, (), ()
    home = this.tiles(0) if WHOLE > 0 else this.tiles(0)[:1]
    for at in ct.static_iter(home):
        ws += (rotary.weights(this.a.W, at),)
        sums += (zeros(rotary.rope) if this.DW else (),)
    items, step = this.items(), ct.num_blocks(0)
    ahead = read_item(this, ct.minimum(ct.bid(0), items - 1))
    for item in range(ct.bid(0), items, step):
        tiles, every, new, read = this.tiles(item), (), sums, ahead
        ahead = read_item(this, ct.minimum(item + step, items - 1))
        turns = rotary.turns(this.arrays, tiles[0])
        for n, at in ct.static_iter(enumerate(tiles)):
            rank = n if WHOLE > 0 else 0
            pairs, own_sums = gradients_of(this, read[n], ws[rank], turns, new[rank])
            new = (*new[:rank], own_sums, *new[rank + 1 :])
            every += (pairs,)
            if WHOLE == 0:
                write_dx(this, at, pairs, dot_of(this, (pairs,)), read[n][2])
        if WHOLE > 0:
            dot = ct.reduce(dot_of(this, every), 0, fused_add, 0.0, keepdims=True)
            for n, at in ct.static_iter(enumerate(tiles)):
                write_dx(this, at, every[n], dot, read[n][2])
        sums = new
    if this.DW:
        for n, at in ct.static_iter(enumerate(home)):
            write_sums(this, at, slot, sums[n])


def read_item(this, item):
    """read_heads of each tile of an item."""
    heads, tiles = (), this.tiles(item)
    for at in ct.static_iter(tiles):
        heads += (read_heads(this, at),)
    return heads


def read_heads(this, at):
    """The couples of x and of dy of a tile, and rstd of its rows."""
    a, index = this.a, (at.batch, at.token, at.head)
    xs = this.rotary.read(a.X, index, at.mask, 0)
    dys = this.rotary.read(a.DY, index, at.mask, 0)
    if this.WHOLE > 0:
        rstd = ct.gather(a.RSTD, index[:2], check_bounds=False)
    else:
        rstd = ct.gather(a.RSTD, index, mask=at.mask, check_bounds=False)
    return xs, dys, rstd


def zeros(rope):
    """A couple of float32 tiles of zeros for each couple of a head."""
    tiles = ()
    for _ in ct.static_iter(couples_of(rope)):
        tile = ct.zeros((rope.ROWS, rope.WIDTH), dtype=ct.float32)
        tiles += ((tile, tile),)
    return tiles


def gradients_of(this, read, ws, turns, sums):
    """((x̂, g), (x̂, g)) of each couple of a tile, and the sums over its rows so far."""
    rotary, order, pairs, new = this.rotary, this.rotary.order(), (), ()
    xs, dys, rstd = read
    for j, (x1, x2) in ct.static_iter(enumerate(xs)):
        a1, a2 = dys[j][0].astype(ct.float32), dys[j][1].astype(ct.float32)
        if j == 0:
            a1, a2 = rotary.rotated_back(a1, a2, turns)
        x1, x2 = x1.astype(ct.float32) * rstd, x2.astype(ct.float32) * rstd
        if this.DW:
            new += ((sums[j][0] + a1 * x1, sums[j][1] + a2 * x2),)
        if given(this.a.W):
            a1, a2 = order.unfused(a1 * ws[j][0]), order.unfused(a2 * ws[j][1])
        pairs += (((x1, a1), (x2, a2)),)
    return pairs, new


def dot_of(this, heads):
    """The mean of g · x̂ of each row of a tile.

    Of several tiles, it is the part of each row's number in the mean over all heads of a token.
    """
    order, products = this.rotary.order(), ()
    for couples in ct.static_iter(heads):
        for (x1, g1), (x2, g2) in ct.static_iter(couples):
            first = x1 * g1
            products += (order.unfused(first) if len(products) == 0 else first, x2 * g2)
    return order.row_sum(products) * (1.0 / this.COUNT)


def write_dx(this, at, pairs, dot, rstd):
    dx = ()
    if given(this.a.DX):
        for (x1, g1), (x2, g2) in ct.static_iter(pairs):
            dx += (((g1 - x1 * dot) * rstd, (g2 - x2 * dot) * rstd),)
        this.rotary.write(this.a.DX, (at.batch, at.token, at.head), at.mask, dx, 0)


def write_sums(this, at, slot, sums):
    """Write a block's part of dW: one for each head of a tile, or one that all heads share."""
    PARTIALS = this.arrays.PARTIALS
    if this.WHOLE > 0:
        start = at.head * this.rotary.rope.HEAD
        this.rotary.write(PARTIALS, (slot,), at.mask, sums, start)
    else:
        columns = ()
        for a, b in ct.static_iter(sums):
            columns += ((ct.sum(a, axis=0, keepdims=True), ct.sum(b, axis=0, keepdims=True)),)
        this.rotary.write(PARTIALS, (slot,), None, columns, 0)
