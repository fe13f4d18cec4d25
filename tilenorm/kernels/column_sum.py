"""The second half of dW and dB: the sum over the blocks of the backward pass."""

import cuda.tile as ct

from .tiles import columns
from .turns import take_turn


@ct.kernel
def column_sum(
    ARRAYS: tuple,
    count: int,
    TILE_ROWS: ct.Constant[int],
    TILE: ct.Constant[int],
    OVERLAP: ct.Constant[bool],
):
    """out[c] = Σ_r partials[r, c] over `count` rows, in one fixed order.

    ARRAYS: PARTIALS (outputs · count, N) float32, and one or two outputs (N,), each in the dtype of
    its parameter. OVERLAP: see take_turn.
    """
    PARTIALS = ARRAYS[0]
    take_turn(OVERLAP)
    cols = columns(ct.bid(0) * TILE, TILE)
    first_row = ct.bid(1) * count
    total = ct.zeros((TILE_ROWS, TILE), dtype=ct.float32)
    for i in range(ct.cdiv(count, TILE_ROWS)):
        row = i * TILE_ROWS + ct.arange(TILE_ROWS, dtype=ct.int32)[:, None]
        total += ct.gather(PARTIALS, (first_row + row, cols), mask=row < count)
    out = ct.sum(total, axis=0, keepdims=True)
    if len(ARRAYS) == 2 or ct.bid(1) == 0:
        ct.scatter(ARRAYS[1], (cols,), out.astype(ARRAYS[1].dtype))
    else:
        ct.scatter(ARRAYS[2], (cols,), out.astype(ARRAYS[2].dtype))
