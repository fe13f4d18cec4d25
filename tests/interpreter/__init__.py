"""An interpreter for cuTile kernels: runs them on CPU tensors, one block after another.

It raises an InterpreterError where the result of a kernel on a GPU would be undefined.
"""

from .errors import (
    AliasError,
    InterpreterError,
    OutOfBoundsError,
    PollingError,
    RaceError,
    StateError,
)
from .run import launch

__all__ = [
    "AliasError",
    "InterpreterError",
    "OutOfBoundsError",
    "PollingError",
    "RaceError",
    "StateError",
    "launch",
]
