"""The second half of dW and dB: the sum over the blocks of the backward pass."""

import cuda.tile as ct

from .rows import columns


@ct.kernel
def column_sum(
    PARTIALS,
    FIRST,
    SECOND,
    count: int,
    OUTPUTS: ct.Constant[int],
    TILE_ROWS: ct.Constant[int],
    TILE: ct.Constant[int],
    OVERLAP: ct.Constant[bool],
):
    """out[c] = Σ_r partials[r, c] over `count` rows, in one fixed order.

    PARTIALS (OUTPUTS · count, N) float32; FIRST and SECOND (N,) in the parameter's own dtype.
    OVERLAP: may start before the kernel that leaves the partial sums has ended.
    """
    if OVERLAP:
        ct.grid_dependency_control_wait()
    cols = columns(ct.bid(0) * TILE, TILE)
    first_row = ct.bid(1) * count
    total = ct.zeros((TILE_ROWS, TILE), dtype=ct.float32)
    for i in range(ct.cdiv(count, TILE_ROWS)):
        row = i * TILE_ROWS + ct.arange(TILE_ROWS, dtype=ct.int32)[:, None]
        total += ct.gather(PARTIALS, (first_row + row, cols), mask=row < count)
    out = ct.sum(total, axis=0, keepdims=True)
    if OUTPUTS == 1 or ct.bid(1) == 0:
        ct.scatter(FIRST, (cols,), out.astype(FIRST.dtype))
    else:
        ct.scatter(SECOND, (cols,), out.astype(SECOND.dtype))
