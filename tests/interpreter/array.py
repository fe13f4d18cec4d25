"""Array arguments inside a kernel: Array, TiledView and RawMemory, all over a Buffer."""

import cuda.tile as ct
import torch
from cuda.tile._stub import RawArrayMemory

from . import dtypes
from .memory import Buffer, Strided
from .tile import scalar


class Array(ct.Array):
    """An array in global memory: a strided window of a buffer."""

    # These slots override ct.Array's properties, which work only in the compiler.
    __slots__ = (
        "annotation",
        "buffer",
        "data",
        "dtype",
        "index_dtype",
        "ndim",
        "shape",
        "strides",
    )

    def __init__(self, buffer: Buffer, data: torch.Tensor, annotation: ct.ArrayAnnotation):
        self.buffer = buffer
        self.data = data
        self.annotation = annotation
        self.index_dtype = annotation.index_dtype
        self.dtype = dtypes.TILE_DTYPE[data.dtype]
        self.ndim = data.ndim
        self.shape = self._extents(data.shape, annotation.static_shape_dims, "shape")
        self.strides = self._extents(data.stride(), annotation.static_stride_dims, "strides")

    def _extents(self, values, static_dims: tuple[int, ...], name: str) -> tuple:
        """Sizes or strides: constants in the static dimensions, tiles of index_dtype elsewhere."""
        limit = 1 << (self.index_dtype.bitwidth - 1)
        if any(v >= limit for v in values):
            raise OverflowError(
                f"{name} {tuple(values)} of '{self.buffer.name}' exceed {self.index_dtype.name};"
                " annotate the parameter with ct.IndexedWithInt64"
            )
        static = {d % self.ndim for d in static_dims}
        return tuple(
            v if i in static else scalar(v, self.index_dtype) for i, v in enumerate(values)
        )

    def window(self, data: torch.Tensor) -> Strided:
        """The region of the buffer that `data`, a view of this array's tensor, covers."""
        offset = data.storage_offset() - self.buffer.base
        return Strided(tuple(data.shape), data.stride(), offset)

    @property
    def foreign_pointer(self) -> "Array":
        return self


class TiledView(ct.TiledView):
    """An array cut into tiles of one shape."""

    __slots__ = ("array", "dtype", "padding_mode", "tile_shape", "traversal_steps")

    def __init__(self, array: Array, tile_shape, steps, padding_mode):
        self.array = array
        self.dtype = array.dtype
        self.tile_shape = tile_shape
        self.traversal_steps = steps
        self.padding_mode = padding_mode


class RawMemory(RawArrayMemory):
    """An array's memory addressed by element offset from its base pointer."""

    __slots__ = ("array", "dtype")

    def __init__(self, array: Array):
        self.array = array
        self.dtype = array.dtype
