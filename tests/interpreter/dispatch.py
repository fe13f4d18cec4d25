"""The table of implemented operations, and the dispatch mode that routes ct.* stubs to it."""

from cuda.tile._dispatch_mode import DispatchMode
from cuda.tile._execution import is_stub

from . import dtypes
from .memory import Blocks
from .tile import Tile

_TABLE = {}


def implements(*stubs):
    """Register a function as the implementation of ct stubs."""

    def register(function):
        for stub in stubs:
            # A decorator that rewrites docstrings wraps the stub. Register the wrapped stub too,
            # because that is the one that is dispatched.
            while stub is not None:
                _TABLE[stub] = function
                stub = getattr(stub, "__wrapped__", None)
        return function

    return register


def is_implemented(stub) -> bool:
    """Whether a function is registered for a stub."""
    return stub in _TABLE


class Interpreter(DispatchMode):
    """The dispatch mode of one launch, with the launch's grid, current block and fill value."""

    def __init__(self, grid: tuple[int, int, int], fill: float):
        self.grid = grid
        self.fill = fill
        self.block = (0, 0, 0)
        self.blocks = Blocks(count=grid[0] * grid[1] * grid[2])

    def call_tile_function_from_host(self, func, args, kwargs):
        implementation = _TABLE.get(func)
        if implementation is not None:
            return implementation(*args, **kwargs)
        if is_stub(func):
            raise NotImplementedError(f"the interpreter does not implement ct.{func.__qualname__}")
        return func.__wrapped__(*args, **kwargs)

    def undefined(self, dtype):
        """A 0-d tensor of the value that undefined elements have in this launch."""
        return dtypes.constant(dtypes.extreme(self.fill, dtype), dtype)


def current() -> Interpreter:
    """The dispatch mode of the launch that is running."""
    return DispatchMode.get_current()


def describe(value) -> str:
    """A readable form of a value, for error messages."""
    return value.describe() if isinstance(value, Tile) else str(value)
