"""Rows too wide for one block's registers: two launches over chunks of a row, in each direction.

The first leaves partial sums per (row, chunk), the second adds them up in chunk order and applies
the result. A row's bits depend on the chunk width alone. A launch of one block a chunk starts at
row `first`. Arrays and flags are those of norm_forward and norm_backward.
"""

import cuda.tile as ct

from .formula import center, silu, silu_slope
from .rows import (
    affine,
    columns,
    inside,
    read,
    read_parameter,
    row_place,
    scale,
    write,
    write_partial,
)


@ct.kernel
def wide_moments(
    X,
    RESIDUAL,
    GATE,
    SUM,
    MOMENTS,
    first: int,
    N: ct.Constant[int],
    HEADS: ct.Constant[int],
    CHUNKS: ct.Constant[int],
    TILE: ct.Constant[int],
    ALIGNED: ct.Constant[bool],
    LAYER: ct.Constant[bool],
    ADD: ct.Constant[bool],
    GATE_FIRST: ct.Constant[bool],
):
    """Σ x² over chunk j of row r, to moments[r, j].

    LAYER: the mean of the chunk, to moments[r, j], and Σ (x − that mean)², to moments[r, CHUNKS +
    j]. ADD: x is x + residual, which is written to SUM. GATE_FIRST: x is x · silu(gate).
    """
    place = row_place(first + ct.bid(0) // CHUNKS, HEADS)
    chunk = ct.bid(0) % CHUNKS
    cols = columns(chunk * TILE, TILE)
    mask = inside(X, cols, CHUNKS * TILE, N, ALIGNED)
    x = read(X, place, cols, mask).astype(ct.float32)
    if ADD:
        total = (x + read(RESIDUAL, place, cols, mask).astype(ct.float32)).astype(SUM.dtype)
        write(SUM, place, cols, total, mask)
        x = total.astype(ct.float32)
    if GATE_FIRST:
        x = x * silu(read(GATE, place, cols, mask).astype(ct.float32))
    if LAYER:
        count = ct.minimum(N - chunk * TILE, TILE)
        EXACT = X.dtype == ct.float32 or (ADD and SUM.dtype == ct.float32)
        _, mean, variance = center((x,), (mask,), count, EXACT)
        ct.scatter(MOMENTS, (place[0], chunk), mean.item(), check_bounds=False)
        squares = variance.item() * count
        ct.scatter(MOMENTS, (place[0], CHUNKS + chunk), squares, check_bounds=False)
    else:
        ct.scatter(MOMENTS, (place[0], chunk), ct.sum(x * x), check_bounds=False)


@ct.kernel
def wide_forward(
    X,
    GATE,
    W,
    B,
    MOMENTS,
    Y,
    MEAN,
    RSTD,
    first: int,
    eps: float,
    N: ct.Constant[int],
    HEADS: ct.Constant[int],
    CHUNKS: ct.Constant[int],
    PADDED_CHUNKS: ct.Constant[int],
    TILE: ct.Constant[int],
    ALIGNED: ct.Constant[bool],
    LAYER: ct.Constant[bool],
    GATED: ct.Constant[bool],
    GATE_FIRST: ct.Constant[bool],
    WEIGHT: ct.Constant[bool],
    BIAS: ct.Constant[bool],
    OFFSET: ct.Constant[float],
    EARLY: ct.Constant[bool],
    SAVE: ct.Constant[bool],
):
    """y = (x − mean) · rstd · (w + offset) + b on one chunk, from the moments of all chunks.

    X is the sum where a residual was added.
    """
    place = row_place(first + ct.bid(0) // CHUNKS, HEADS)
    chunk = ct.bid(0) % CHUNKS
    cols = columns(chunk * TILE, TILE)
    mask = inside(X, cols, CHUNKS * TILE, N, ALIGNED)
    x = read(X, place, cols, mask).astype(ct.float32)
    if GATED:
        gate = read(GATE, place, cols, mask).astype(ct.float32)
        if GATE_FIRST:
            x = x * silu(gate)
    if LAYER:
        near, offset, variance = combine(MOMENTS, place[0], N, CHUNKS, PADDED_CHUNKS, TILE)
        x = (x - near) - offset
    else:
        variance = chunk_sum(MOMENTS, place[0], 0, CHUNKS, PADDED_CHUNKS) * (1.0 / N)
    rstd = ct.rsqrt(variance + eps)
    w = scale(W, place, cols, mask, OFFSET) if WEIGHT else None
    b = read_parameter(B, place, cols, mask) if BIAS else None
    SAME = WEIGHT and W.dtype == Y.dtype
    y = affine(x * rstd, w, b, Y.dtype, WEIGHT, BIAS, EARLY, SAME)
    if GATED and not GATE_FIRST:
        y = y * silu(gate)
    write(Y, place, cols, y, mask)
    if SAVE:
        ct.scatter(RSTD, (place[0],), rstd, mask=chunk == 0)
        if LAYER:
            ct.scatter(MEAN, (place[0],), near + offset, mask=chunk == 0)


def chunk_values(VALUES, row, part, CHUNKS, PADDED_CHUNKS):
    """Part `part` of what the chunks of a row left, in chunk order, zero past the last."""
    j = ct.arange(PADDED_CHUNKS, dtype=ct.int32)
    return ct.gather(VALUES, (row, part * CHUNKS + j), mask=j < CHUNKS, check_bounds=False)


def chunk_sum(VALUES, row, part, CHUNKS, PADDED_CHUNKS):
    return ct.sum(chunk_values(VALUES, row, part, CHUNKS, PADDED_CHUNKS))


def combine(MOMENTS, row, N, CHUNKS, PADDED_CHUNKS, TILE):
    """(near, offset, variance) of a row, whose mean is near + offset, from those of its chunks.

    near is the first chunk's mean. Differences from it are exact, where a sum of means would lose
    what a large mean has too many digits for. After Chan, Golub and LeVeque (1979).
    """
    j = ct.arange(PADDED_CHUNKS, dtype=ct.int32)
    count = ct.minimum(ct.maximum(N - j * TILE, 0), TILE).astype(ct.float32)
    near = ct.gather(MOMENTS, (row, 0), check_bounds=False)
    apart = chunk_values(MOMENTS, row, 0, CHUNKS, PADDED_CHUNKS) - near
    offset = ct.sum(count * apart) * (1.0 / N)
    apart = apart - offset
    squares = chunk_sum(MOMENTS, row, 1, CHUNKS, PADDED_CHUNKS) + ct.sum(count * apart * apart)
    return near, offset, squares * (1.0 / N)


@ct.kernel
def wide_dots(
    X,
    DY,
    GATE,
    W,
    MEAN,
    RSTD,
    DOTS,
    PARTIALS,
    rows: int,
    N: ct.Constant[int],
    HEADS: ct.Constant[int],
    CHUNKS: ct.Constant[int],
    TILE: ct.Constant[int],
    ALIGNED: ct.Constant[bool],
    LAYER: ct.Constant[bool],
    GATED: ct.Constant[bool],
    GATE_FIRST: ct.Constant[bool],
    WEIGHT: ct.Constant[bool],
    OFFSET: ct.Constant[float],
    NEED_DOTS: ct.Constant[bool],
    NEED_DW: ct.Constant[bool],
    NEED_DB: ct.Constant[bool],
):
    """dots[r, j] = Σ g · x̂ over chunk j of row r, and a group's sums over rows of dy · x̂ and dy.

    LAYER: and dots[r, CHUNKS + j] = Σ g. A block owns one chunk of every row of a group: rows
    group, group + groups, … which, with HEADS, are of one head. DOTS (rows, CHUNKS or twice that)
    float32; PARTIALS as in norm_backward.
    """
    chunk = ct.bid(0) % CHUNKS
    group = ct.bid(0) // CHUNKS
    groups = ct.num_blocks(0) // CHUNKS
    cols = columns(chunk * TILE, TILE)
    mask = inside(X, cols, CHUNKS * TILE, N, ALIGNED)
    home = row_place(group, HEADS)
    if WEIGHT and NEED_DOTS:
        w = scale(W, home, cols, mask, OFFSET)
    dw = ct.zeros((1, TILE), dtype=ct.float32)
    db = ct.zeros((1, TILE), dtype=ct.float32)
    for row in range(group, rows, groups):
        place = row_place(row, HEADS)
        x = read(X, place, cols, mask).astype(ct.float32)
        dy = read(DY, place, cols, mask).astype(ct.float32)
        if GATED:
            gate = silu(read(GATE, place, cols, mask).astype(ct.float32))
            if GATE_FIRST:
                x = x * gate
            else:
                dy = dy * gate
        if LAYER:
            x = x - ct.gather(MEAN, (row,), check_bounds=False)
        x_hat = x * ct.gather(RSTD, (row,), check_bounds=False)
        if NEED_DOTS:
            g = dy * w if WEIGHT else dy
            ct.scatter(DOTS, (row, chunk), ct.sum(g * x_hat), check_bounds=False)
            if LAYER:
                ct.scatter(DOTS, (row, CHUNKS + chunk), ct.sum(g), check_bounds=False)
        if NEED_DW:
            dw = dw + dy * x_hat
        if NEED_DB:
            db = db + dy
    if NEED_DW:
        write_partial(PARTIALS, 0, home, cols, dw, mask, N)
    if NEED_DB:
        partial_rows = groups // HEADS if HEADS > 0 else groups
        first = partial_rows if NEED_DW else 0
        write_partial(PARTIALS, first, home, cols, db, mask, N)


@ct.kernel
def wide_backward(
    X,
    DY,
    GATE,
    DSUM,
    W,
    B,
    MEAN,
    RSTD,
    DOTS,
    DX,
    DRESIDUAL,
    DGATE,
    first: int,
    N: ct.Constant[int],
    HEADS: ct.Constant[int],
    CHUNKS: ct.Constant[int],
    PADDED_CHUNKS: ct.Constant[int],
    TILE: ct.Constant[int],
    ALIGNED: ct.Constant[bool],
    LAYER: ct.Constant[bool],
    GATED: ct.Constant[bool],
    GATE_FIRST: ct.Constant[bool],
    WEIGHT: ct.Constant[bool],
    BIAS: ct.Constant[bool],
    OFFSET: ct.Constant[float],
    NEED_DX: ct.Constant[bool],
    NEED_DRESIDUAL: ct.Constant[bool],
    NEED_DGATE: ct.Constant[bool],
    ADD_DSUM: ct.Constant[bool],
):
    """dx and dgate, as in norm_backward, on one chunk, mean(g · x̂) and mean(g) from the dots."""
    place = row_place(first + ct.bid(0) // CHUNKS, HEADS)
    chunk = ct.bid(0) % CHUNKS
    cols = columns(chunk * TILE, TILE)
    mask = inside(X, cols, CHUNKS * TILE, N, ALIGNED)
    rstd = ct.gather(RSTD, (place[0],), check_bounds=False)
    x = read(X, place, cols, mask).astype(ct.float32)
    g = read(DY, place, cols, mask).astype(ct.float32)
    x_hat = x
    if GATED:
        gate = read(GATE, place, cols, mask).astype(ct.float32)
        if GATE_FIRST:
            x_hat = x * silu(gate)
    if LAYER:
        x_hat = x_hat - ct.gather(MEAN, (place[0],), check_bounds=False)
    x_hat = x_hat * rstd
    if WEIGHT:
        w = scale(W, place, cols, mask, OFFSET)
    if GATED and not GATE_FIRST:
        if NEED_DGATE:
            y = x_hat * w if WEIGHT else x_hat
            if BIAS:
                y = y + read_parameter(B, place, cols, mask)
            write(DGATE, place, cols, g * y * silu_slope(gate), mask)
        g = g * silu(gate)
    if NEED_DX or NEED_DRESIDUAL or (NEED_DGATE and GATE_FIRST):
        if WEIGHT:
            g = g * w
        dx = g - x_hat * (chunk_sum(DOTS, place[0], 0, CHUNKS, PADDED_CHUNKS) * (1.0 / N))
        if LAYER:
            dx = dx - chunk_sum(DOTS, place[0], 1, CHUNKS, PADDED_CHUNKS) * (1.0 / N)
        dx = dx * rstd
        if GATED and GATE_FIRST:
            if NEED_DGATE:
                write(DGATE, place, cols, dx * x * silu_slope(gate), mask)
            dx = dx * silu(gate)
        if ADD_DSUM:
            dx = dx + read(DSUM, place, cols, mask).astype(ct.float32)
        if NEED_DX:
            write(DX, place, cols, dx, mask)
        if NEED_DRESIDUAL:
            write(DRESIDUAL, place, cols, dx, mask)
