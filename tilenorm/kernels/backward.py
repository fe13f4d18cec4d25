"""Backward: a persistent grid walks over the rows and adds up its share of dW and dB."""

import cuda.tile as ct

from .exchange import collect_sums, publish
from .formula import again, folded, nothing, silu, silu_slope, sums, unfused, unknown_zero
from .rows import (
    VECTOR,
    both,
    columns,
    inside,
    read_parameter,
    row_place,
    scale,
    tile_place,
    unit,
    write_partial,
)
from .tiles import existing, gather_numbers, gather_tiles, load_tiles, segments, store, tiles_of


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
    SLOTS,
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
    TMA: ct.Constant[bool],
    STORE: ct.Constant[bool],
    PACKED: ct.Constant[bool],
    REREAD: ct.Constant[bool],
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
    With CHUNKS, so many blocks in turn share rows and stand for one block; they share what they
    have of a row's sums by SLOTS. PACKED: x and dy of 16 bits stay in them over the sums. REREAD:
    w is read again in every turn, and dx written last. OVERLAP: this starts ahead of empty slots.
    """
    b = ct.bid(0) // CHUNKS
    chunk = ct.bid(0) % CHUNKS if CHUNKS > 1 else 0
    step = ct.num_blocks(0) // CHUNKS
    through_norm = NEED_DX or NEED_DRESIDUAL or (NEED_DGATE and GATE_FIRST)
    gate_after = GATED and not GATE_FIRST
    # With heads a row of the tile is of the same head in every turn; without, any row will do.
    home = tile_place(b, TILE_ROWS if HEADS > 0 else 1, HEADS, TILE_HEADS)
    TILE = ct.static_eval(sum(WIDTHS))
    UNIT = ct.static_eval(unit(X, ALIGNED) if CHUNKS > 1 else 0)

    def weight(j, chunk, number):
        """w + offset for segment j of a chunk; REREAD: read when the number is known."""
        _, start, width, end = ct.static_eval(segments(WIDTHS, CHUNKS)[j])
        cols = columns(chunk * TILE + start, width)
        mask = inside(X, cols, end, N, ALIGNED)
        if REREAD:
            cols = cols + nothing(number, ct.int32) * VECTOR
        return scale(read_parameter(W, home, cols, mask), OFFSET)

    def weights(chunk):
        ws = ()
        for j, _, _, _ in ct.static_iter(segments(WIDTHS, CHUNKS)):
            ws += (weight(j, chunk, 0.0),)
        return ws

    keeps_weights = WEIGHT and not REREAD
    ws = weights(chunk) if keeps_weights and (through_norm or NEED_DGATE) else ()
    bs = ()
    dws = ()
    dbs = ()
    for _, start, width, end in ct.static_iter(segments(WIDTHS, CHUNKS)):
        cols = columns(chunk * TILE + start, width)
        if BIAS and gate_after and NEED_DGATE:
            bias = read_parameter(B, home, cols, inside(X, cols, end, N, ALIGNED))
            bs += (bias.astype(ct.float32),)
        if NEED_DW:
            dws += (ct.zeros((TILE_ROWS, width), dtype=ct.float32),)
        if NEED_DB:
            dbs += (ct.zeros((TILE_ROWS, width), dtype=ct.float32),)

    inputs = (X, DY)
    if GATED:
        inputs += (GATE,)
    if ADD_DSUM:
        inputs += (DSUM,)
    numbers = (RSTD, MEAN) if LAYER else (RSTD,)

    def gather(i, chunk):
        place = tile_place(i, TILE_ROWS, HEADS, TILE_HEADS)
        in_rows = existing(place, rows, TILE_ROWS, TILE_HEADS)
        left = chunk * TILE
        tiles = gather_tiles(inputs, place, in_rows, left, N, WIDTHS, CHUNKS, ALIGNED)
        return tiles, gather_numbers(numbers, place, in_rows)

    def normalized(x, dy, tiles, stats, j):
        """x̂ and dy of segment j in float32, with what the gate does to them."""
        x = x.astype(ct.float32)
        dy = dy.astype(ct.float32)
        if GATED and GATE_FIRST:
            x = x * silu(tiles[2][j].astype(ct.float32))
        x_hat = (x - stats[1]) * stats[0] if LAYER else x * stats[0]
        if gate_after:
            dy = dy * silu(tiles[2][j].astype(ct.float32))
        return x_hat, dy

    def weighted(dy, j, chunk, ws, number):
        """dy · (w + offset) of segment j of a chunk."""
        if not WEIGHT:
            return dy
        return dy * (weight(j, chunk, number) if REREAD else ws[j])

    def added_up(i, tiles, stats, chunk, ws, dws, dbs):
        """x̂ and g = dy · w of each segment, Σ g · x̂ and Σ g by rows, and the sums over rows."""
        dot = ct.zeros((TILE_ROWS, 1), dtype=ct.float32)
        total = ct.zeros((TILE_ROWS, 1), dtype=ct.float32)
        products = gs = 0.0
        zero = unknown_zero(rows) if CHUNKS > 1 else None
        pairs = ()
        new_dws = ()
        new_dbs = ()
        for j, _, width, _ in ct.static_iter(segments(WIDTHS, CHUNKS)):
            x_hat, dy = normalized(tiles[0][j], tiles[1][j], tiles, stats, j)
            if through_norm:
                g = weighted(dy, j, chunk, ws, ct.astype(i, ct.float32))
                if LAYER and WEIGHT:
                    g = unfused(g, zero)
                pairs += ((x_hat, g),)
                # Segments of one width are added up before a block waits for their sum.
                if width in WIDTHS[:j]:
                    products = products + x_hat * g
                    gs = gs + g
                else:
                    products = unfused(x_hat * g, zero)
                    gs = g
                if width not in WIDTHS[j + 1 :]:
                    if LAYER:
                        more, more_total = sums(folded(products, UNIT), folded(gs, UNIT))
                        total = total + more_total
                    else:
                        more = ct.sum(folded(products, UNIT), axis=1, keepdims=True)
                    dot = dot + more
            if NEED_DW:
                new_dws += (dws[j] + dy * x_hat,)
            if NEED_DB:
                new_dbs += (dbs[j] + dy,)
        return pairs, dot, total, new_dws, new_dbs

    def finish(i, tiles, stats, pairs, dot, total):
        """dx, and the gate's gradient where it depends on dx, of the rows of tile i."""
        place = tile_place(i, TILE_ROWS, HEADS, TILE_HEADS)
        in_rows = existing(place, rows, TILE_ROWS, TILE_HEADS)

        def write_dx(start, cols, mask, width, dx):
            if NEED_DX:
                store(DX, place, start, cols, dx, mask, width, STORE)
            if NEED_DRESIDUAL:
                store(DRESIDUAL, place, start, cols, dx, mask, width, STORE)

        kept = ()
        for j, start, width, end in ct.static_iter(segments(WIDTHS, CHUNKS)):
            cols = columns(chunk * TILE + start, width)
            mask = both(in_rows, inside(X, cols, end, N, ALIGNED))
            x_hat, g = pairs[j]
            if PACKED:
                x = again(tiles[0][j], dot)
                dy = again(tiles[1][j], dot)
                x_hat, dy = normalized(x, dy, tiles, stats, j)
                g = weighted(dy, j, chunk, ws, dot)
            dx = g - x_hat * (dot * (1.0 / N))
            if LAYER:
                dx = dx - total * (1.0 / N)
            dx = dx * stats[0]
            if GATED and GATE_FIRST:
                gate = tiles[2][j].astype(ct.float32)
                if NEED_DGATE:
                    dgate = dx * tiles[0][j].astype(ct.float32) * silu_slope(gate)
                    store(DGATE, place, start, cols, dgate, mask, width, STORE)
                dx = dx * silu(gate)
            if ADD_DSUM:
                dx = dx + tiles[-1][j].astype(ct.float32)
            if not REREAD:
                write_dx(start, cols, mask, width, dx)
            elif NEED_DX and not NEED_DRESIDUAL:
                kept += ((start, cols, mask, width, dx.astype(DX.dtype)),)
            else:
                kept += ((start, cols, mask, width, dx),)
        # A block waits for itself at each write: what is read again is read ahead of all of them.
        for segment in ct.static_iter(kept):
            write_dx(*segment)

    def write_dgate(i, tiles, stats):
        """The gradient of a gate that comes after the norm."""
        place = tile_place(i, TILE_ROWS, HEADS, TILE_HEADS)
        in_rows = existing(place, rows, TILE_ROWS, TILE_HEADS)
        for j, start, width, end in ct.static_iter(segments(WIDTHS, CHUNKS)):
            cols = columns(chunk * TILE + start, width)
            mask = both(in_rows, inside(X, cols, end, N, ALIGNED))
            x_hat = normalized(tiles[0][j], tiles[1][j], tiles, stats, j)[0]
            y = weighted(x_hat, j, chunk, ws, ct.astype(i, ct.float32))
            if BIAS:
                y = y + bs[j]
            dgate = tiles[1][j].astype(ct.float32) * y
            dgate = dgate * silu_slope(tiles[2][j].astype(ct.float32))
            store(DGATE, place, start, cols, dgate, mask, width, STORE)

    def whole(i, dot, total):
        """Σ g · x̂ and Σ g of a row from those of its chunks."""
        mine = (dot.item(), total.item()) if LAYER else (dot.item(),)

        def missing(other):
            tiles, stats = gather(i, other)
            there = weights(other) if keeps_weights else ()
            theirs = added_up(i, tiles, stats, other, there, dws, dbs)
            return (theirs[1].item(), theirs[2].item()) if LAYER else (theirs[1].item(),)

        publish(SLOTS, i, chunk, mine)
        sums = collect_sums(SLOTS, i, len(mine), CHUNKS, PADDED_CHUNKS, POLLS, missing)
        return sums if LAYER else (sums[0], total)

    # Gathered rows are fetched one tile ahead; tile loads the compiler runs ahead by itself.
    count = tiles_of(rows, HEADS, TILE_ROWS, TILE_HEADS)
    if not TMA:
        ahead = gather(b, chunk)
    if OVERLAP and CHUNKS > 1:
        ct.grid_dependency_control_wait()

    for i in range(b, count, step):
        if TMA:
            tiles = load_tiles(inputs, row_place(i, HEADS), WIDTHS)
            stats = gather_numbers(numbers, tile_place(i, 1, HEADS, 1), None)
        else:
            tiles, stats = ahead
            # Past the end it is the last tile of the same heads once more.
            ahead = gather(i + step if i + step < count else i, chunk)
        if gate_after and NEED_DGATE:
            write_dgate(i, tiles, stats)
        pairs, dot, total, dws, dbs = added_up(i, tiles, stats, chunk, ws, dws, dbs)
        if through_norm:
            if CHUNKS > 1:
                dot, total = whole(i, dot, total)
            finish(i, tiles, stats, pairs, dot, total)

    def write_sums(first, tiles):
        for j, start, width, end in ct.static_iter(segments(WIDTHS, CHUNKS)):
            cols = columns(chunk * TILE + start, width)
            in_row = inside(X, cols, end, N, ALIGNED)
            tile = tiles[j]
            if HEADS == 0 and TILE_ROWS > 1:
                tile = ct.sum(tile, axis=0, keepdims=True)
            write_partial(PARTIALS, first, home, cols, tile, in_row, N)

    # The rows of partial sums of one output: a block has one, or a group of blocks shares some.
    partial_rows = step * TILE_ROWS // HEADS if HEADS > 0 else step
    if NEED_DW:
        write_sums(0, dws)
    if NEED_DB:
        write_sums(partial_rows if NEED_DW else 0, dbs)
