"""Backward: a persistent grid walks over the rows and adds up its share of dW and dB in registers.

A row is cut into SEGMENTS, tiles whose widths are powers of two in descending order, so that
N = 12288 is 8192 + 4096 and no lane is idle.
"""

import cuda.tile as ct

from .rows import both, columns, inside, read, row_index, scale, write


def segments(WIDTHS):
    """(index, first column, width) of each segment."""
    found = ()
    start = 0
    for width in WIDTHS:
        found += ((len(found), start, width),)
        start += width
    return found


def tma_load(X, i, start, TILE_ROWS, WIDTH):
    """TILE_ROWS rows from tile i on; one row where the rows of X are not evenly spaced."""
    if X.ndim == 2:
        return ct.load(X, (i, start // WIDTH), (TILE_ROWS, WIDTH), padding_mode=ct.PaddingMode.ZERO)
    index = row_index(X, i) + (start // WIDTH,)
    return ct.load(X, index, (1, 1, WIDTH), padding_mode=ct.PaddingMode.ZERO).reshape((1, WIDTH))


def gather_tile(X, DY, RSTD, i, rows, N, TILE_ROWS, WIDTHS, ALIGNED):
    """x and dy by segment, and rstd, of the rows of tile i; zero past the last row."""
    row = i * TILE_ROWS + ct.arange(TILE_ROWS, dtype=ct.int32)[:, None]
    xs = ()
    dys = ()
    for _, start, width in ct.static_iter(segments(WIDTHS)):
        cols = columns(start, width)
        mask = both(row < rows, inside(X, cols, start + width, N, ALIGNED))
        xs += (read(X, row, cols, mask),)
        dys += (read(DY, row, cols, mask),)
    return xs, dys, ct.gather(RSTD, (row,), mask=row < rows, check_bounds=False)


@ct.kernel
def norm_backward(
    X,
    DY,
    W,
    RSTD,
    DX,
    PARTIALS,
    rows: int,
    N: ct.Constant[int],
    TILE_ROWS: ct.Constant[int],
    WIDTHS: ct.Constant[tuple[int, ...]],
    TMA: ct.Constant[bool],
    ALIGNED: ct.Constant[bool],
    OFFSET: ct.Constant[float],
    WEIGHT: ct.Constant[bool],
    NEED_DX: ct.Constant[bool],
    NEED_DW: ct.Constant[bool],
    NEED_DB: ct.Constant[bool],
):
    """dx = rstd · (g − x̂ · mean(g · x̂)), g = dy · (w + offset), x̂ = x · rstd; Σ dy · x̂; Σ dy.

    X, DY (..., N), W (N,), RSTD (rows,) float32, DX (rows, N). Block b writes its sums over rows
    to PARTIALS (outputs · blocks, N) float32: that of dW to row b, that of dB behind all of dW's.
    """
    b = ct.bid(0)
    step = ct.num_blocks(0)
    ws = ()
    dws = ()
    dbs = ()
    for _, start, width in ct.static_iter(segments(WIDTHS)):
        cols = columns(start, width)
        in_row = inside(X, cols, start + width, N, ALIGNED)
        if WEIGHT and NEED_DX:
            ws += (scale(W, cols, in_row, OFFSET),)
        if NEED_DW:
            dws += (ct.zeros((1, width), dtype=ct.float32),)
        if NEED_DB:
            dbs += (ct.zeros((1, width), dtype=ct.float32),)

    # Gathered rows are fetched one tile ahead; TMA loads the compiler runs ahead by itself.
    if not TMA:
        ahead = gather_tile(X, DY, RSTD, b, rows, N, TILE_ROWS, WIDTHS, ALIGNED)

    for i in range(b, ct.cdiv(rows, TILE_ROWS), step):
        row = i * TILE_ROWS + ct.arange(TILE_ROWS, dtype=ct.int32)[:, None]
        in_rows = row < rows if TILE_ROWS > 1 else None
        if TMA:
            rstd = ct.gather(RSTD, (row,), mask=in_rows, check_bounds=False)
            xs = ()
            dys = ()
            for _, start, width in ct.static_iter(segments(WIDTHS)):
                xs += (tma_load(X, i, start, TILE_ROWS, width),)
                dys += (tma_load(DY, i, start, TILE_ROWS, width),)
        else:
            xs, dys, rstd = ahead
            ahead = gather_tile(X, DY, RSTD, i + step, rows, N, TILE_ROWS, WIDTHS, ALIGNED)

        dot = ct.zeros((TILE_ROWS, 1), dtype=ct.float32)
        x_hats = ()
        gs = ()
        new_dws = ()
        new_dbs = ()
        for j, _, _ in ct.static_iter(segments(WIDTHS)):
            dy = dys[j].astype(ct.float32)
            x_hat = xs[j].astype(ct.float32) * rstd
            if NEED_DX:
                g = dy * ws[j] if WEIGHT else dy
                dot += ct.sum(x_hat * g, axis=1, keepdims=True)
                x_hats += (x_hat,)
                gs += (g,)
            if NEED_DW:
                new_dws += (dws[j] + sum_rows(dy * x_hat, TILE_ROWS),)
            if NEED_DB:
                new_dbs += (dbs[j] + sum_rows(dy, TILE_ROWS),)
        dws = new_dws
        dbs = new_dbs

        if NEED_DX:
            mean = dot / N
            for j, start, width in ct.static_iter(segments(WIDTHS)):
                cols = columns(start, width)
                mask = both(in_rows, inside(X, cols, start + width, N, ALIGNED))
                write(DX, row, cols, (gs[j] - x_hats[j] * mean) * rstd, mask)

    for j, start, width in ct.static_iter(segments(WIDTHS)):
        cols = columns(start, width)
        in_row = inside(X, cols, start + width, N, ALIGNED)
        if NEED_DW:
            write(PARTIALS, b, cols, dws[j], in_row)
        if NEED_DB:
            write(PARTIALS, b + step if NEED_DW else b, cols, dbs[j], in_row)


def sum_rows(tile, TILE_ROWS):
    """Sum over the rows of a tile. A reduction over one row would move it through shared memory."""
    if TILE_ROWS == 1:
        return tile
    return ct.sum(tile, axis=0, keepdims=True)
