"""An interpreter for cuTile kernels: runs them on CPU tensors, one block after another.

It raises an InterpreterError where the result of a kernel on a GPU would be undefined. README.md
tells what it emulates. Everything else imports this package, and none of its modules.
"""

from .errors import InterpreterError
from .launching import launch
from .tile import Tile

__all__ = ["InterpreterError", "Tile", "launch"]
