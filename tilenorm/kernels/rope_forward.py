"""The forward pass of heads that are normalised and then rotated (rotation.py)."""

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from .arrays import HeadsIn, RopeForwardArrays, given
from .constants import Constants, How, Norm, Rope
from .rotation import Rotary
from .statistics import fused_add
from .turns import take_turn_of_few


@ct.kernel
def rope_forward(
    first: int,
    step: int,
    ARRAYS: tuple,
    eps: float,
    tokens: int,
    NORM: Constants[Norm],
    ROPE: Constants[Rope],
    HOW: Constants[How],
):
    """(y1, y2) = (n1 · cos − n2 · sin, n2 · cos' + n1 · sin') with n = x · rstd · (w + offset).

    rstd = 1 / sqrt(mean(x²) + eps), where the mean is over a head, or over all heads of a token.

    Block (0, y, z) has item `first` + z · `step` + y. An item is a group of heads for a tile of
    tokens of a sequence, or all heads of a token. The groups of the key come behind those of the
    input.
    """
    arrays, rope = RopeForwardArrays(*ARRAYS), Rope(*ROPE)
    rotary, a = Rotary(rope, Norm(*NORM), tokens >> 31), HeadsIn(*arrays.INPUT)
    item = first + ct.bid(2) * step + ct.bid(1)
    take_turn_of_few(How(*HOW), ct.num_blocks(1))
    if len(arrays.KEY) == 0:
        groups = rotary.groups(a.X)
        normalize(Pass(a, arrays, rotary, eps, tokens, 0), item // groups, item % groups)
    else:
        key = HeadsIn(*arrays.KEY)
        groups, key_groups = rotary.groups(a.X), rotary.groups(key.X)
        i, group = item // (groups + key_groups), item % (groups + key_groups)
        if group < groups:
            normalize(Pass(a, arrays, rotary, eps, tokens, 0), i, group)
        else:
            normalize(Pass(key, arrays, rotary, eps, tokens, 1), i, group - groups)


@dataclass(frozen=True)
class Pass:
    """A forward pass of the input's heads, or of the key's."""

    a: HeadsIn
    arrays: RopeForwardArrays
    rotary: Rotary
    eps: Any
    tokens: Any
    NUMBER: int  # 0: the input's heads, 1: the key's

    @property
    def WHOLE(self):
        return self.rotary.rope.spanned(self.NUMBER)


def normalize(this, i, group):
    """All stages, for the heads of a block: group `group` of part i of the tokens."""
    a, rotary, WHOLE = this.a, this.rotary, this.WHOLE
    tiles, heads = rotary.tiles(i, group, this.tokens, a.X.shape[2], WHOLE), ()
    for at in ct.static_iter(tiles):
        heads += (rotary.read(a.X, (at.batch, at.token, at.head), at.mask, 0),)
    turns, ws, rstd = rotary.turns(this.arrays, tiles[0]), (), 0.0
    if WHOLE > 0:
        rstd = rstd_of(this, heads)
        if given(a.RSTD):
            ct.scatter(a.RSTD, (tiles[0].batch, tiles[0].token), rstd.item(), check_bounds=False)
    else:
        ws = rotary.weights(a.W, tiles[0])
    for n, at in ct.static_iter(enumerate(tiles)):
        weights, number = ws, rstd
        if WHOLE > 0:
            weights = rotary.weights(a.W, at)
        else:
            number = rstd_of(this, (heads[n],))
            if given(a.RSTD):
                index = (at.batch, at.token, at.head)
                ct.scatter(a.RSTD, index, number, mask=at.mask, check_bounds=False)
        write_rotated(this, at, heads[n], weights, turns, number)


def rstd_of(this, heads):
    """rstd of each row of a tile. Where a norm spans all heads of a token, one of all rows."""
    order, xs = this.rotary.order(), ()
    for couples in ct.static_iter(heads):
        for a, b in ct.static_iter(couples):
            xs += (a.astype(ct.float32), b.astype(ct.float32))
    square = order.mean_square(xs, this.rotary.rope.HEAD * max(this.WHOLE, 1))
    if this.WHOLE > 0:
        square = ct.reduce(square, 0, fused_add, 0.0, keepdims=True)
    return ct.rsqrt(square + this.eps)


def write_rotated(this, at, couples, ws, turns, rstd):
    """Normalise the heads of a tile, rotate them, and write them."""
    a, rotary, DTYPE, pairs = this.a, this.rotary, this.a.Y.dtype, ()
    for j, couple in ct.static_iter(enumerate(couples)):
        pair = ()
        for k, x in ct.static_iter(enumerate(couple)):
            n = rotary.rounded(x.astype(ct.float32) * rstd, DTYPE)
            pair += (rotary.rounded(n * ws[j][k], DTYPE) if given(a.W) else n,)
        pairs += (rotary.rotated(pair[0], pair[1], turns, DTYPE) if j == 0 else pair,)
    rotary.write(a.Y, (at.batch, at.token, at.head), at.mask, pairs, 0)
