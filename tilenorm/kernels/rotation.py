"""Stage: heads as tiles, and the rotation of a head by the angles of its token.

All tiles have ROWS rows and WIDTH columns, so that all have one layout. A thread's own values of
cos, sin and the weight then serve all heads, and nothing passes through shared memory. A row is a
token, and a block has TILES heads of its tokens. Where a norm spans all heads of a token, a row is
a head instead, and a block has all tiles of a token.

A head is cut into couples of tiles. The two tiles of the first couple are rotated into each other.
They are the two halves of the rotated elements, or the even and the odd ones. The other couples
hold the elements that are not rotated.

The order in which a row is added up follows the width of its loads, as tiles.py says. Where ALIGNED
is false, columns are masked by a number of which the compiler knows nothing. So the compiler reads
every layout element by element.
"""

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from .arrays import given
from .constants import Norm, Rope
from .outputs import scale
from .statistics import Order
from .tiles import both, columns


@dataclass(frozen=True)
class Heads:
    """Where a tile lies. Of `token` and `head` one is a number, and the other a (ROWS, 1) tile."""

    batch: Any  # the sequence
    token: Any
    head: Any
    mask: Any  # which rows exist; None where all do


@dataclass(frozen=True)
class Turns:
    """cos and sin of the first element of a couple, and of the second, (ROWS, WIDTH), float32."""

    cos: Any
    sin: Any
    cos2: Any
    sin2: Any


