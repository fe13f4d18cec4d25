"""Stage: what scales, shifts and gates rows by group.

MOD_SCALE, MOD_SHIFT and MOD_GATE are (groups, N), with any stride between rows. A group is a set of
consecutive rows of x. Each row of x meets its group's row of each array. All groups have the same
number of rows. The number of groups is an extent of the arrays, so that no kernel is compiled for
it.
"""

import cuda.tile as ct

from .arrays import given
from .tiles import both


def gather_groups(P, tile, rows):
    """The segments of P for the rows of a tile, in P's dtype. rows: how many rows all groups have.

    Row i belongs to group i // (rows // groups).
    """
    group = tile.place[0] // (rows // P.shape[0])
    tiles = ()
    for segment in ct.static_iter(tile.segments):
        index, mask = (group, segment.cols()), both(tile.in_rows, segment.mask)
        tiles += (ct.gather(P, index, mask=mask, check_bounds=False),)
    return tiles


def modulation_of(a, tile, rows):
    """(scale, shift) of each segment of a tile. An absent shift is (). Without a scale it is ()."""
    pairs = ()
    if given(a.MOD_SCALE):
        scales = gather_groups(a.MOD_SCALE, tile, rows)
        shifts = gather_groups(a.MOD_SHIFT, tile, rows) if given(a.MOD_SHIFT) else ()
        for j, scale in ct.static_iter(enumerate(scales)):
            pairs += ((scale, shifts[j] if len(shifts) > 0 else ()),)
    return pairs


def modulated(y, modulation):
    """y · (1 + scale) + shift of a segment, in float32."""
    scale, shift = modulation
    y = y * (1.0 + scale.astype(ct.float32))
    return y + shift.astype(ct.float32) if given(shift) else y


def gated_sum(this, tile, xs, residual):
    """The segments of residual + gate · x, with a gate by group, rounded to the sum's dtype."""
    gates = gather_groups(this.a.MOD_GATE, tile, this.rows)
    totals = ()
    for j, x in ct.static_iter(enumerate(xs)):
        product = x.astype(ct.float32) * gates[j].astype(ct.float32)
        totals += ((residual[j].astype(ct.float32) + product).astype(this.a.SUM.dtype),)
    return totals
