"""Forward: one block normalises TILE_ROWS whole rows, each held in registers as one tile."""

import cuda.tile as ct

from .rows import both, columns, inside, read, read_vector, scale, write


@ct.kernel
def norm_forward(
    X,
    W,
    B,
    Y,
    RSTD,
    first: int,
    rows: int,
    eps: float,
    N: ct.Constant[int],
    TILE_ROWS: ct.Constant[int],
    TILE: ct.Constant[int],
    ALIGNED: ct.Constant[bool],
    OFFSET: ct.Constant[float],
    WEIGHT: ct.Constant[bool],
    BIAS: ct.Constant[bool],
    SAVE: ct.Constant[bool],
):
    """y = x · rstd · (w + offset) + b with rstd = 1 / sqrt(mean(x²) + eps).

    X (..., N) of rows in one or two leading dimensions, W and B (N,), Y (rows, N),
    RSTD (rows,) float32, written if SAVE. Arrays that a flag excludes are not touched. A launch
    starts at row `first`: there are more rows than a grid has blocks.
    """
    row = first + ct.bid(0) * TILE_ROWS + ct.arange(TILE_ROWS, dtype=ct.int32)[:, None]
    in_rows = row < rows if TILE_ROWS > 1 else None
    cols = columns(0, TILE)
    in_row = inside(X, cols, TILE, N, ALIGNED)
    mask = both(in_rows, in_row)

    x = read(X, row, cols, mask).astype(ct.float32)
    rstd = ct.rsqrt(ct.sum(x * x, axis=1, keepdims=True) / N + eps)
    y = x * rstd
    if WEIGHT:
        y = y * scale(W, cols, in_row, OFFSET)
    if BIAS:
        y = y + read_vector(B, cols, in_row)
    write(Y, row, cols, y, mask)
    if SAVE:
        ct.scatter(RSTD, (row,), rstd, mask=in_rows, check_bounds=False)
