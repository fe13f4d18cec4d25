"""Tile: a torch tensor with a cuTile dtype. Also conversions and checks of arguments of ct.*."""

from functools import cache

import cuda.tile as ct
import torch
from cuda.tile._datatype import is_integral, is_signed
from cuda.tile._ir.typing_support import dtype_of_constant_scalar

from . import dtypes


class Tile(ct.Tile):
    """A value in a kernel. It inherits its operators from ct.Tile; they call the ct.* stubs."""

    __slots__ = ("data", "dtype")

    def __init__(self, data: torch.Tensor, dtype: ct.DType):
        self.data = data
        self.dtype = dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def ndim(self) -> int:
        return self.data.ndim

    def __getitem__(self, index) -> "Tile":
        index = index if isinstance(index, tuple) else (index,)
        if any(not (i is None or i is Ellipsis or i == slice(None)) for i in index):
            raise ct.TileTypeError("a tile cannot be indexed; use ct.extract() or item()")
        if sum(isinstance(i, slice) for i in index) > self.ndim:
            raise ct.TileTypeError(f"too many subscripts for {self.describe()}")
        return Tile(self.data[index], self.dtype)

    def __abs__(self):
        return ct.abs(self)

    def __pos__(self):
        return ct.astype(self, ct.int32) if self.dtype == ct.bool_ else self

    def __bool__(self) -> bool:
        if self.data.ndim:
            raise ct.TileTypeError(f"the truth value of a tile of shape {self.shape} is undefined")
        return bool(self.data)

    def __iter__(self):
        raise ct.TileTypeError("a tile cannot be iterated over")

    def _not_constant(self):
        raise ct.TileTypeError(f"expected a compile-time constant, got {self.describe()}")

    __index__ = __int__ = __float__ = __len__ = _not_constant

    def describe(self) -> str:
        return f"<tile[{self.dtype.name}, {self.shape}]>"

    def __format__(self, spec: str) -> str:
        default = ".6f" if self.data.is_floating_point() else "d"
        return _format(self.data.tolist(), spec or default)

    def __repr__(self) -> str:
        return format(self, "")

    __str__ = __repr__


class LoopIndex(Tile):
    """The index of a range() with constant bounds: a tile, but a constant in static expressions."""


def _format(value, spec: str) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_format(v, spec) for v in value) + "]"
    return format(value, spec)


def as_tile(value, name: str = "value") -> Tile:
    """Convert a Python constant to a tile; a tile is returned as it is."""
    if isinstance(value, Tile):
        return value
    if dtypes.is_constant(value):
        dtype = dtype_of_constant_scalar(value)
        return Tile(dtypes.constant(value, dtype), dtype)
    raise ct.TileTypeError(f"expected a tile or a scalar for {name}, got {type(value).__name__}")


def scalar(value: int | float | bool, dtype: ct.DType) -> Tile:
    """A 0-d tile."""
    return Tile(torch.tensor(value, dtype=dtypes.torch_dtype(dtype)), dtype)


def loose_dtype(value):
    """A tile's dtype, or a constant itself. Promotion treats a constant as loosely typed."""
    if dtypes.is_constant(value):
        return value
    if isinstance(value, Tile):
        return value.dtype
    raise ct.TileTypeError(f"expected a tile or a scalar, got {type(value).__name__}")


def operand(value, dtype: ct.DType) -> torch.Tensor:
    """The tensor of a tile or a constant, converted to `dtype`."""
    if isinstance(value, Tile):
        return dtypes.cast(value.data, value.dtype, dtype)
    return dtypes.constant(value, dtype)


def as_int(value, name: str) -> int:
    """The value of an integer constant or a 0-d integer tile."""
    tile = as_tile(value, name)
    if tile.ndim or not is_integral(tile.dtype) or not is_signed(tile.dtype):
        raise ct.TileTypeError(f"{name} must be a signed integer scalar, got {tile.describe()}")
    return int(tile.data)


def constant_int(value, name: str) -> int:
    """Check that a value is a constant integer."""
    if isinstance(value, bool) or not isinstance(value, int):
        got = value.describe() if isinstance(value, Tile) else repr(value)
        raise ct.TileTypeError(f"{name} must be a constant integer, got {got}")
    return value


def constant_shape(shape, name: str = "shape", rank=None) -> tuple[int, ...]:
    """Check that a shape is constant and, as the compiler requires, of powers of two."""
    shape = shape if isinstance(shape, tuple) else (shape,)
    shape = tuple(constant_int(n, f"dimension of {name}") for n in shape)
    if rank is not None and shape and len(shape) != rank:
        raise ct.TileTypeError(f"{name} {shape} must have {rank} dimensions")
    for n in shape:
        if n <= 0 or n & (n - 1):
            raise ct.TileTypeError(f"dimension {n} of {name} {shape} is not a power of two")
    return shape


def normalize_axis(axis, ndim: int) -> int:
    """Check a constant axis, and return it as a non-negative number."""
    axis = constant_int(axis, "axis")
    if not -ndim <= axis < ndim:
        raise ct.TileTypeError(f"axis {axis} is out of range for rank {ndim}")
    return axis % ndim


def broadcast(data: torch.Tensor, shape: tuple[int, ...], name: str) -> torch.Tensor:
    """Expand a tensor to a shape by the compiler's rules."""
    if not dtypes.ops_utils.is_shape_broadcastable_to(data.shape, shape):
        raise ct.TileTypeError(f"{name} of shape {tuple(data.shape)} does not broadcast to {shape}")
    return data.expand(shape)


@cache
def common_shape(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape to which all shapes broadcast."""
    result = ()
    for shape in shapes:
        try:
            result = dtypes.ops_utils.broadcast_shapes2(result, shape)
        except dtypes.ops_utils.BroadcastError as e:
            raise ct.TileTypeError(str(e)) from None
    return result