@dataclass(frozen=True)
class Rotary:
    """How heads are read, rotated and written."""

    rope: Rope
    norm: Norm
    nothing: Any  # an integer 0 of which the compiler knows nothing

    def order(self):
        """The order of sums. Without it each copy of a loop could get an order of its own."""
        return Order(self.zero(), SETTLED=True, FUSED=True)

    def zero(self):
        return ct.astype(self.nothing, ct.float32)

    def groups(self, X):
        """How many groups the heads of X make. A block has one group at once."""
        return 1 if self.rope.WHOLE else ct.cdiv(X.shape[2], self.rope.TILES)

    def parts(self, tokens):
        """How many parts the tokens of a sequence make. A block has one part at once."""
        return tokens if self.rope.WHOLE else ct.cdiv(tokens, self.rope.ROWS)

    def tiles(self, i, group, tokens, heads, WHOLE):
        """The tiles that a block has at once: those of part i of the tokens of all sequences.

        They hold group `group` of `heads` heads. With WHOLE they hold all WHOLE heads of a token.
        """
        ROWS, places = self.rope.ROWS, ()
        step = ct.arange(ROWS, dtype=ct.int32)[:, None]
        parts = self.parts(tokens)
        batch, i = i // parts, i % parts
        for n in ct.static_iter(range(-(-WHOLE // ROWS) if WHOLE > 0 else self.rope.TILES)):
            if WHOLE > 0:
                head = n * ROWS + step
                mask = None if (n + 1) * ROWS <= WHOLE else head < WHOLE
                places += (Heads(batch, i, head, mask),)
            else:
                token, head = i * ROWS + step, group * self.rope.TILES + n
                places += (Heads(batch, token, head, (token < tokens) & (head < heads)),)
        return places

    def place(self, start, width, end, mask):
        """(columns, mask) of `width` columns. Those before the end exist."""
        cols = columns(start, width)
        if not self.rope.ALIGNED:
            mask = both(mask, cols < end + self.nothing)
        elif start + width > end:
            mask = both(mask, cols < end)
        return cols, mask

    def read(self, X, index, mask, first):
        """The couples of tiles of some heads, in X's dtype.

        index: of all dimensions but the last. first: the column where a head begins.
        """
        couples = ()
        for couple in ct.static_iter(couples_of(self.rope)):
            couples += (self.read_couple(X, index, mask, first, couple),)
        return couples

    def read_couple(self, X, index, mask, first, couple):
        tiles = ()
        for start, width, end in ct.static_iter(couple):
            cols, inside = self.place(start, width, end, mask)
            tiles += (ct.gather(X, index + (first + cols,), mask=inside, check_bounds=False),)
        return halves_of(tiles[0]) if self.rope.PAIRS else tiles

    def write(self, X, index, mask, couples, first):
        """Write couples of tiles. first: the column of X where a head begins."""
        for j, couple in ct.static_iter(enumerate(couples_of(self.rope))):
            a, b = couples[j]
            tiles = (a.astype(X.dtype), b.astype(X.dtype))
            if self.rope.PAIRS:
                tiles = (joined(tiles[0], tiles[1]),)
            for k, (start, width, end) in ct.static_iter(enumerate(couple)):
                cols, inside = self.place(start, width, end, mask)
                ct.scatter(X, index + (first + cols,), tiles[k], mask=inside, check_bounds=False)

    def weights(self, W, at):
        """The couples of w + offset for the heads of a tile, in float32; () without a weight."""
        factors = ()
        if given(W):
            rows = at.token * 0 + at.head
            if W.ndim == 2:
                couples = self.read(W, (rows,), at.mask, 0)
            else:
                couples = self.read(W, (), None, rows * 0)  # a tile, for its layout
            for w1, w2 in ct.static_iter(couples):
                factors += ((scale(w1, self.norm.OFFSET), scale(w2, self.norm.OFFSET)),)
        return factors

    def turns(self, arrays, at):
        """The Turns of the tokens of a tile."""
        COS, SIN, POSITIONS = arrays.COS, arrays.SIN, arrays.POSITIONS
        token = at.token + at.head * 0
        index = (at.batch, token)
        if given(POSITIONS):
            row = ct.gather(POSITIONS, index, mask=at.mask, check_bounds=False)
            index = (row.astype(ct.int32),)
        tables = ()
        for TABLE in ct.static_iter((COS, SIN)):
            if self.rope.FULL:
                first = ct.static_eval(couples_of(self.rope)[0])
                pair = self.read_couple(TABLE, index, at.mask, 0, first)
            else:
                cols, inside = self.place(0, self.rope.WIDTH, self.rope.HALF, at.mask)
                half = ct.gather(TABLE, index + (cols,), mask=inside, check_bounds=False)
                pair = (half, half)
            a, b = pair
            tables += ((a.astype(ct.float32), b.astype(ct.float32)),)
        (cos, cos2), (sin, sin2) = tables
        return Turns(cos, sin, cos2, sin2)

    def rounded(self, x, DTYPE):
        """x, rounded to DTYPE if EARLY."""
        return x.astype(DTYPE).astype(ct.float32) if self.norm.EARLY else x

    def rotated(self, a, b, turns, DTYPE):
        """(a · cos − b · sin, b · cos' + a · sin'). EARLY rounds each product to DTYPE.

        The compiler would fuse one of the two products with their sum, and not the same one in all
        copies of the code. A product − opaque zero is no product, and a zero keeps its sign.
        """
        zero = self.zero()
        first = self.rounded(a * turns.cos - zero, DTYPE)
        second = self.rounded(b * turns.cos2 - zero, DTYPE)
        if self.norm.EARLY:
            other = self.rounded(b * turns.sin - zero, DTYPE)
            pair = (first - other, second + self.rounded(a * turns.sin2 - zero, DTYPE))
        else:
            pair = (first - b * turns.sin, second + a * turns.sin2)
        return pair

    def rotated_back(self, a, b, turns):
        """The gradient of what was rotated: (a · cos + b · sin', b · cos' − a · sin)."""
        zero = self.zero()
        first, second = a * turns.cos - zero, b * turns.cos2 - zero
        return first + b * turns.sin2, second - a * turns.sin


def couples_of(rope):
    """(first column, width, end) of each tile of each couple. No column reaches the end.

    With PAIRS, a couple is read as one tile.
    """
    W, rotated = rope.WIDTH, 2 * rope.HALF
    starts = range(rotated, rope.HEAD, 2 * W)
    if rope.PAIRS:
        return (((0, 2 * W, rotated),), *(((start, 2 * W, rope.HEAD),) for start in starts))
    rest = (((start, W, rope.HEAD), (start + W, W, rope.HEAD)) for start in starts)
    return (((0, W, rope.HALF), (rope.HALF, W, rotated)), *rest)


def halves_of(tile):
    """The even and the odd columns of a tile."""
    R, W = tile.shape
    pairs = tile.reshape((R, W // 2, 2))
    even = ct.extract(pairs, (0, 0, 0), (R, W // 2, 1)).reshape((R, W // 2))
    odd = ct.extract(pairs, (0, 0, 1), (R, W // 2, 1)).reshape((R, W // 2))
    return even, odd


def joined(even, odd):
    """A tile with these even and odd columns."""
    R, W = even.shape
    pairs = ct.cat((even.reshape((R, W, 1)), odd.reshape((R, W, 1))), 2)
    return pairs.reshape((R, 2 * W))
