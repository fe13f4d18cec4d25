"""The forward pass in three schedules, each load -> sum -> statistics -> output -> store.

row_forward has one block for each tile of rows. stream_forward is a persistent grid whose blocks
read the next tile ahead. shared_forward has several blocks for each row.

All three take: `first`, the tile where the launch starts; `step`, which row_forward alone uses;
ARRAYS, see ForwardArrays; eps; rows, the number of rows; and their constants, see constants.py and
tiles.Cut. The arguments that a block needs first are the first parameters: parameters are read in
lines of 64 bytes, and a block that waits for one more line ends 0.03 to 0.06 µs later.
"""

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from .arrays import ForwardArrays, given
from .constants import Constants, How, Norm
from .exchange import Slots
from .inputs import Row, inputs_of, is_exact, row_of, write_sum
from .outputs import fetch_parameters, normalized, outputs_of, write_outputs
from .statistics import Moments, Order, moments, order_of
from .tiles import Cut, Tile, gather_tiles, load_tiles, once, write_number
from .turns import take_turn, take_turn_of_few


@ct.kernel
def row_forward(
    first: int,
    step: int,
    ARRAYS: tuple,
    eps: float,
    rows: int,
    NORM: Constants[Norm],
    CUT: Constants[Cut],
    HOW: Constants[How],
):
    """y = (x − mean) · rstd · (w + offset) + b with rstd = 1 / sqrt(mean((x − mean)²) + eps).

    mean is 0 unless NORM.LAYER. Block (0, y, z) normalises tile `first` + z · `step` + y.
    """
    this = pass_of(ForwardArrays(*ARRAYS), first, eps, rows, NORM, CUT, HOW)
    # bid(0) would compile to a division by the size of a cluster.
    tile = this.tile(first + ct.bid(2) * step + ct.bid(1), 0)
    take_turn_of_few(this.how, ct.num_blocks(1))
    tiles, kept = this.gather(tile), ()
    if this.how.FETCH:
        tiles, kept = fetch_parameters(this, tile, tiles)
    this.normalize(tile, tiles, kept)


@ct.kernel
def stream_forward(
    first: int,
    step: int,
    ARRAYS: tuple,
    eps: float,
    rows: int,
    NORM: Constants[Norm],
    CUT: Constants[Cut],
    HOW: Constants[How],
):
    """The formula of row_forward, by a persistent grid.

    Block b normalises tile `first` + b, and then every tile that is a multiple of the grid's size
    further on. It reads one tile ahead.
    """
    this = pass_of(ForwardArrays(*ARRAYS), first, eps, rows, NORM, CUT, HOW)
    count = this.cut.tiles(rows)
    take_turn(this.how.OVERLAP)
    if not this.how.TMA:
        ahead = this.gather(this.tile(first + ct.bid(0), 0))
    for i in range(first + ct.bid(0), count, ct.num_blocks(0)):
        if this.how.TMA:
            # The compiler itself runs tile loads ahead.
            tiles = load_tiles(inputs_of(this.a), this.cut, i)
        else:
            tiles = ahead
            ahead = this.gather(this.tile(ct.minimum(i + ct.num_blocks(0), count - 1), 0))
        this.normalize(this.tile(i, 0), tiles, ())


@ct.kernel
def shared_forward(
    first: int,
    step: int,
    ARRAYS: tuple,
    eps: float,
    rows: int,
    NORM: Constants[Norm],
    CUT: Constants[Cut],
    HOW: Constants[How],
):
    """The formula of row_forward, by CHUNKS blocks for each row, which exchange their sums.

    Block b normalises chunk b % CHUNKS of row `first` + b // CHUNKS.
    """
    this = pass_of(ForwardArrays(*ARRAYS), first, eps, rows, NORM, CUT, HOW)
    i, chunk = first + ct.bid(0) // this.cut.CHUNKS, ct.bid(0) % this.cut.CHUNKS
    tile = this.tile(i, chunk)
    shared = SharedRow(this, tile)
    row = this.prologue(tile, this.gather(tile))
    this.epilogue(tile, row, shared.statistics(row), (), shared)


