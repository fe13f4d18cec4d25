"""Backward: a persistent grid walks over the rows and adds up its share of dW and dB in registers.

A row is cut into SEGMENTS, tiles whose widths are powers of two in descending order, so that
N = 12288 is 8192 + 4096 and no lane is idle.
"""

import cuda.tile as ct

from .formula import silu, silu_slope
from .rows import (
    both,
    columns,
    inside,
    leading,
    read,
    read_parameter,
    scale,
    tile_place,
    write,
    write_partial,
)


def segments(WIDTHS):
    """(index, first column, width) of each segment."""
    found = ()
    start = 0
    for width in WIDTHS:
        found += ((len(found), start, width),)
        start += width
    return found


def tma_load(X, i, place, start, WIDTH):
    """A segment of row i."""
    if X.ndim == 2:
        return ct.load(X, (i, start // WIDTH), (1, WIDTH), padding_mode=ct.PaddingMode.ZERO)
    index = leading(X, place) + (start // WIDTH,)
    return ct.load(X, index, (1, 1, WIDTH), padding_mode=ct.PaddingMode.ZERO).reshape((1, WIDTH))


def gather_rows(inputs, numbers, place, rows, N, WIDTHS, ALIGNED):
    """The segments of each input, zero past the last row and column, and each number of a row."""
    in_rows = place[0] < rows
    tiles = ()
    for X in ct.static_iter(inputs):
        found = ()
        for _, start, width in ct.static_iter(segments(WIDTHS)):
            cols = columns(start, width)
            mask = both(in_rows, inside(X, cols, start + width, N, ALIGNED))
            found += (read(X, place, cols, mask),)
        tiles += (found,)
    found = ()
    for NUMBERS in ct.static_iter(numbers):
        found += (ct.gather(NUMBERS, (place[0],), mask=in_rows, check_bounds=False),)
    return tiles, found


def load_row(inputs, numbers, i, place, WIDTHS):
    """The same of row i, by tile loads."""
    tiles = ()
    for X in ct.static_iter(inputs):
        found = ()
        for _, start, width in ct.static_iter(segments(WIDTHS)):
            found += (tma_load(X, i, place, start, width),)
        tiles += (found,)
    found = ()
    for NUMBERS in ct.static_iter(numbers):
        found += (ct.gather(NUMBERS, (place[0],), check_bounds=False),)
    return tiles, found


@ct.kernel
def norm_backward(
    X,
    DY,
    GATE,
    DSUM,
    W,
    B,
    MEAN,
    RSTD,
    DX,
    DRESIDUAL,
    DGATE,
    PARTIALS,
    rows: int,
    N: ct.Constant[int],
    HEADS: ct.Constant[int],
    TILE_ROWS: ct.Constant[int],
    TILE_HEADS: ct.Constant[int],
    WIDTHS: ct.Constant[tuple[int, ...]],
    TMA: ct.Constant[bool],
    ALIGNED: ct.Constant[bool],
    LAYER: ct.Constant[bool],
    GATED: ct.Constant[bool],
    GATE_FIRST: ct.Constant[bool],
    WEIGHT: ct.Constant[bool],
    BIAS: ct.Constant[bool],
    OFFSET: ct.Constant[float],
    NEED_DX: ct.Constant[bool],
    NEED_DW: ct.Constant[bool],
    NEED_DB: ct.Constant[bool],
    NEED_DRESIDUAL: ct.Constant[bool],
    NEED_DGATE: ct.Constant[bool],
    ADD_DSUM: ct.Constant[bool],
):
    """dx = rstd · (g − x̂ · mean(g · x̂) − mean(g)), g = dy · (w + offset), x̂ = (x − mean) · rstd.

    mean and mean(g) are 0 unless LAYER. The sums over rows are dW = Σ dy · x̂ and dB = Σ dy.
    ADD_DSUM: dx grows by dsum; it is both the gradient of the input and that of the residual, each
    in its own dtype. GATED: dy is dy · silu(gate) throughout, and dgate = dy · ŷ · silu'(gate) with
    ŷ = x̂ · (w + offset) + b; if GATE_FIRST, x is x · silu(gate) throughout, dgate = dx · x ·
    silu'(gate), and then dx is dx · silu(gate).

    X, DY, GATE, DSUM (..., N), W and B (N,) or (HEADS, N), MEAN and RSTD (rows,) float32, DX,
    DRESIDUAL, DGATE (rows, N). Block b writes its sums over rows to PARTIALS (outputs · blocks, N)
    float32: that of dW to row b, that of dB behind all of dW's. With HEADS, PARTIALS is
    (outputs · n, HEADS · N), and a group of blocks, one for each part of the heads, writes rows.
    """
    b = ct.bid(0)
    step = ct.num_blocks(0)
    through_norm = NEED_DX or NEED_DRESIDUAL or (NEED_DGATE and GATE_FIRST)
    gate_after = GATED and not GATE_FIRST
    sum_rows = TILE_ROWS if HEADS > 0 else 1  # rows of a block's sums
    ws = ()
    bs = ()
    dws = ()
    dbs = ()
    home = tile_place(b, sum_rows, HEADS, TILE_HEADS)
    for _, start, width in ct.static_iter(segments(WIDTHS)):
        cols = columns(start, width)
        in_row = inside(X, cols, start + width, N, ALIGNED)
        if WEIGHT and (through_norm or NEED_DGATE):
            ws += (scale(W, home, cols, in_row, OFFSET),)
        if BIAS and gate_after and NEED_DGATE:
            bs += (read_parameter(B, home, cols, in_row),)
        if NEED_DW:
            dws += (ct.zeros((sum_rows, width), dtype=ct.float32),)
        if NEED_DB:
            dbs += (ct.zeros((sum_rows, width), dtype=ct.float32),)

    inputs = (X, DY)
    if GATED:
        inputs += (GATE,)
    if ADD_DSUM:
        inputs += (DSUM,)
    numbers = (RSTD, MEAN) if LAYER else (RSTD,)

    # Gathered rows are fetched one tile ahead; TMA loads the compiler runs ahead by itself.
    if not TMA:
        there = tile_place(b, TILE_ROWS, HEADS, TILE_HEADS)
        ahead = gather_rows(inputs, numbers, there, rows, N, WIDTHS, ALIGNED)

    for i in range(b, tiles_of(rows, HEADS, TILE_ROWS, TILE_HEADS), step):
        place = tile_place(i, TILE_ROWS, HEADS, TILE_HEADS)
        in_rows = place[0] < rows if TILE_ROWS > 1 and TILE_HEADS != TILE_ROWS else None
        if TMA:
            tiles, stats = load_row(inputs, numbers, i, place, WIDTHS)
        else:
            tiles, stats = ahead
            there = tile_place(i + step, TILE_ROWS, HEADS, TILE_HEADS)
            ahead = gather_rows(inputs, numbers, there, rows, N, WIDTHS, ALIGNED)

        dot = ct.zeros((TILE_ROWS, 1), dtype=ct.float32)
        total = ct.zeros((TILE_ROWS, 1), dtype=ct.float32)
        x_hats = ()
        gs = ()
        new_dws = ()
        new_dbs = ()
        for j, start, width in ct.static_iter(segments(WIDTHS)):
            x = tiles[0][j].astype(ct.float32)
            dy = tiles[1][j].astype(ct.float32)
            if GATED and GATE_FIRST:
                x = x * silu(tiles[2][j].astype(ct.float32))
            x_hat = (x - stats[1]) * stats[0] if LAYER else x * stats[0]
            if gate_after:
                gate = tiles[2][j].astype(ct.float32)
                if NEED_DGATE:
                    y = x_hat * ws[j] if WEIGHT else x_hat
                    if BIAS:
                        y = y + bs[j]
                    cols = columns(start, width)
                    mask = both(in_rows, inside(X, cols, start + width, N, ALIGNED))
                    write(DGATE, place, cols, dy * y * silu_slope(gate), mask)
                dy = dy * silu(gate)
            if through_norm:
                g = dy * ws[j] if WEIGHT else dy
                dot += ct.sum(x_hat * g, axis=1, keepdims=True)
                if LAYER:
                    total += ct.sum(g, axis=1, keepdims=True)
                x_hats += (x_hat,)
                gs += (g,)
            if NEED_DW:
                new_dws += (dws[j] + add_rows(dy * x_hat, TILE_ROWS, HEADS),)
            if NEED_DB:
                new_dbs += (dbs[j] + add_rows(dy, TILE_ROWS, HEADS),)
        dws = new_dws
        dbs = new_dbs

        if through_norm:
            for j, start, width in ct.static_iter(segments(WIDTHS)):
                cols = columns(start, width)
                mask = both(in_rows, inside(X, cols, start + width, N, ALIGNED))
                dx = gs[j] - x_hats[j] * (dot / N)
                if LAYER:
                    dx = dx - total / N
                dx = dx * stats[0]
                if GATED and GATE_FIRST:
                    gate = tiles[2][j].astype(ct.float32)
                    if NEED_DGATE:
                        x = tiles[0][j].astype(ct.float32)
                        write(DGATE, place, cols, dx * x * silu_slope(gate), mask)
                    dx = dx * silu(gate)
                if ADD_DSUM:
                    dx = dx + tiles[-1][j].astype(ct.float32)
                if NEED_DX:
                    write(DX, place, cols, dx, mask)
                if NEED_DRESIDUAL:
                    write(DRESIDUAL, place, cols, dx, mask)

    # The rows of partial sums of one output: a block has one, or a group of blocks shares some.
    partial_rows = step * TILE_ROWS // HEADS if HEADS > 0 else step
    for j, start, width in ct.static_iter(segments(WIDTHS)):
        cols = columns(start, width)
        in_row = inside(X, cols, start + width, N, ALIGNED)
        if NEED_DW:
            write_partial(PARTIALS, 0, home, cols, dws[j], in_row, N)
        if NEED_DB:
            first = partial_rows if NEED_DW else 0
            write_partial(PARTIALS, first, home, cols, dbs[j], in_row, N)


def tiles_of(rows, HEADS, TILE_ROWS, TILE_HEADS):
    """How many tiles `rows` rows make."""
    if HEADS == 0:
        return ct.cdiv(rows, TILE_ROWS)
    return ct.cdiv(rows // HEADS, TILE_ROWS // TILE_HEADS) * (HEADS // TILE_HEADS)


def add_rows(tile, TILE_ROWS, HEADS):
    """Sum over the rows of a tile that share a weight: all of them, or, with heads, none.

    A reduction over one row would move it through shared memory.
    """
    if TILE_ROWS == 1 or HEADS > 0:
        return tile
    return ct.sum(tile, axis=0, keepdims=True)
