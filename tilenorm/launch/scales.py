"""Where the scales of a norm with a quantised output lie in memory."""

from typing import NamedTuple

from ..spec import Quantization
from .config import cdiv

TILE_ROWS, TILE_GROUPS = 128, 4  # of a tile of swizzled scales, as in kernels/quantize.py

UNIT = 16  # the array has a multiple of it, so that no number of rows compiles to code of its own


class Scales(NamedTuple):
    """The scales of a number of rows.

    dtype: of the array that the kernels write: "float32", or "uint8" for powers of two as bytes.
    count: its elements. shape, strides: those of the tensor that the caller gets, which starts
    where the array starts. padding: how many elements of that tensor are no scale.
    """

    dtype: str
    count: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: int = 0

    @classmethod
    def of(cls, how: Quantization, hidden: int, rows: int) -> "Scales":
        """Without a comparison, because torch.compile may not know the number of rows."""
        groups = how.groups(hidden)
        if how.scaling == "tensor":  # the caller's own
            return cls(how.scale_dtype, 1, (1,), (1,))
        if how.layout == "swizzled":
            tiles = cdiv(rows, TILE_ROWS) * cdiv(groups, TILE_GROUPS)
            count = tiles * TILE_ROWS * TILE_GROUPS
            return cls(how.scale_dtype, count, (count,), (1,), count - rows * groups)
        if how.layout == "row":
            strides, count = (groups, 1), rows * groups
        else:
            apart = rows if how.layout == "column" else cdiv(rows, 4) * 4
            strides, count = (1, apart), apart * groups
        return cls(how.scale_dtype, cdiv(count, UNIT) * UNIT, (rows, groups), strides)
