"""Stage: normalised rows as 8-bit floats with scales.

A group of elements shares a scale. The stage finds the largest magnitude of the group, makes the
factor of it, and writes q = y · factor and the scale 1 / factor. y is a tuple of segments in y's
dtype: the values that the norm writes without this stage.
"""

import cuda.tile as ct

from .arrays import given
from .constants import Quant
from .opaque import rematerialize
from .tiles import both, joined, once, write, write_number

SMALLEST = 1e-12  # a group with a smaller largest magnitude gets the factor of this magnitude
FIELD = 23  # the bits of float32's mantissa
MANTISSA = (1 << FIELD) - 1
NAN = 0x7FFFFFFF  # the NaN of the GPU's own arithmetic
TILE_ROWS, TILE_GROUPS = 128, 4  # of a tile of swizzled scales


def write_quantized(this, tile, ys, peak):
    """Write q and the scales, and the largest magnitude of all y where that is asked for.

    peak: the largest magnitude of each row, (ROWS, 1) float32; None where row_peak has to find it.
    """
    a, STORE, quant = this.a, this.how.STORE, Quant(*this.norm.QUANT)
    if peak is None and (quant.BY_ROW or given(a.AMAX)):
        peak = row_peak(tile, ys)
    if given(a.AMAX):
        write_largest(a, tile, peak)
    if quant.GROUP > 0:
        widths = ct.static_eval(tuple(segment.WIDTH for segment in tile.segments))
        for first, count in ct.static_iter(runs(widths)):
            write_groups(a, quant, tile, first, ys[first : first + count], STORE)
    else:
        write_rows(a, quant, tile, ys, peak, STORE)


def write_rows(a, quant, tile, ys, peak, STORE):
    """q of rows with one scale each, or with the scale that the caller gives."""
    if quant.GIVEN:
        factor = ct.truediv(1.0, ct.load(a.SCALE, (0,), (1,)).reshape((1, 1)))
    else:
        factor = factor_of(quant, peak)
        write_number(a.SCALE, tile, ct.truediv(1.0, factor), once(tile))
    for j, y in ct.static_iter(enumerate(ys)):
        if quant.BY_ROW and quant.PACKED:
            y = rematerialize(y, factor)
        write(a.Q, tile.at(j), y.astype(ct.float32) * factor, STORE)


def write_groups(a, quant, tile, first, ys, STORE):
    """q and the scales of segments whose groups have a scale each, from segment `first` on.

    ys: the segments. All have one width, and their number is a power of two. Their maxima are
    joined into one tile, so that the compiler works on all of them at once. Otherwise it would wait
    for each maximum and for each quotient.
    """
    R, W = ys[0].shape
    COUNT = W // quant.GROUP
    grouped = ()
    peaks = ()
    for y in ct.static_iter(ys):
        y = y.astype(ct.float32).reshape((R, COUNT, quant.GROUP))
        grouped += (y,)
        peaks += (ct.max(abs(y), axis=2, keepdims=True, propagate_nan=True).reshape((R, COUNT)),)
    peak = joined(peaks)
    if quant.MX:
        exponent = exponent_of(quant, peak)
        factor = ct.bitcast(ct.where(exponent == 255, NAN, (254 - exponent) << FIELD), ct.float32)
        scale = exponent.astype(ct.uint8)
    else:
        factor = factor_of(quant, peak)
        scale = ct.truediv(1.0, factor)
    write_scales(a, quant, tile, first, scale, tile.segments[first + len(ys) - 1].mask)
    for j, y in ct.static_iter(enumerate(grouped)):
        group_factor = ct.extract(factor, (0, j), (R, COUNT)).reshape((R, COUNT, 1))
        write(a.Q, tile.at(first + j), (y * group_factor).reshape((R, W)), STORE)


