"""What plans are made of: the calls of kernels, the arrays they take, the gradients asked for.

An array that a flag excludes is passed as ABSENT, and its kernel does not touch it.
"""

from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple, get_type_hints

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
    """A launch template; `take` selects its arrays, which go between `before` and `after`.

    The arrays travel as one argument, and constants in groups: on an H200 the host takes 5.7 µs for
    a launch with tuples and 6.1 µs with flat arguments (bench/results/h200-launch-arguments.md).
    """

    kernel: ct.kernel
    grid: tuple[int, ...]
    before: tuple[Any, ...]
    take: Callable[[tuple], Any]
    after: tuple[Any, ...]
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


def taking(kind: type[NamedTuple], *names: str) -> Callable[[tuple], Any]:
    """A function that selects from arrays of a kind: one array, or a tuple of several."""
    return itemgetter(*map(kind._fields.index, names))


def constants(group: Any) -> tuple:
    """A group of constants (kernels/constants.py) as the tuple that a kernel takes."""
    return tuple(vars(group).values())


def groups(kernel: ct.kernel) -> dict[str, type]:
    """The parameters of a kernel that are groups of constants, and their dataclasses."""
    hints = get_type_hints(kernel._pyfunc, include_extras=True).items()
    metadata = {name: getattr(hint, "__metadata__", ())[-1:] for name, hint in hints}
    return {name: kind for name, found in metadata.items() for kind in found if is_dataclass(kind)}


def constants_of(kernel: ct.kernel, arguments: tuple) -> dict[str, Any]:
    """The compile-time constants of a call, by the names that they have in the kernel."""
    annotated, found = kernel._annotated_function, {}
    kinds = groups(kernel)
    nodes = annotated.parameter_annotations
    for name, node, value in zip(annotated.pysig.parameters, nodes, arguments, strict=True):
        if name in kinds:
            found |= vars(kinds[name](*value))
        elif node.constant:
            found[name] = value
    return found


def bound(launches: Sequence[Launch], arrays: tuple) -> list[Call]:
    """The calls of launches with these arrays."""
    return [
        Call(kernel, grid, (*before, take(arrays), *after), overlap)
        for kernel, grid, before, take, after, overlap in launches
    ]


def launch(stream: int, launches: Sequence[Launch], arrays: tuple) -> None:
    """Queue launches with these arrays on a CUDA stream of the current device."""
    for kernel, grid, before, take, after, overlap in launches:
        arguments = (*before, take(arrays), *after)
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
