"""Arrays and the buffers behind them: races between blocks, and overlap of arguments."""

from dataclasses import dataclass
from itertools import combinations

import cuda.tile as ct
import numpy as np
import torch

from . import dtypes
from .errors import InterpreterError
from .tile import scalar

NO_BLOCK, SEVERAL_BLOCKS = -1, -2
INT32_MAX = (1 << 31) - 1
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def indexable(values: torch.Tensor) -> torch.Tensor:
    """The values, or the bytes of 8-bit floats: PyTorch before 2.12 indexes none on the CPU."""
    narrow = values.dtype.is_floating_point and values.dtype.itemsize == 1
    return values.view(torch.uint8) if narrow else values


@dataclass(frozen=True)
class Strided:
    """A strided window of a buffer. The offset counts elements from the buffer's base."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def _view(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.as_strided(self.size, self.stride, flat.storage_offset() + self.offset)

    def read(self, flat: torch.Tensor) -> torch.Tensor:
        return self._view(flat).clone()

    def write(self, flat: torch.Tensor, values) -> None:
        self._view(flat)[...] = values

    def has_duplicates(self) -> bool:
        return any(n > 1 and s == 0 for n, s in zip(self.size, self.stride, strict=True))


@dataclass(frozen=True)
class Scattered:
    """Elements of a buffer, given by their offsets from the buffer's base."""

    offsets: torch.Tensor

    def read(self, flat: torch.Tensor) -> torch.Tensor:
        return indexable(flat)[self.offsets].view(flat.dtype)

    def write(self, flat: torch.Tensor, values) -> None:
        indexable(flat)[self.offsets] = indexable(torch.as_tensor(values, dtype=flat.dtype))

    def has_duplicates(self) -> bool:
        flat = self.offsets.flatten()
        return not bool((flat[1:] > flat[:-1]).all()) and flat.unique().numel() < flat.numel()


@dataclass
class Blocks:
    """The block that is running."""

    count: int = 1
    current: int = 0


class Buffer:
    """The memory of one array argument, with the last block that accessed each element."""

    def __init__(self, name: str, tensor: torch.Tensor, blocks: Blocks):
        self.name = name
        self.blocks = blocks
        self.base = tensor.storage_offset()
        self.span = _span(tensor)
        self.flat = tensor.as_strided((self.span,), (1,), self.base)
        self.aliases: list[str] = []
        self._last_blocks: dict[str, torch.Tensor] = {}

    def load(self, region) -> torch.Tensor:
        if self.blocks.count > 1:
            self._check_race(region, "write", "reads")
            self._check_race(region, "atomic", "reads")
            self._record_access(region, "read")
        return region.read(self.flat)

    def store(self, region, values: torch.Tensor) -> None:
        self._check_aliases()
        if region.has_duplicates():
            raise InterpreterError(f"one store writes an element of '{self.name}' twice")
        if self.blocks.count > 1:
            for access in ("write", "atomic", "read"):
                self._check_race(region, access, "writes")
            self._record_access(region, "write")
        region.write(self.flat, values)

    def update(self, offsets: torch.Tensor, function, values) -> torch.Tensor:
        """Make each element function(element, value), in the order of the offsets.

        Returns the old elements.
        """
        self._check_aliases()
        region = Scattered(offsets)
        if self.blocks.count > 1:
            self._check_race(region, "write", "updates")
            self._record_access(region, "atomic")
        if region.has_duplicates():
            old = torch.empty(offsets.shape, dtype=self.flat.dtype)
            for i, offset in enumerate(offsets.tolist()):
                old[i] = self.flat[offset]
                self.flat[offset] = function(old[i], values[i])
        else:
            old = region.read(self.flat)
            region.write(self.flat, function(old, values))
        return old

    def _check_aliases(self) -> None:
        if self.aliases:
            raise InterpreterError(f"'{self.name}' is written and overlaps '{self.aliases[0]}'")

    def _record_access(self, region, access: str) -> None:
        last_blocks = self._last_blocks.get(access)
        if last_blocks is None:
            last_blocks = torch.full((self.span,), NO_BLOCK, dtype=torch.int32)
            self._last_blocks[access] = last_blocks
        # Below PyTorch's dispatcher, what is stored has to have the dtype of where it is stored.
        current = torch.tensor(self.blocks.current, dtype=torch.int32)
        if access == "write":
            region.write(last_blocks, current)
            return
        old = region.read(last_blocks)
        shared = (old != NO_BLOCK) & (old != current)
        if shared.any():
            current = torch.where(shared, SEVERAL_BLOCKS, current).to(torch.int32)
        region.write(last_blocks, current)

    def _check_race(self, region, access: str, verb: str) -> None:
        if access not in self._last_blocks:
            return
        last_blocks = region.read(self._last_blocks[access])
        foreign = last_blocks[(last_blocks != NO_BLOCK) & (last_blocks != self.blocks.current)]
        if foreign.numel():
            done = {"write": "wrote", "read": "read", "atomic": "updated"}[access]
            other = next((b for b in foreign.tolist() if b != SEVERAL_BLOCKS), "more than one")
            raise InterpreterError(
                f"block {self.blocks.current} {verb} an element of '{self.name}' that another"
                f" block ({other}) {done}"
            )


class Array(ct.Array):
    """An array in global memory, over a buffer."""

    # These slots override ct.Array's properties, which work only in the compiler.
    __slots__ = ("buffer", "data", "dtype", "ndim", "shape", "strides")

    def __init__(self, buffer: Buffer, data: torch.Tensor):
        self.buffer, self.data, self.ndim = buffer, data, data.ndim
        self.dtype = dtypes.TILE_DTYPE[data.dtype]
        for name, values in (("shape", data.shape), ("strides", data.stride())):
            if any(v > INT32_MAX for v in values):
                raise OverflowError(f"{name} {tuple(values)} of '{buffer.name}' exceed int32")
            setattr(self, name, tuple(scalar(v, ct.int32) for v in values))

    def window(self, data: torch.Tensor) -> Strided:
        """The region of the buffer that `data`, a view of this array's tensor, covers."""
        offset = data.storage_offset() - self.buffer.base
        return Strided(tuple(data.shape), data.stride(), offset)


def _span(tensor: torch.Tensor) -> int:
    """The number of elements from a tensor's first to its last element in memory."""
    if not tensor.numel():
        return 0
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((n - 1) * s for n, s in strides)


def find_aliases(buffers: list[tuple[Buffer, torch.Tensor]]) -> None:
    """Add to each buffer's aliases the names of the arguments that share an element with it."""
    arrays = [(buffer, tensor.view(BITS[tensor.itemsize]).numpy()) for buffer, tensor in buffers]
    for (a, x), (b, y) in combinations(arrays, 2):
        if np.shares_memory(x, y):
            a.aliases.append(b.name)
            b.aliases.append(a.name)
