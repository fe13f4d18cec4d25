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


def read(flat: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return indexable(flat)[offsets].view(flat.dtype)


def write(flat: torch.Tensor, offsets: torch.Tensor, values) -> None:
    indexable(flat)[offsets] = indexable(torch.as_tensor(values, dtype=flat.dtype))


def has_duplicates(offsets: torch.Tensor) -> bool:
    flat = offsets.flatten()
    return not bool((flat[1:] > flat[:-1]).all()) and flat.unique().numel() < flat.numel()


@dataclass
class Blocks:
    """The block that is running."""

    count: int = 1
    current: int = 0


class Buffer:
    """The memory of one array argument, with the last block that accessed each element.

    Elements are given by their offsets from the argument's first one.
    """

    def __init__(self, name: str, tensor: torch.Tensor, blocks: Blocks):
        self.name = name
        self.blocks = blocks
        self.span = _span(tensor)
        self.flat = tensor.as_strided((self.span,), (1,))
        self.aliases: list[str] = []
        self._last_blocks: dict[str, torch.Tensor] = {}

    def load(self, offsets: torch.Tensor) -> torch.Tensor:
        if self.blocks.count > 1:
            self._check_race(offsets, "write", "reads")
            self._check_race(offsets, "atomic", "reads")
            self._record_access(offsets, "read")
        return read(self.flat, offsets)

    def store(self, offsets: torch.Tensor, values: torch.Tensor) -> None:
        self._check_aliases()
        if has_duplicates(offsets):
            raise InterpreterError(f"one store writes an element of '{self.name}' twice")
        if self.blocks.count > 1:
            for access in ("write", "atomic", "read"):
                self._check_race(offsets, access, "writes")
            self._record_access(offsets, "write")
        write(self.flat, offsets, values)

    def update(self, offsets: torch.Tensor, function, values) -> torch.Tensor:
        """Make each element function(element, value), in the order of the offsets.

        Returns the old elements.
        """
        self._check_aliases()
        if self.blocks.count > 1:
            self._check_race(offsets, "write", "updates")
            self._record_access(offsets, "atomic")
        if has_duplicates(offsets):
            old = torch.empty(offsets.shape, dtype=self.flat.dtype)
            for i, offset in enumerate(offsets.tolist()):
                old[i] = self.flat[offset]
                self.flat[offset] = function(old[i], values[i])
        else:
            old = read(self.flat, offsets)
            write(self.flat, offsets, function(old, values))
        return old

    def _check_aliases(self) -> None:
        if self.aliases:
            raise InterpreterError(f"'{self.name}' is written and overlaps '{self.aliases[0]}'")

    def _record_access(self, offsets: torch.Tensor, access: str) -> None:
        last_blocks = self._last_blocks.get(access)
        if last_blocks is None:
            last_blocks = torch.full((self.span,), NO_BLOCK, dtype=torch.int32)
            self._last_blocks[access] = last_blocks
        # Below PyTorch's dispatcher, what is stored has to have the dtype of where it is stored.
        current = torch.tensor(self.blocks.current, dtype=torch.int32)
        if access == "write":
            write(last_blocks, offsets, current)
            return
        old = read(last_blocks, offsets)
        shared = (old != NO_BLOCK) & (old != current)
        if shared.any():
            current = torch.where(shared, SEVERAL_BLOCKS, current).to(torch.int32)
        write(last_blocks, offsets, current)

    def _check_race(self, offsets: torch.Tensor, access: str, verb: str) -> None:
        if access not in self._last_blocks:
            return
        last_blocks = read(self._last_blocks[access], offsets)
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
