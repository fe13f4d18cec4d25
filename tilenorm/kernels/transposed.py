"""A matrix, or its normalised rows, transposed and written as 8-bit floats with scales.

The weight gradient of a linear after a norm multiplies along the rows of x, so that the elements
that share a scale come from consecutive rows and one column.
"""

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from .constants import Constants, Norm, Quant
from .outputs import affine, scale
from .quantize import factor_of
from .tiles import columns

GROUP = 128  # rows that share a scale


@dataclass(frozen=True)
class Arrays:
    """X (rows, N); W and B (N,); MEAN and RSTD (rows,) float32; Q (N, rows rounded up to whole
    groups) of 8-bit floats; SCALE: every scale in one dimension, float32, those of a group of rows
    one after the other.

    An array that a constant excludes is an empty tuple.
    """

    X: Any
    W: Any
    B: Any
    MEAN: Any
    RSTD: Any
    Q: Any
    SCALE: Any


@ct.kernel
def transposed(
    first: int,
    step: int,
    ARRAYS: tuple,
    rows: int,
    NORM: Constants[Norm],
    NORMALIZED: ct.Constant[bool],
    TILE: ct.Constant[int],
):
    """q[c, r] = y[r, c] · factor of (c, r // 128), with the factors of quantize.factor_of.

    y is x, or, if NORMALIZED, (x − mean) · rstd · (w + offset) + b. Rows past the last have y = 0.
    Block (0, y, z) has tile `first` + z · `step` + y: 128 rows of TILE columns.
    """
    a, norm = Arrays(*ARRAYS), Norm(*NORM)
    i = first + ct.bid(2) * step + ct.bid(1)
    N = a.X.shape[1]
    tiles = ct.cdiv(N, TILE)
    group = i // tiles
    tile = i % tiles
    cols = columns(tile * TILE, TILE)
    # With TMA a block would have 256 threads, and its tile wait in shared memory as well.
    zero = ct.PaddingMode.ZERO
    y = ct.load(a.X, (group, tile), (GROUP, TILE), padding_mode=zero, allow_tma=False)
    if NORMALIZED:
        row = group * GROUP + ct.arange(GROUP, dtype=ct.int32)[:, None]
        y = normalized(a, norm, y, row, rows, cols)
    peak = ct.max(magnitude(y), axis=0, keepdims=True, propagate_nan=True).astype(ct.float32)
    factor = factor_of(Quant(*norm.QUANT), peak)
    q = (y.astype(ct.float32) * factor).astype(a.Q.dtype)
    ct.store(a.Q, (tile, group), ct.transpose(q), allow_tma=False)
    inverse = ct.truediv(1.0, factor)
    ct.scatter(a.SCALE, (group * N + cols,), inverse, mask=cols < N, check_bounds=False)


def magnitude(y):
    """|y|, in 16 bits where y has 16, for the tile to fit. Of float16 the compiler would make a
    float32 and convert it back, element by element.
    """
    if y.dtype == ct.float32:
        return abs(y)
    return ct.bitcast(ct.bitcast(y, ct.int16) & 0x7FFF, y.dtype)


def normalized(a, norm, x, row, rows, cols):
    """y of a tile of x, in x's dtype, and 0 in rows that do not exist."""
    exists = row < rows
    x_hat = x.astype(ct.float32)
    if norm.LAYER:
        x_hat = x_hat - ct.gather(a.MEAN, (row,), mask=exists, check_bounds=False)
    x_hat = x_hat * ct.gather(a.RSTD, (row,), mask=exists, check_bounds=False)
    w = None
    b = None
    inside = cols < a.X.shape[1]
    if norm.WEIGHT:
        w = scale(ct.gather(a.W, (cols,), mask=inside, check_bounds=False), norm.OFFSET)
    if norm.BIAS:
        b = ct.gather(a.B, (cols,), mask=inside, check_bounds=False).astype(ct.float32)
    SAME = norm.WEIGHT and a.W.dtype == x.dtype
    y = affine(x_hat, w, b, norm, x.dtype, SAME)
    return ct.where(exists, y, 0.0).astype(x.dtype)
