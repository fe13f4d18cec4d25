"""Where the scales of a norm with a quantised output lie in memory."""

from typing import NamedTuple

from ..spec import Quantization
from .config import cdiv

TILE_ROWS, TILE_GROUPS = 128, 4  # of a tile of swizzled scales, as in kernels/quantize.py

UNIT = 16  # the array has a multiple of so many elements: the compiler tells other numbers apart


class Scales(NamedTuple):
    """The scales of a number of rows: the array that the kernels write, and the tensor that the
    caller gets. Both start at the same address.
    """

    dtype: str  # of the array: "float32", or "uint8" for powers of two as bytes
    count: int  # the elements of the array
    shape: tuple[int, ...]  # of the tensor
    strides: tuple[int, ...]  # of the tensor
    padding: int = 0  # how many elements of the tensor are no scale

    @classmethod
    def of(cls, how: Quantization, hidden: int, rows: int) -> "Scales":
        """The scales of `rows` rows of `hidden` elements.

        The rows are compared with nothing, because torch.compile may not know their number.
        """
        groups = how.groups(hidden)
        dtype = "uint8" if how.scaling == "mx" else "float32"
        if how.scaling == "tensor":  # the caller's own
            return cls(dtype, 1, (1,), (1,))
        if how.layout == "swizzled":
            tiles = cdiv(rows, TILE_ROWS) * cdiv(groups, TILE_GROUPS)
            count = tiles * TILE_ROWS * TILE_GROUPS
            return cls(dtype, count, (count,), (1,), count - rows * groups)
        if how.layout == "row":
            strides = groups, 1
            count = rows * groups
        else:
            apart = rows if how.layout == "column" else cdiv(rows, 4) * 4
            strides = 1, apart
            count = apart * groups
        return cls(dtype, cdiv(count, UNIT) * UNIT, (rows, groups), strides)
