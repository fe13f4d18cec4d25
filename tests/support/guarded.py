"""An allocator for what the kernels write: NaN inside, guard bytes before and after."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor

from tilenorm.ops.passes import cutile
from tilenorm.ops.pytorch import torch_private

GUARD = 512  # bytes on either side; CUDA's allocations start at multiples of as many
PATTERN = 0xA5


@contextmanager
def guarded() -> Iterator[None]:
    """In this block tilenorm.ops gets its tensors from this allocator.

    Numbers that a kernel leaves unwritten are NaN, and unwritten integers have the pattern. At the
    end of the block every guard byte must still have the pattern.
    """
    made: list[tuple[Tensor, int]] = []
    with (
        patch.object(torch_private, "empty_strided_cuda", partial(_empty, made, "cuda")),
        patch.object(cutile, "_empty_strided_cpu", partial(_empty, made, "cpu")),
    ):
        yield
    for memory, size in made:
        for side, guard in (("before", memory[:GUARD]), ("after", memory[GUARD + size :])):
            count = int((guard != PATTERN).sum())
            assert not count, f"{count} of {GUARD} bytes {side} a tensor of {size} bytes changed"


def _empty(made: list, device: str, shape: tuple, strides: tuple, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor that starts on GUARD bytes, as one of the real allocator does."""
    count = torch.Size(shape).numel()
    size = count * dtype.itemsize
    memory = torch.full((size + 2 * GUARD,), PATTERN, dtype=torch.uint8, device=device)
    made.append((memory, size))
    tensor = torch.empty(0, dtype=dtype, device=device)
    start = GUARD // dtype.itemsize
    tensor.set_(memory.untyped_storage(), start, torch.Size(shape), tuple(strides))
    return tensor.fill_(torch.nan) if dtype.is_floating_point else tensor
