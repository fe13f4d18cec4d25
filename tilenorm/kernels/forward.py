"""Forward: one block normalises TILE_ROWS whole rows, each held in registers as one tile."""

import cuda.tile as ct

from .formula import center, silu
from .rows import affine, both, columns, inside, read, tile_place, write


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
    TILE: ct.Constant[int],
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
    not touched. A launch starts at tile `first`: there are more tiles than a grid has blocks.
    """
    place = tile_place(first + ct.bid(0), TILE_ROWS, HEADS, TILE_HEADS)
    # A tile of one token's heads is whole.
    in_rows = place[0] < rows if TILE_ROWS > 1 and TILE_HEADS != TILE_ROWS else None
    cols = columns(0, TILE)
    in_row = inside(X, cols, TILE, N, ALIGNED)
    mask = both(in_rows, in_row)

    x = read(X, place, cols, mask).astype(ct.float32)
    if ADD:
        total = (x + read(RESIDUAL, place, cols, mask).astype(ct.float32)).astype(SUM.dtype)
        write(SUM, place, cols, total, mask)
        x = total.astype(ct.float32)
    if GATED:
        gate = read(GATE, place, cols, mask).astype(ct.float32)
        if GATE_FIRST:
            x = x * silu(gate)

    if LAYER:
        x, mean, variance = center(x, in_row, N)
    else:
        variance = ct.sum(x * x, axis=1, keepdims=True) / N
    rstd = ct.rsqrt(variance + eps)
    y = affine(x * rstd, W, B, Y.dtype, place, cols, in_row, WEIGHT, BIAS, OFFSET, EARLY)
    if GATED and not GATE_FIRST:
        y = y * silu(gate)
    write(Y, place, cols, y, mask)
    if SAVE:
        ct.scatter(RSTD, (place[0],), rstd, mask=in_rows, check_bounds=False)
        if LAYER:
            ct.scatter(MEAN, (place[0],), mean, mask=in_rows, check_bounds=False)
