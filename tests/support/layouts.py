"""Draws where the elements of a tensor lie in memory."""

from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

VECTOR = 8  # so many elements of each dtype are whole vectors of 16 bytes


class Layout(NamedTuple):
    """Where a tensor lies in a vector of `size` elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    @classmethod
    def contiguous(cls, *shape: int) -> "Layout":
        return cls(shape, torch.empty(shape, device="meta").stride(), 0)

    def view(self, around: Tensor) -> Tensor:
        return around.as_strided(self.shape, self.strides, self.start)

    def filled(self, t: Tensor) -> Tensor:
        """A copy of a tensor in this layout. Between its elements lie NaN."""
        around = torch.full((self.size,), torch.nan, dtype=t.dtype, device=t.device)
        return self.view(around).copy_(t.view(self.shape))

    @property
    def size(self) -> int:
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return self.start + last + 1


def draw(rng: Random, shape: tuple[int, ...], halves: bool) -> Layout:
    """A layout whose rows are not contiguous, not aligned, or not in order in memory.

    halves: the first dimension is cut into two. A vector counts as rows of one element.
    """
    if len(shape) == 1:
        shape, (stride, _), start = draw(rng, (*shape, 1), False)
        return Layout(shape[:1], (stride,), start)
    inner = [1]
    for extent in shape[:1:-1]:
        inner.insert(0, inner[0] * extent)
    rows, row = shape[0], inner[0] * shape[1]
    start, apart = 0, row
    kinds = ("vectors", "whole", "odd", "one element in", "third of three", "columns", "half")
    match rng.choice(kinds):
        case "vectors":
            start, apart = VECTOR, row + 8 * VECTOR
        case "whole":
            apart = -(-row // VECTOR) * VECTOR
        case "odd":
            apart = row + 3
        case "one element in":
            start = 1
        case "third of three":
            start, apart = 2 * row, 3 * row
        case "columns":
            inner, apart = [s * rows for s in inner], 1
        case "half":
            inner, apart = [2 * s for s in inner], 2 * row
    if not halves:
        return Layout(shape, (apart, *inner), start)
    # In turn, row i of the second half follows row i of the first half in memory.
    leading = rng.choice(((apart, 2 * apart), (rows // 2 * apart, apart)))
    return Layout((2, rows // 2, *shape[1:]), (*leading, *inner), start)
