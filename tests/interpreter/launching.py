"""launch: run a kernel by calling its Python function once for each block of the grid."""

import builtins
import itertools
import random
import sys
from contextlib import contextmanager
from types import FunctionType

import cuda.tile as ct

from tilenorm import kernels

from . import accesses, arguments, dtypes, reductions, shapes
from .dispatch import Interpreter
from .elementwise import binary
from .tile import LoopIndex, Tile, as_int, loose_dtype, scalar

MAX_GRID_DIMENSION = (1 << 24) - 1


def launch(grid, kernel, args, *, fill=float("nan"), order=None, fuse="", early="") -> None:
    """Run a kernel on CPU tensors, one block after another. It writes its outputs in place.

    Args:
        grid: up to three numbers of blocks. As on a GPU, none may be zero.
        kernel: a function decorated with @ct.kernel.
        args: its arguments, as ct.launch takes them.
        fill: the value of undefined padding. Integer padding is the dtype's largest value if fill
            is positive, else its smallest value.
        order: None runs the blocks by index, "reverse" in reverse, and a seed in a shuffled order.
        fuse: "first" or "second" rounds no product that is added to something: of two products that
            are added, the first or the second. By default every product is rounded.
        early: what a block may do after its grid_dependency_control_wait alone, in a kernel that
            starts before the kernel before it has ended: "access" arrays, or "update" them by
            atomics. By default the kernel starts when the kernel before has ended.

    Raises:
        InterpreterError: the result on a GPU would be undefined (see errors.py).
        NotImplementedError: the interpreter lacks an operation.
        TypeError, OverflowError: where ct.launch raises them.
        ValueError: the grid cannot be launched.
    """
    grid = _check_grid(grid)
    mode = Interpreter(grid, fill, fuse, early)
    bound = arguments.bind(kernel, tuple(args), mode)
    with mode.as_current(), _tile_builtins(kernel._pyfunc):
        for index, block in _blocks(grid, order):
            mode.block, mode.number, mode.waited = block, index, False
            kernel._pyfunc(*bound)


def _check_grid(grid) -> tuple[int, int, int]:
    """The grid with three dimensions. ct.launch or the driver rejects what is refused here."""
    fits = isinstance(grid, tuple) and 1 <= len(grid) <= 3
    if not fits or not all(type(n) is int and 1 <= n <= MAX_GRID_DIMENSION for n in grid):
        raise ValueError(
            f"up to three numbers of blocks from 1 to {MAX_GRID_DIMENSION}, got {grid}"
        )
    return (*grid, 1, 1)[:3]


def _blocks(grid, order):
    """(linear index, block coordinates) of every block, in the order of execution."""
    blocks = [b[::-1] for b in itertools.product(*(range(n) for n in reversed(grid)))]
    blocks = list(enumerate(blocks))
    if order == "reverse":
        blocks.reverse()
    elif isinstance(order, int):
        random.Random(order).shuffle(blocks)
    return blocks


class TileRange:
    """range() with the compiler's typing: bounds and index have one dtype, at least int32."""

    def __init__(self, *bounds):
        self._dtype = ct.int32
        for bound in bounds:
            self._dtype = dtypes.promote(self._dtype, loose_dtype(bound))
        self._values = range(*map(as_int, bounds))
        self._kind = Tile if any(isinstance(b, Tile) for b in bounds) else LoopIndex

    def __iter__(self):
        for value in self._values:
            index = scalar(value, self._dtype)
            yield self._kind(index.data, index.dtype)


def _extremum(fn: str):
    """min or max of tiles, or the builtin of the same name for other values."""
    plain = getattr(builtins, fn)

    def choose(*args, **kwargs):
        if any(isinstance(a, Tile) for a in args):
            return binary(fn, *args, **kwargs)
        return plain(*args, **kwargs)

    return choose


def _static_iter(iterable):
    return [shapes.unwrap_loop_indices(item) for item in iterable]


# Stubs of ct that run on the host without calling the dispatch mode, and builtins.
_STUBS = {"cdiv": lambda x, y: binary("cdiv", x, y), "static_iter": _static_iter}
_BUILTINS = {"range": TileRange, "min": _extremum("min"), "max": _extremum("max")}


@contextmanager
def _tile_builtins(function: FunctionType):
    """Replace stubs of ct, and builtins in a function's module and in those of kernels."""
    modules = [m for name, m in sys.modules.items() if name.startswith(kernels.__name__)]
    replaced = [(vars(ct), _STUBS), (function.__globals__, _BUILTINS)]
    replaced += [(vars(module), _BUILTINS) for module in modules]
    stubs = {name: vars(ct)[name] for name in _STUBS}
    try:
        for namespace, values in replaced:
            namespace.update(values)
        yield
    finally:
        for namespace, values in replaced:
            for name in values:
                namespace.pop(name, None)
        vars(ct).update(stubs)


# These modules register their operations when they are imported.
_OPERATIONS = (accesses, reductions, shapes)