def write_scales(a, quant, tile, first, scale, masked):
    """Write the scales of the groups from segment `first` on.

    masked: None where all of these groups exist.
    """
    segment = tile.segments[first]
    group = ct.arange(scale.shape[1], dtype=ct.int32)[None, :]
    group = (segment.chunk * segment.CHUNK_WIDTH + segment.START) // quant.GROUP + group
    mask = tile.in_rows
    if masked is not None:
        mask = both(mask, group < a.Q.shape[1] // quant.GROUP)
    where = offset_of(a, quant, tile.place[0], group)
    ct.scatter(a.SCALE, (where,), scale, mask=mask, check_bounds=False)


def runs(WIDTHS):
    """(first, count) of each run of segments of one width. Each count is a power of two."""
    spans = ()
    first = 0
    while first < len(WIDTHS):
        count = 1
        while WIDTHS[first : first + 2 * count] == (WIDTHS[first],) * (2 * count):
            count *= 2
        spans += ((first, count),)
        first += count
    return spans


def offset_of(a, quant, row, group):
    """Where the scale of a group lies."""
    rows, groups = a.Q.shape[0], a.Q.shape[1] // quant.GROUP
    if quant.SWIZZLED:
        # As NVIDIA's "1D Block Scaling Factors Layout" for cuBLAS has them.
        tiles = ct.cdiv(groups, TILE_GROUPS)
        number = row // TILE_ROWS * tiles + group // TILE_GROUPS
        inside = row % 32 * 16 + row % TILE_ROWS // 32 * TILE_GROUPS + group % TILE_GROUPS
        return number * (TILE_ROWS * TILE_GROUPS) + inside
    if quant.PADDED > 0:
        return group * (ct.cdiv(rows, quant.PADDED) * quant.PADDED) + row
    return row * groups + group


def factor_of(quant, peak):
    """MOST / the largest magnitude. A power of two is rounded down, so that q does not overflow."""
    factor = ct.truediv(quant.MOST, ct.maximum(peak, SMALLEST, propagate_nan=True))
    if quant.POWER_OF_2:
        power = ct.bitcast(ct.bitcast(factor, ct.int32) & ~MANTISSA, ct.float32)
        # A NaN without its mantissa would be an infinity, and q would have large numbers.
        factor = ct.where(factor == factor, power, factor)
    return factor


def exponent_of(quant, peak):
    """The exponent of the smallest power of two that is at least peak / MOST, plus 127.

    It is 255 for NaN and infinity.
    """
    bits = ct.bitcast(peak * (1.0 / quant.MOST), ct.int32)
    return ct.minimum((bits >> FIELD) + ((bits & MANTISSA) != 0).astype(ct.int32), 255)


def row_peak(tile, ys):
    """The largest magnitude of each row, or of its chunk, in float32; NaN if it has a NaN."""
    peak = None
    kept = None
    for j, y in ct.static_iter(enumerate(ys)):
        y = abs(y.astype(ct.float32))
        mask = tile.segments[j].mask
        if mask is not None:
            y = ct.where(mask, y, ct.zeros(y.shape, dtype=y.dtype))
        # Segments of one width are compared before the block has a reduction, which is a barrier.
        if kept is not None and kept.shape[1] == y.shape[1]:
            kept = ct.maximum(kept, y, propagate_nan=True)
        else:
            peak = larger(peak, kept)
            kept = y
    return larger(peak, kept)


def larger(peak, y):
    """The largest of each row's peak and of its magnitudes y. Either of the two may be None."""
    if y is None:
        return peak
    largest = ct.max(y, axis=1, keepdims=True, propagate_nan=True)
    return largest if peak is None else ct.maximum(peak, largest, propagate_nan=True)


def write_largest(a, tile, peak):
    """Raise AMAX to the largest peak of the rows that exist, if that is larger.

    Numbers that are not negative have the same order as their bits, and NaN has the largest bits.
    So the result does not depend on the order of the blocks.
    """
    if tile.in_rows is not None:
        peak = ct.where(tile.in_rows, peak, 0.0)
    bits = ct.max(ct.bitcast(peak, ct.int32))
    ct.atomic_max(a.AMAX, (0,), bits, memory_order=ct.MemoryOrder.RELAXED)
