"""Tile: a torch tensor with a cuTile dtype; and conversions of what ct.* takes."""

from collections.abc import Callable
from functools import cache

import cuda.tile as ct
import torch
from cuda.tile._ir.typing_support import dtype_of_constant_scalar

from . import dtypes


class Tile(ct.Tile):
    """A value in a kernel. It inherits its operators from ct.Tile; they call the ct.* stubs.

    product: of a product that may be fused with an addition, its value in float64; else None.
    """

    __slots__ = ("data", "dtype", "product")

    def __init__(self, data: torch.Tensor, dtype: ct.DType, product: torch.Tensor | None = None):
        self.data = data
        self.dtype = dtype
        self.product = product

    def reshaped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Tile":
        """What the function makes of the elements, without changing any."""
        product = None if self.product is None else function(self.product)
        return Tile(function(self.data), self.dtype, product)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def ndim(self) -> int:
        return self.data.ndim

    def __getitem__(self, index) -> "Tile":
        """With new axes. Nothing else is an index in a kernel."""
        return self.reshaped(lambda data: data[index])

    def __abs__(self):
        return ct.abs(self)

    def __bool__(self) -> bool:
        return bool(self.data)


class LoopIndex(Tile):
    """The index of a range() with constant bounds: a tile, but a constant in static expressions."""


def as_tile(value) -> Tile:
    """Convert a Python constant to a tile; a tile is returned as it is."""
    if isinstance(value, Tile):
        return value
    dtype = dtype_of_constant_scalar(value)
    return Tile(dtypes.constant(value, dtype), dtype)


def scalar(value: int | float | bool, dtype: ct.DType) -> Tile:
    """A 0-d tile."""
    return Tile(torch.tensor(value, dtype=dtypes.TORCH_DTYPE[dtype]), dtype)


def loose_dtype(value):
    """A tile's dtype, or a constant itself. Promotion treats a constant as loosely typed."""
    return value if dtypes.is_constant(value) else value.dtype


def operand(value, dtype: ct.DType) -> torch.Tensor:
    """The tensor of a tile or a constant, converted to `dtype`."""
    if isinstance(value, Tile):
        return dtypes.cast(value.data, value.dtype, dtype)
    return dtypes.constant(value, dtype)


def as_int(value) -> int:
    """The value of an integer constant or a 0-d integer tile."""
    return int(as_tile(value).data)


@cache
def common_shape(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape to which all shapes broadcast."""
    return tuple(torch.broadcast_shapes(*shapes))
