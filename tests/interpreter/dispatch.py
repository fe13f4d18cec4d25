"""The table of implemented operations, and the dispatch mode that routes ct.* stubs to it."""

from math import prod

from cuda.tile._dispatch_mode import DispatchMode
from cuda.tile._execution import is_stub

from . import dtypes
from .errors import InterpreterError

TABLE = {}  # stub -> the function that implements it


def implements(stub):
    """Register a function as the implementation of a ct stub."""

    def register(function):
        # A decorator that rewrites docstrings wraps some stubs. The wrapped one is dispatched.
        TABLE[getattr(stub, "__wrapped__", stub)] = TABLE[stub] = function
        return function

    return register


class Interpreter(DispatchMode):
    """The dispatch mode of one launch, with the launch's grid, current block and fill value, which
    products are fused, and what a block waits for.
    """

    def __init__(self, grid: tuple[int, int, int], fill: float, fuse: str = "", early: str = ""):
        self.grid = grid
        self.fill = fill
        self.fuse = fuse
        self.early, self.waited = early, False
        self.block, self.number, self.count = (0, 0, 0), 0, prod(grid)

    def call_tile_function_from_host(self, func, args, kwargs):
        implementation = TABLE.get(func)
        if implementation is not None:
            return implementation(*args, **kwargs)
        if is_stub(func):
            raise NotImplementedError(f"the interpreter does not implement ct.{func.__qualname__}")
        return func.__wrapped__(*args, **kwargs)

    def check_turn(self, verb: str, what: str) -> None:
        """Raise if this has to come after the block's wait and comes before it."""
        waits = self.early == "access" or (self.early and verb in ("updates", "starts"))
        if waits and not self.waited:
            raise InterpreterError(
                f"block {self.number} {verb} {what} before it waits for the kernel before"
            )

    def undefined(self, dtype):
        """A 0-d tensor of the value that undefined elements have in this launch."""
        return dtypes.constant(dtypes.extreme(self.fill, dtype), dtype)


def current() -> Interpreter:
    """The dispatch mode of the launch that is running."""
    return DispatchMode.get_current()
