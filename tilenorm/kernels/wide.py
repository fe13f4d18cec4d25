"""Rows too wide for one block's registers: two launches over chunks of a row, in each direction.

The first leaves a partial sum per (row, chunk), the second adds them up in chunk order and applies
the result. A row's bits depend on the chunk width alone. As in norm_forward, a launch of one block
a chunk starts at row `first`.
"""

import cuda.tile as ct

from .rows import columns, inside, read, read_vector, scale, write


@ct.kernel
def wide_squares(
    X,
    SQUARES,
    first: int,
    N: ct.Constant[int],
    CHUNKS: ct.Constant[int],
    TILE: ct.Constant[int],
    ALIGNED: ct.Constant[bool],
):
    """squares[r, j] = Σ x² over chunk j of row r. X (..., N), SQUARES (rows, CHUNKS) float32."""
    row = first + ct.bid(0) // CHUNKS
    chunk = ct.bid(0) % CHUNKS
    cols = columns(chunk * TILE, TILE)
    mask = inside(X, cols, CHUNKS * TILE, N, ALIGNED)
    x = read(X, row, cols, mask).astype(ct.float32)
    ct.scatter(SQUARES, (row, chunk), ct.sum(x * x), check_bounds=False)


@ct.kernel
def wide_forward(
    X,
    W,
    B,
    SQUARES,
    Y,
    RSTD,
    first: int,
    eps: float,
    N: ct.Constant[int],
    CHUNKS: ct.Constant[int],
    PADDED_CHUNKS: ct.Constant[int],
    TILE: ct.Constant[int],
    ALIGNED: ct.Constant[bool],
    OFFSET: ct.Constant[float],
    WEIGHT: ct.Constant[bool],
    BIAS: ct.Constant[bool],
    SAVE: ct.Constant[bool],
):
    """y = x · rstd · (w + offset) + b on one chunk, rstd from the partial sums of squares."""
    row = first + ct.bid(0) // CHUNKS
    chunk = ct.bid(0) % CHUNKS
    cols = columns(chunk * TILE, TILE)
    mask = inside(X, cols, CHUNKS * TILE, N, ALIGNED)
    x = read(X, row, cols, mask).astype(ct.float32)
    squares = ct.gather(SQUARES, (row, ct.arange(PADDED_CHUNKS, dtype=ct.int32)))
    rstd = ct.rsqrt(ct.sum(squares) / N + eps)
    y = x * rstd
    if WEIGHT:
        y = y * scale(W, cols, mask, OFFSET)
    if BIAS:
        y = y + read_vector(B, cols, mask)
    write(Y, row, cols, y, mask)
    if SAVE:
        ct.scatter(RSTD, (row,), rstd, mask=chunk == 0)


@ct.kernel
def wide_dots(
    X,
    DY,
    W,
    RSTD,
    DOTS,
    PARTIALS,
    rows: int,
    N: ct.Constant[int],
    CHUNKS: ct.Constant[int],
    TILE: ct.Constant[int],
    ALIGNED: ct.Constant[bool],
    OFFSET: ct.Constant[float],
    WEIGHT: ct.Constant[bool],
    NEED_DX: ct.Constant[bool],
    NEED_DW: ct.Constant[bool],
    NEED_DB: ct.Constant[bool],
):
    """dots[r, j] = Σ g · x̂ over chunk j of row r, and a group's sums over rows of dy · x̂ and dy.

    A block owns one chunk of every row of a group: rows group, group + groups, … DOTS
    (rows, CHUNKS) float32; PARTIALS (outputs · groups, N) float32, as in norm_backward.
    """
    chunk = ct.bid(0) % CHUNKS
    group = ct.bid(0) // CHUNKS
    groups = ct.num_blocks(0) // CHUNKS
    cols = columns(chunk * TILE, TILE)
    mask = inside(X, cols, CHUNKS * TILE, N, ALIGNED)
    if WEIGHT and NEED_DX:
        w = scale(W, cols, mask, OFFSET)
    dw = ct.zeros((1, TILE), dtype=ct.float32)
    db = ct.zeros((1, TILE), dtype=ct.float32)
    for row in range(group, rows, groups):
        x_hat = read(X, row, cols, mask).astype(ct.float32)
        x_hat = x_hat * ct.gather(RSTD, (row,), check_bounds=False)
        dy = read(DY, row, cols, mask).astype(ct.float32)
        if NEED_DX:
            g = dy * w if WEIGHT else dy
            ct.scatter(DOTS, (row, chunk), ct.sum(g * x_hat), check_bounds=False)
        if NEED_DW:
            dw = dw + dy * x_hat
        if NEED_DB:
            db = db + dy
    if NEED_DW:
        write(PARTIALS, group, cols, dw, mask)
    if NEED_DB:
        write(PARTIALS, group + groups if NEED_DW else group, cols, db, mask)


@ct.kernel
def wide_backward(
    X,
    DY,
    W,
    RSTD,
    DOTS,
    DX,
    first: int,
    N: ct.Constant[int],
    CHUNKS: ct.Constant[int],
    PADDED_CHUNKS: ct.Constant[int],
    TILE: ct.Constant[int],
    ALIGNED: ct.Constant[bool],
    OFFSET: ct.Constant[float],
    WEIGHT: ct.Constant[bool],
):
    """dx = rstd · (g − x̂ · mean(g · x̂)) on one chunk, the mean from the partial dots."""
    row = first + ct.bid(0) // CHUNKS
    chunk = ct.bid(0) % CHUNKS
    cols = columns(chunk * TILE, TILE)
    mask = inside(X, cols, CHUNKS * TILE, N, ALIGNED)
    rstd = ct.gather(RSTD, (row,), check_bounds=False)
    x_hat = read(X, row, cols, mask).astype(ct.float32) * rstd
    g = read(DY, row, cols, mask).astype(ct.float32)
    if WEIGHT:
        g = g * scale(W, cols, mask, OFFSET)
    dots = ct.gather(DOTS, (row, ct.arange(PADDED_CHUNKS, dtype=ct.int32)))
    write(DX, row, cols, (g - x_hat * (ct.sum(dots) / N)) * rstd, mask)
