"""Forward: rows held whole in registers, a tile a block, or a persistent grid that runs ahead."""

import cuda.tile as ct

from .formula import center, silu
from .rows import (
    affine,
    both,
    columns,
    inside,
    read_parameter,
    row_place,
    scale,
    tile_place,
)
from .tiles import existing, gather_tiles, load_tiles, segments, store, tiles_of


@ct.kernel
def norm_forward(
    X,
    RESIDUAL,
    GATE,
    W,
    B,
    Y,
    SUM,
    MEAN,
    RSTD,
    first: int,
    rows: int,
    eps: float,
    N: ct.Constant[int],
    HEADS: ct.Constant[int],
    TILE_ROWS: ct.Constant[int],
    TILE_HEADS: ct.Constant[int],
    WIDTHS: ct.Constant[tuple[int, ...]],
    LOOP: ct.Constant[bool],
    TMA: ct.Constant[bool],
    STORE: ct.Constant[bool],
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
    not touched. Block b takes tile `first` + b, and with LOOP every tile that follows at steps of
    the grid, fetched one ahead. There may be more tiles than a grid has blocks.
    """
    inputs = (X,)
    if ADD:
        inputs += (RESIDUAL,)
    if GATED:
        inputs += (GATE,)

    def gather(i):
        place = tile_place(i, TILE_ROWS, HEADS, TILE_HEADS)
        return gather_tiles(
            inputs, place, existing(place, rows, TILE_ROWS, TILE_HEADS), N, WIDTHS, ALIGNED
        )

    def normalize(place, in_rows, tiles):
        xs = ()
        masks = ()
        for j, start, width in ct.static_iter(segments(WIDTHS)):
            cols = columns(start, width)
            in_row = inside(X, cols, start + width, N, ALIGNED)
            x = tiles[0][j].astype(ct.float32)
            if ADD:
                total = (x + tiles[1][j].astype(ct.float32)).astype(SUM.dtype)
                store(SUM, place, start, cols, total, both(in_rows, in_row), width, STORE)
                x = total.astype(ct.float32)
            if GATED and GATE_FIRST:
                x = x * silu(tiles[-1][j].astype(ct.float32))
            xs += (x,)
            masks += (in_row,)
        if LAYER:
            EXACT = X.dtype == ct.float32 or (ADD and SUM.dtype == ct.float32)
            xs, mean, variance = center(xs, masks, N, EXACT)
        else:
            squares = 0.0
            for x in ct.static_iter(xs):
                squares = squares + ct.sum(x * x, axis=1, keepdims=True)
            variance = squares * (1.0 / N)
        rstd = ct.rsqrt(variance + eps)
        SAME = WEIGHT and W.dtype == Y.dtype
        for j, start, width in ct.static_iter(segments(WIDTHS)):
            cols = columns(start, width)
            w = scale(W, place, cols, masks[j], OFFSET) if WEIGHT else None
            b = read_parameter(B, place, cols, masks[j]) if BIAS else None
            y = affine(xs[j] * rstd, w, b, Y.dtype, WEIGHT, BIAS, EARLY, SAME)
            if GATED and not GATE_FIRST:
                y = y * silu(tiles[-1][j].astype(ct.float32))
            store(Y, place, start, cols, y, both(in_rows, masks[j]), width, STORE)
        if SAVE:
            ct.scatter(RSTD, (place[0],), rstd, mask=in_rows, check_bounds=False)
            if LAYER:
                ct.scatter(MEAN, (place[0],), mean, mask=in_rows, check_bounds=False)

    first_tile = first + ct.bid(0)
    count = tiles_of(rows, HEADS, TILE_ROWS, TILE_HEADS)
    if not LOOP:
        place = tile_place(first_tile, TILE_ROWS, HEADS, TILE_HEADS)
        normalize(place, existing(place, rows, TILE_ROWS, TILE_HEADS), gather(first_tile))
    elif TMA:
        # Tile loads the compiler runs ahead by itself.
        for i in range(first_tile, count, ct.num_blocks(0)):
            tiles = load_tiles(inputs, row_place(i, HEADS), WIDTHS)
            normalize(tile_place(i, 1, HEADS, 1), None, tiles)
    else:
        ahead = gather(first_tile)
        for i in range(first_tile, count, ct.num_blocks(0)):
            tiles = ahead
            ahead = gather(ct.minimum(i + ct.num_blocks(0), count - 1))
            place = tile_place(i, TILE_ROWS, HEADS, TILE_HEADS)
            normalize(place, existing(place, rows, TILE_ROWS, TILE_HEADS), tiles)
