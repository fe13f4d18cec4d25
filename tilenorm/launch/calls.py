"""What plans are made of: the calls of kernels, the arrays they take, the gradients asked for.

An array that a flag excludes is passed as ABSENT, and its kernel does not touch it.
"""

from collections.abc import Callable, Sequence
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple

import cuda.tile as ct

from ..spec import NormSpec
from .config import Hints, cdiv
from .disk_cache import Kernel

ABSENT = ()  # takes no room among a kernel's parameters
MAX_GRID = (1 << 24) - 1  # blocks in the first dimension of a cuTile grid
MAX_SIDE = (1 << 16) - 1  # and in each other one, of any grid


class Call(NamedTuple):
    """overlap: may start before the call ahead of it has ended; the kernel waits for its memory."""

    kernel: ct.kernel
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    overlap: bool = False


class Launch(NamedTuple):
    """A call but for its arrays: of these it gets what `take` picks, and `rest` after them."""

    kernel: ct.kernel
    grid: tuple[int, ...]
    take: Callable[[tuple], tuple]
    rest: tuple[Any, ...]
    overlap: bool = False


class Needs(NamedTuple):
    """Which gradients are asked for, and whether one of the sum with the residual comes in."""

    dx: bool
    dw: bool = False
    db: bool = False
    dresidual: bool = False
    dgate: bool = False
    dsum: bool = False

    @property
    def sums(self) -> int:
        """How many sums over rows."""
        return self.dw + self.db


def every_gradient(spec: NormSpec) -> Needs:
    """What a training step asks for; one gradient serves input and residual of one dtype."""
    return Needs(
        dx=True,
        dw=spec.weight is not None,
        db=spec.bias is not None,
        dresidual=spec.residual not in (None, spec.dtype),
        dgate=spec.gate is not None,
        dsum=spec.residual is not None,
    )


class ForwardArrays(NamedTuple):
    """What a forward pass reads and writes, of tensors or their descriptions."""

    x: Any
    y: Any
    weight: Any
    bias: Any
    residual: Any
    gate: Any
    sum: Any
    mean: Any
    rstd: Any
    slots: Any = ABSENT


class BackwardArrays(NamedTuple):
    """What a backward pass reads and writes. x is the sum where a residual was added."""

    x: Any
    dy: Any
    gate: Any
    dsum: Any
    weight: Any
    bias: Any
    mean: Any
    rstd: Any
    dx: Any
    dresidual: Any
    dgate: Any
    partials: Any
    slots: Any
    dw: Any
    db: Any


def taking(kind: type[NamedTuple], *names: str) -> Callable[[tuple], tuple]:
    """What picks these of a kind of arrays."""
    places = [kind._fields.index(name) for name in names]
    return itemgetter(*places) if len(places) > 1 else itemgetter(slice(places[0], places[0] + 1))


def bound(launches: Sequence[Launch], arrays: tuple) -> list[Call]:
    """The calls of launches with these arrays."""
    return [
        Call(kernel, grid, take(arrays) + rest, overlap)
        for kernel, grid, take, rest, overlap in launches
    ]


def launch(stream: int, launches: Sequence[Launch], arrays: tuple) -> None:
    """Queue launches with these arrays on a CUDA stream of the current device."""
    for kernel, grid, take, rest, overlap in launches:
        arguments = take(arrays) + rest
        if overlap:
            ct.launch(stream, grid, kernel, arguments, programmatic_dependent_launch=True)
        else:
            ct.launch(stream, grid, kernel, arguments)


@cache
def hinted(kernel: ct.kernel, hints: Hints) -> ct.kernel:
    """The kernel with hints: kept, because each has what cuTile compiled of it."""
    return Kernel(kernel._pyfunc, **hints.given())


def parts(count: int, most: int) -> list[tuple[int, int]]:
    """(first, count) of each launch, where one reaches at most `most`."""
    if count <= most:
        return [(0, count)]
    return [(first, min(most, count - first)) for first in range(0, count, most)]


def rectangles(count: int) -> list[tuple[int, int, int]]:
    """(first, y, z) of grids of y · z blocks in the second and third dimension."""
    made, first = [], 0
    while first < count:
        z = cdiv(count - first, MAX_SIDE)
        y = (count - first) // z
        made.append((first, y, z))
        first += y * z
    return made
