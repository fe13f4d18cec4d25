"""The table of operations, and the mode that sends every ct.* stub through it."""

from cuda.tile._dispatch_mode import DispatchMode
from cuda.tile._execution import is_stub

from . import dtypes
from .memory import Blocks
from .tile import Tile

_TABLE = {}


def implements(*stubs):
    """Register a function as the meaning of ct stubs."""

    def register(function):
        for stub in stubs:
            # Decorators that only rewrite docstrings hide the stub that is dispatched.
            while stub is not None:
                _TABLE[stub] = function
                stub = getattr(stub, "__wrapped__", None)
        return function

    return register


def is_implemented(stub) -> bool:
    return stub in _TABLE


class Interpreter(DispatchMode):
    """Runs stubs for one launch; holds what they need to know of it."""

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
            raise NotImplementedError(f"the interpreter does not serve ct.{func.__qualname__}")
        return func.__wrapped__(*args, **kwargs)

    def undefined(self, dtype):
        """A 0-d tensor of what undefined memory reads as."""
        return dtypes.constant(dtypes.extreme(self.fill, dtype), dtype)


def current() -> Interpreter:
    return DispatchMode.get_current()


def describe(value) -> str:
    return value.describe() if isinstance(value, Tile) else str(value)
