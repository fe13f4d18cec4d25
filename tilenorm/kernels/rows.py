"""How kernels see a matrix of rows.

The compiler adds up a tile in an order that follows the width of its loads. For a row to have the
same bits in every layout that width must depend on N alone. ALIGNED says that N fills 16-byte
vectors: columns are then masked by the constant N, and the host guarantees that every row starts on
16 bytes. Otherwise they are masked by the array's extent, of which the compiler knows nothing, and
every layout is read element by element.
"""

import cuda.tile as ct


def row_index(X, row):
    """Indices over the leading dimensions of X, one, or two whose rows are not evenly spaced."""
    if X.ndim == 2:
        return (row,)
    return (row // X.shape[1], row % X.shape[1])


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


def read(X, row, cols, mask):
    """Elements (row, cols) of X where the mask is true, zero elsewhere."""
    return ct.gather(X, row_index(X, row) + (cols,), mask=mask, check_bounds=False)


def write(X, row, cols, tile, mask):
    ct.scatter(X, (row, cols), tile.astype(X.dtype), mask=mask, check_bounds=False)


def read_vector(W, cols, mask):
    """Columns of a vector of N elements as a (1, WIDTH) tile of float32."""
    return ct.gather(W, (cols,), mask=mask, check_bounds=False).astype(ct.float32)


def scale(W, cols, mask, OFFSET):
    """w + offset."""
    w = read_vector(W, cols, mask)
    if OFFSET != 0.0:
        w = w + OFFSET
    return w
