"""Forward: a tile of rows a block, or a chunk of one; or a persistent grid that runs ahead."""

import cuda.tile as ct

from .exchange import collect, collect_sums, combine, publish
from .formula import (
    again,
    centered,
    joined,
    mean_of,
    mean_square,
    recentered,
    silu,
    unknown_zero,
)
from .rows import (
    affine,
    both,
    columns,
    inside,
    read_parameter,
    row_place,
    scale,
    tile_place,
    unit,
)
from .tiles import existing, gather_tiles, load_tiles, segments, store, tiles_of


@ct.kernel
def norm_forward(
    first: int,
    step: int,
    X,
    Y,
    W,
    B,
    RESIDUAL,
    GATE,
    SUM,
    MEAN,
    RSTD,
    SLOTS,
    eps: float,
    rows: int,
    N: ct.Constant[int],
    HEADS: ct.Constant[int],
    TILE_ROWS: ct.Constant[int],
    TILE_HEADS: ct.Constant[int],
    WIDTHS: ct.Constant[tuple[int, ...]],
    CHUNKS: ct.Constant[int],
    PADDED_CHUNKS: ct.Constant[int],
    POLLS: ct.Constant[int],
    OVERLAP: ct.Constant[bool],
    LOOP: ct.Constant[bool],
    TMA: ct.Constant[bool],
    STORE: ct.Constant[bool],
    PACKED: ct.Constant[bool],
    FETCH: ct.Constant[bool],
    TOGETHER: ct.Constant[int],
    ORDERED: ct.Constant[bool],
    ALIGNED: ct.Constant[bool],
    LAYER: ct.Constant[bool],
    ADD: ct.Constant[bool],
    GATED: ct.Constant[bool],
    GATE_FIRST: ct.Constant[bool],
    WEIGHT: ct.Constant[bool],
    BIAS: ct.Constant[bool],
    OFFSET: ct.Constant[float],
    EARLY: ct.Constant[bool],
    SAVE: ct.Constant[bool],
):
    """y = (x − mean) · rstd · (w + offset) + b with rstd = 1 / sqrt(mean((x − mean)²) + eps).

    mean is 0 unless LAYER. ADD: x is x + residual, rounded to SUM and written there. GATED: y is
    multiplied by silu(gate), or, if GATE_FIRST, x is. EARLY: (x − mean) · rstd is rounded to Y's
    dtype, and so is its product with a weight of that dtype.

    X, RESIDUAL, GATE (..., N) of rows in one or two leading dimensions; W and B (N,) or (HEADS, N);
    Y, SUM (rows, N); MEAN, RSTD (rows,) float32, written if SAVE. Arrays that a flag excludes are
    not touched. Block (0, y, z) takes tile `first` + z · `step` + y. With LOOP block b takes that
    at `first` + b and every one that follows at steps of the grid, fetched one ahead. There may be
    more tiles than a grid has blocks. With CHUNKS, so many blocks in turn share a row, and what
    they have of its sums by SLOTS. PACKED: what has 16 bits stays in them over the sums. FETCH: w
    and b are fetched with the row, else TOGETHER: those of so many segments at once, after the
    sums. ORDERED: kernels that differ in these three and SAVE, and only so, give the same bits, and
    a block computes of a chunk what its own block does. What is needed first stands first:
    parameters come in lines of 64 bytes, and a block that waits for one more of them ends 0.03 to
    0.06 µs later.
    """
    inputs = (X,)
    if ADD:
        inputs += (RESIDUAL,)
    if GATED:
        inputs += (GATE,)
    # Where all is of 16 bits no digit shows what rounding leaves of a mean.
    EXACT = X.dtype == ct.float32 or (ADD and SUM.dtype == ct.float32)
    TILE = ct.static_eval(sum(WIDTHS))
    UNIT = ct.static_eval(unit(X, ALIGNED) if ORDERED else 0)
    zero = unknown_zero(first) if ORDERED else None

    def gather(i, chunk):
        place = tile_place(i, TILE_ROWS, HEADS, TILE_HEADS)
        in_rows = existing(place, rows, TILE_ROWS, TILE_HEADS)
        return gather_tiles(inputs, place, in_rows, chunk * TILE, N, WIDTHS, CHUNKS, ALIGNED)

    def summed(tiles):
        """Segments of x, or of x + residual as SUM holds it."""
        if not ADD:
            return tiles[0]
        totals = ()
        for j, x in ct.static_iter(enumerate(tiles[0])):
            residual = tiles[1][j].astype(ct.float32)
            totals += ((x.astype(ct.float32) + residual).astype(SUM.dtype),)
        return totals

    def values(kept, tiles):
        """What is normalised, in float32."""
        xs = ()
        for j, x in ct.static_iter(enumerate(kept)):
            x = x.astype(ct.float32)
            if GATED and GATE_FIRST:
                x = x * silu(tiles[-1][j].astype(ct.float32))
            xs += (x,)
        return xs

    def held(kept, number):
        """The segments, to be converted again if they are PACKED."""
        new = ()
        for x in ct.static_iter(kept):
            new += (again(x, number) if PACKED else x,)
        return new

    def moments(kept, tiles, masks, count):
        """The segments of x − mean, the mean, what rounding left of it, and the variance."""
        xs = values(kept, tiles)
        if not LAYER:
            return xs, 0.0, 0.0, mean_square(xs, count, zero, UNIT)
        mean = mean_of(xs, count, UNIT)
        if PACKED:
            xs = values(held(kept, mean), tiles)
        near = centered(xs, masks, mean)
        if EXACT:
            near, left, variance = recentered(near, count, zero, UNIT)
            return near, mean, left, variance
        return near, mean, 0.0, mean_square(near, count, zero, UNIT)

    def masks_of(chunk):
        masks = ()
        for _, start, width, end in ct.static_iter(segments(WIDTHS, CHUNKS)):
            masks += (inside(X, columns(chunk * TILE + start, width), end, N, ALIGNED),)
        return masks

    def numbers_of(mean, left, variance, count):
        """What a chunk publishes: Σ (x − mean)², after the mean if there is one."""
        if LAYER:
            return (mean + left).item(), variance.item() * count
        return (variance.item() * count,)

    def parameters(place, chunk, j, mask):
        """w and b of a segment."""
        _, start, width, _ = ct.static_eval(segments(WIDTHS, CHUNKS)[j])
        cols = columns(chunk * TILE + start, width)
        w = read_parameter(W, place, cols, mask) if WEIGHT else None
        b = read_parameter(B, place, cols, mask) if BIAS else None
        return w, b

    def fetched(place, chunk, tiles, masks):
        """The tiles when w and b are there, and these."""
        found = ()
        xs = ()
        for j, x in ct.static_iter(enumerate(tiles[0])):
            w, b = parameters(place, chunk, j, masks[j])
            if WEIGHT:
                x = joined(x, w, eps)
            if BIAS:
                x = joined(x, b, eps)
            found += ((w, b),)
            xs += (x,)
        return (xs,) + tiles[1:], found

    def read_together(first, place, chunk, masks):
        """w and b of TOGETHER segments, the first w, or if there is none b, when all are there.

        No read passes a store: a block would wait for memory once a segment.
        """
        found = ()
        for j in ct.static_iter(range(first, min(first + TOGETHER, len(WIDTHS)))):
            found += (parameters(place, chunk, j, masks[j]),)
        w, b = found[0]
        for other_w, other_b in ct.static_iter(found[1:]):
            if WEIGHT:
                w = joined(w, other_w, eps)
            if BIAS and WEIGHT:
                w = joined(w, other_b, eps)
            elif BIAS:
                b = joined(b, other_b, eps)
        return ((w, b),) + found[1:]

    def normalize(place, in_rows, chunk, tiles):
        masks = masks_of(chunk)
        if FETCH:
            tiles, ready = fetched(place, chunk, tiles, masks)
        kept = summed(tiles)
        if ADD:
            for j, start, width, _ in ct.static_iter(segments(WIDTHS, CHUNKS)):
                cols = columns(chunk * TILE + start, width)
                store(SUM, place, start, cols, kept[j], both(in_rows, masks[j]), width, STORE)
        if CHUNKS == 1:
            near, mean, left, variance = moments(kept, tiles, masks, N)
        else:
            count = ct.minimum(N - chunk * TILE, TILE)
            near, mean, left, variance = moments(kept, tiles, masks, count)
            numbers = numbers_of(mean, left, variance, count)

            def missing(other):
                found = gather(place[0].item(), other)
                there = ct.minimum(N - other * TILE, TILE)
                theirs = moments(summed(found), found, masks_of(other), there)
                return numbers_of(theirs[1], theirs[2], theirs[3], there)

            if OVERLAP:
                ct.grid_dependency_control_wait()
            row = place[0].item()
            publish(SLOTS, row, chunk, numbers)
            slots = (SLOTS, row, len(numbers), CHUNKS, PADDED_CHUNKS, POLLS)
            if LAYER:
                found = collect(*slots, missing)
                mean, left, variance = combine(found, N, CHUNKS, TILE, PADDED_CHUNKS)
            else:
                variance = collect_sums(*slots, missing)[0] * (1.0 / N)
        rstd = ct.rsqrt(variance + eps)
        if PACKED or CHUNKS > 1:
            near = ()
            xs = values(held(kept, rstd), tiles)
            for x in ct.static_iter(xs):
                near += ((x - mean) - left,) if LAYER else (x,)
        SAME = WEIGHT and W.dtype == Y.dtype
        for j, start, width, _ in ct.static_iter(segments(WIDTHS, CHUNKS)):
            cols = columns(chunk * TILE + start, width)
            if not FETCH and j % TOGETHER == 0:
                ready = read_together(j, place, chunk, masks)
            w, b = ready[j if FETCH else j % TOGETHER]
            w = scale(w, OFFSET) if WEIGHT else None
            b = b.astype(ct.float32) if BIAS else None
            y = affine(near[j] * rstd, w, b, Y.dtype, WEIGHT, BIAS, EARLY, SAME)
            if GATED and not GATE_FIRST:
                y = y * silu(tiles[-1][j].astype(ct.float32))
            store(Y, place, start, cols, y, both(in_rows, masks[j]), width, STORE)
        if SAVE:
            save = in_rows if CHUNKS == 1 else chunk == 0
            ct.scatter(RSTD, (place[0],), rstd, mask=save, check_bounds=False)
            if LAYER:
                ct.scatter(MEAN, (place[0],), mean + left, mask=save, check_bounds=False)

    count = tiles_of(rows, HEADS, TILE_ROWS, TILE_HEADS)
    if not LOOP:
        if CHUNKS > 1:
            i = first + ct.bid(0) // CHUNKS
            chunk = ct.bid(0) % CHUNKS
        else:
            # Not by bid(0), which is a division by the size of a cluster.
            i = first + ct.bid(2) * step + ct.bid(1)
            chunk = 0
        place = tile_place(i, TILE_ROWS, HEADS, TILE_HEADS)
        in_rows = existing(place, rows, TILE_ROWS, TILE_HEADS)
        normalize(place, in_rows, chunk, gather(i, chunk))
    elif TMA:
        # Tile loads the compiler runs ahead by itself.
        for i in range(first + ct.bid(0), count, ct.num_blocks(0)):
            tiles = load_tiles(inputs, row_place(i, HEADS), WIDTHS)
            normalize(tile_place(i, 1, HEADS, 1), None, 0, tiles)
    else:
        ahead = gather(first + ct.bid(0), 0)
        for i in range(first + ct.bid(0), count, ct.num_blocks(0)):
            tiles = ahead
            ahead = gather(ct.minimum(i + ct.num_blocks(0), count - 1), 0)
            place = tile_place(i, TILE_ROWS, HEADS, TILE_HEADS)
            normalize(place, existing(place, rows, TILE_ROWS, TILE_HEADS), 0, tiles)