@dataclass(frozen=True)
class Pass:
    """A forward pass: its arrays, its constants, the order of its sums, and its stages."""

    a: ForwardArrays
    norm: Norm
    cut: Cut
    how: How
    rows: Any
    eps: Any
    order: Order

    def tile(self, i, chunk):
        return self.cut.tile(self.a.X, i, chunk, self.rows)

    def gather(self, tile):
        """The tiles of the inputs."""
        return gather_tiles(inputs_of(self.a), self.cut, tile)

    def normalize(self, tile, tiles, kept):
        """All stages, for a tile of whole rows. kept: see write_outputs."""
        row = self.prologue(tile, tiles)
        moments = self.statistics(tile, row, self.cut.N)
        self.epilogue(tile, row, moments, kept, None)

    def prologue(self, tile, tiles):
        """The rows to normalise, from the tiles of the inputs. Their sum is written, if any."""
        row = self.row(tile, tiles)
        write_sum(self, tile, row)
        return row

    def row(self, tile, tiles):
        if len(self.norm.INNER) > 0:
            row = self.after_inner(tile, tiles)
        else:
            row = row_of(self, tile, tiles)
        return row  # a second return would compile to other machine code

    def after_inner(self, tile, tiles):
        """The residual + the inner norm of x, rounded to the sum's dtype."""
        a, cut, how = self.a, self.cut, self.how
        no, statistics = (), (a.INNER_MEAN, a.INNER_RSTD)
        arrays = ForwardArrays(
            a.X, a.SUM, a.INNER_W, a.INNER_B, no, no, no, *statistics, SKIP=a.RESIDUAL
        )
        inner = Pass(arrays, Norm(*self.norm.INNER), cut, how, self.rows, self.eps, self.order)
        row = row_of(inner, tile, (tiles[0], no, no, no, tiles[1], no))
        moments = inner.statistics(tile, row, cut.N)
        rows = normalized(inner, row, moments, ct.rsqrt(moments.variance + self.eps))
        xs = outputs_of(inner, tile, rows)
        write_statistics(inner, tile, rows)
        return Row(xs, (), (), self.norm, how.PACKED, ())

    def statistics(self, tile, row, count):
        """The moments of the `count` elements of each row that the tile has."""
        return moments(self, tile, row, count, is_exact(self.a))

    def epilogue(self, tile, row, moments, kept, shared):
        """Normalise the rows by the moments of whole rows, and write what is asked for.

        kept, shared: see write_outputs.
        """
        rows = normalized(self, row, moments, ct.rsqrt(moments.variance + self.eps))
        write_outputs(self, tile, rows, kept, shared)
        write_statistics(self, tile, rows)


def pass_of(a, first, eps, rows, NORM, CUT, HOW):
    """The forward pass of a kernel with these parameters."""
    cut, how = Cut(*CUT), How(*HOW)
    return Pass(a, Norm(*NORM), cut, how, rows, eps, order_of(a, cut, first, how.THREADS))


def write_statistics(this, tile, rows):
    """Write rstd, and the mean if there is one, if they are asked for."""
    if given(this.a.RSTD):
        mask = once(tile)
        write_number(this.a.RSTD, tile, rows.rstd, mask)
        if this.norm.LAYER:
            write_number(this.a.MEAN, tile, rows.moments.mean + rows.moments.correction, mask)


@dataclass(frozen=True)
class SharedRow:
    """A row that blocks share, of which the block has the chunk of a tile."""

    this: Pass
    tile: Tile

    def slots(self, PARTS, FIRST):
        """The slots of the row, for PARTS numbers of a chunk, from slot FIRST on."""
        cut, how, row = self.this.cut, self.this.how, self.tile.place[0].item()
        SLOTS = self.this.a.SLOTS
        return Slots(SLOTS, row, PARTS, cut.CHUNKS, how.PADDED_CHUNKS, how.POLLS, FIRST)

    def other(self, chunk):
        """(tile, row, count) of another chunk, whose block has not published its numbers."""
        its_tile = self.this.tile(self.tile.place[0].item(), chunk)
        tiles, count = self.this.gather(its_tile), self.this.cut.count(chunk)
        return its_tile, self.this.row(its_tile, tiles), count

    def numbers(self, tile, row, count):
        """What a chunk publishes: Σ (x − mean)², after the mean if there is one."""
        moments = self.this.statistics(tile, row, count)
        if self.this.norm.LAYER:
            return (moments.mean + moments.correction).item(), moments.variance.item() * count
        return (moments.variance.item() * count,)

    def statistics(self, row):
        """The moments of the whole row, given the columns of this block's chunk."""
        this, chunk = self.this, self.tile.chunk

        def missing(other):
            return self.numbers(*self.other(other))

        mine = self.numbers(self.tile, row, this.cut.count(chunk))
        take_turn(this.how.OVERLAP)
        slots = self.slots(len(mine), 0)
        slots.publish(chunk, mine)
        if this.norm.LAYER:
            mean, correction, variance = slots.combine(slots.collect(missing), this.cut)
        else:
            mean, correction = 0.0, 0.0
            variance = slots.collect_sums(missing)[0] * (1.0 / this.cut.N)
        return Moments((), mean, correction, variance)

    def largest(self, mine, number_of):
        """The largest of a number of each chunk. number_of: makes it of a tile and its columns."""

        def missing(other):
            its_tile, row, _ = self.other(other)
            return (number_of(its_tile, row).item(),)

        slots = self.slots(1, (2 if self.this.norm.LAYER else 1) * self.this.cut.CHUNKS)
        return slots.collect_peak(self.tile.chunk, mine, missing)
