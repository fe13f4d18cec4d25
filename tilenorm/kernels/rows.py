"""How kernels see a matrix of rows.

A place is where rows are: (row,), or, where weights belong to heads, (row, token, head), numbers or
(TILE_ROWS, 1) tiles of them. Inputs have one or two leading dimensions and any strides; outputs are
matrices of consecutive rows.

The compiler adds up a tile in an order that follows the width of its loads. For a row to have the
same bits in every layout that width must depend on N alone. ALIGNED says that N fills 16-byte
vectors: columns are then masked by the constant N, and the host guarantees that every row starts on
16 bytes. Otherwise they are masked by the array's extent, of which the compiler knows nothing, and
every layout is read element by element.
"""

import cuda.tile as ct

VECTOR = 8  # elements of 16 bytes, of the narrowest dtype


def tile_place(i, TILE_ROWS, HEADS, TILE_HEADS):
    """The rows of tile i: consecutive ones, or TILE_HEADS heads of TILE_ROWS / TILE_HEADS tokens.

    TILE_HEADS divides HEADS and TILE_ROWS. A tile's heads repeat every HEADS / TILE_HEADS tiles.
    """
    step = ct.arange(TILE_ROWS, dtype=ct.int32)[:, None]
    if HEADS == 0:
        return (i * TILE_ROWS + step,)
    groups = HEADS // TILE_HEADS
    token = i // groups * (TILE_ROWS // TILE_HEADS) + step // TILE_HEADS
    head = i % groups * TILE_HEADS + step % TILE_HEADS
    return token * HEADS + head, token, head


def row_place(row, HEADS):
    """One row, by its number."""
    if HEADS == 0:
        return (row,)
    return row, row // HEADS, row % HEADS


def leading(X, place):
    """Indices over the leading dimensions of X."""
    if X.ndim == 2:
        return (place[0],)
    if len(place) == 3:
        return place[1:]
    return place[0] // X.shape[1], place[0] % X.shape[1]


def columns(start, WIDTH):
    return start + ct.arange(WIDTH, dtype=ct.int32)[None, :]


def inside(X, cols, END, N, ALIGNED):
    """Which of the columns up to END exist; None when all do."""
    if END <= N:
        return None
    if ALIGNED:
        return cols < N
    return cols < X.shape[X.ndim - 1]


def both(mask, other):
    if mask is None:
        return other
    if other is None:
        return mask
    return mask & other


def unit(X, ALIGNED):
    """How many elements of a row of X a thread reads at once."""
    return 128 // X.dtype.bitwidth if ALIGNED else 1


def read(X, place, cols, mask):
    """Elements of rows of X where the mask is true, zero elsewhere."""
    return ct.gather(X, leading(X, place) + (cols,), mask=mask, check_bounds=False)


def write(X, place, cols, tile, mask):
    ct.scatter(X, (place[0], cols), tile.astype(X.dtype), mask=mask, check_bounds=False)


def read_parameter(W, place, cols, mask):
    """Columns of a weight or bias, (N,) or (HEADS, N), in its own dtype."""
    if W.ndim == 1:
        return ct.gather(W, (cols,), mask=mask, check_bounds=False)
    return ct.gather(W, (place[2], cols), mask=mask, check_bounds=False)


def scale(w, OFFSET):
    """w + offset, in float32."""
    w = w.astype(ct.float32)
    return w + OFFSET if OFFSET != 0.0 else w


def affine(x_hat, w, b, rounded, WEIGHT, BIAS, EARLY, SAME):
    """x̂ · w + b; EARLY rounds to `rounded` before the weight, and, if it is the SAME, after."""
    y = x_hat
    if EARLY:
        y = y.astype(rounded).astype(ct.float32)
    if WEIGHT:
        y = y * w
        if EARLY and SAME:
            y = y.astype(rounded).astype(ct.float32)
    if BIAS:
        y = y + b
    return y


def write_partial(PARTIALS, first, place, cols, tile, mask, N):
    """A block's sums, into one row from `first` on, or into the columns of their heads."""
    if len(place) == 1:
        ct.scatter(PARTIALS, (first + place[0], cols), tile, mask=mask, check_bounds=False)
    else:
        index = (first + place[1], place[2] * N + cols)
        ct.scatter(PARTIALS, index, tile, mask=mask, check_bounds=False)
