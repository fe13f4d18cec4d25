"""Arrays: races between blocks, and overlap of arguments."""

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


class Array(ct.Array):
    """An array in global memory, with the last block that accessed each element.

    Elements are given by their offsets from the first one. launch: has the number of the block that
    runs, and the count of blocks.
    """

    # These slots override ct.Array's properties, which work only in the compiler.
    __slots__ = ("aliases", "data", "dtype", "flat", "last_blocks", "launch", "name", "ndim")
    __slots__ += ("shape", "strides")

    def __init__(self, name: str, data: torch.Tensor, launch):
        self.name, self.data, self.ndim, self.launch = name, data, data.ndim, launch
        self.dtype = dtypes.TILE_DTYPE[data.dtype]
        for of, values in (("shape", data.shape), ("strides", data.stride())):
            if any(v > INT32_MAX for v in values):
                raise OverflowError(f"{of} {tuple(values)} of '{name}' exceed int32")
            setattr(self, of, tuple(scalar(v, ct.int32) for v in values))
        ends = [(n - 1) * s for n, s in zip(data.shape, data.stride(), strict=True)]
        self.flat = data.as_strided((1 + sum(ends) if data.numel() else 0,), (1,))
        self.aliases: list[str] = []
        self.last_blocks: dict[str, torch.Tensor] = {}

    def load(self, offsets: torch.Tensor) -> torch.Tensor:
        self.launch.check_turn("reads", f"'{self.name}'")
        if self.launch.count > 1:
            self._check_race(offsets, "write", "reads")
            self._check_race(offsets, "atomic", "reads")
            self._record_access(offsets, "read")
        return read(self.flat, offsets)

    def store(self, offsets: torch.Tensor, values: torch.Tensor) -> None:
        self.launch.check_turn("writes", f"'{self.name}'")
        self._check_aliases()
        if has_duplicates(offsets):
            raise InterpreterError(f"one store writes an element of '{self.name}' twice")
        if self.launch.count > 1:
            for access in ("write", "atomic", "read"):
                self._check_race(offsets, access, "writes")
            self._record_access(offsets, "write")
        write(self.flat, offsets, values)

    def update(self, offsets: torch.Tensor, function, values) -> torch.Tensor:
        """Make each element function(element, value), in the order of the offsets.

        Returns the old elements.
        """
        self.launch.check_turn("updates", f"'{self.name}'")
        self._check_aliases()
        if self.launch.count > 1:
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
        last_blocks = self.last_blocks.get(access)
        if last_blocks is None:
            last_blocks = torch.full(self.flat.shape, NO_BLOCK, dtype=torch.int32)
            self.last_blocks[access] = last_blocks
        # Below PyTorch's dispatcher, what is stored has to have the dtype of where it is stored.
        current = torch.tensor(self.launch.number, dtype=torch.int32)
        if access == "write":
            write(last_blocks, offsets, current)
            return
        old = read(last_blocks, offsets)
        shared = (old != NO_BLOCK) & (old != current)
        if shared.any():
            current = torch.where(shared, SEVERAL_BLOCKS, current).to(torch.int32)
        write(last_blocks, offsets, current)

    def _check_race(self, offsets: torch.Tensor, access: str, verb: str) -> None:
        if access not in self.last_blocks:
            return
        last_blocks = read(self.last_blocks[access], offsets)
        foreign = last_blocks[(last_blocks != NO_BLOCK) & (last_blocks != self.launch.number)]
        if foreign.numel():
            done = {"write": "wrote", "read": "read", "atomic": "updated"}[access]
            other = next((b for b in foreign.tolist() if b != SEVERAL_BLOCKS), "more than one")
            raise InterpreterError(
                f"block {self.launch.number} {verb} an element of '{self.name}' that another"
                f" block ({other}) {done}"
            )


def find_aliases(arrays: list[Array]) -> None:
    """Add to each array's aliases the names of those that share an element with it."""
    views = [array.data.view(BITS[array.data.itemsize]).numpy() for array in arrays]
    for (a, x), (b, y) in combinations(zip(arrays, views, strict=True), 2):
        if np.shares_memory(x, y):
            a.aliases.append(b.name)
            b.aliases.append(a.name)
