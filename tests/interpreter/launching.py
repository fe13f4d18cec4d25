"""launch: run a kernel by calling its Python function once for each block of the grid."""

import builtins
import itertools
import random
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType

import cuda.tile as ct

from . import accesses, arguments, dtypes, reductions, shapes
from .dispatch import Interpreter
from .elementwise import binary
from .tile import LoopIndex, Tile, as_int, loose_dtype, scalar

MAX_GRID_DIMENSION = (1 << 24) - 1


def launch(grid, kernel, args, *, fill=float("nan"), order=None) -> None:
    """Run a kernel on CPU tensors, one block after another. It writes its outputs in place.

    Args:
        grid: up to three numbers of blocks. As on a GPU, none may be zero.
        kernel: a function decorated with @ct.kernel.
        args: its arguments, as ct.launch takes them.
        fill: the value of undefined padding. Integer padding is the dtype's largest value if fill
            is positive, else its smallest value.
        order: None runs the blocks by index, "reverse" in reverse, and a seed in a shuffled order.

    Raises:
        InterpreterError: the result on a GPU would be undefined (see errors.py).
        NotImplementedError: the interpreter lacks an operation.
        TypeError, OverflowError: where ct.launch raises them.
        ValueError: the grid cannot be launched.
    """
    grid = _check_grid(grid)
    mode = Interpreter(grid, fill)
    bound = arguments.bind(kernel, tuple(args), mode.blocks)
    with mode.as_current(), _tile_builtins(kernel._pyfunc):
        for index, block in _blocks(grid, order):
            mode.block, mode.blocks.current = block, index
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


# Stubs that run on the host without calling the dispatch mode, and their replacements.
HOST_STUBS = {ct.cdiv: lambda x, y: binary("cdiv", x, y), ct.static_iter: _static_iter}
_BUILTINS = {"range": TileRange, "min": _extremum("min"), "max": _extremum("max")}


@contextmanager
def _tile_builtins(function: FunctionType):
    """Replace host stubs, range, min and max in every module whose functions the kernel calls."""
    saved = []

    def replace(namespace: dict, name: str, value) -> None:
        saved.append((namespace, name, name in namespace, namespace.get(name)))
        namespace[name] = value

    for namespace in (vars(ct), *_namespaces(function)):
        for name, value in list(namespace.items()):
            if isinstance(value, FunctionType) and value in HOST_STUBS:
                replace(namespace, name, HOST_STUBS[value])
        if namespace is vars(ct):
            continue
        for name, value in _BUILTINS.items():
            if name not in namespace:
                replace(namespace, name, value)
    try:
        yield
    finally:
        for namespace, name, existed, value in reversed(saved):
            if existed:
                namespace[name] = value
            else:
                del namespace[name]


def _namespaces(function: FunctionType) -> list[dict]:
    """The global namespaces of a function and of the Python functions that it may call."""
    namespaces, visited, pending = {}, set(), [function]
    while pending:
        f = pending.pop()
        f = getattr(f, "__wrapped__", f)
        if isinstance(f, type) and not _is_foreign(f.__module__):
            pending += [getattr(method, "fget", method) for method in vars(f).values()]
        if not isinstance(f, FunctionType) or f in visited or _is_foreign(f.__module__):
            continue
        visited.add(f)
        namespaces[id(f.__globals__)] = f.__globals__
        names = _names(f.__code__)
        values = [f.__globals__.get(name) for name in names]
        values += [cell.cell_contents for cell in f.__closure__ or () if _is_filled(cell)]
        for value in values:
            if isinstance(value, ModuleType) and not _is_foreign(value.__name__):
                pending += [getattr(value, name, None) for name in names]
            pending.append(value)
    return list(namespaces.values())


def _is_filled(cell) -> bool:
    """Whether a closure cell has a value."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _is_foreign(module: str | None) -> bool:
    """Whether a module is a library's, whose functions the interpreter does not change."""
    return (module or "").split(".")[0] in ("cuda", "torch", "numpy", "operator", "math")


def _names(code: CodeType) -> set[str]:
    """The global and attribute names that a code object and its nested code objects use."""
    nested = (_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*nested)


# These modules register their operations when they are imported.
_OPERATIONS = (accesses, reductions, shapes)
