"""Runs cuTile kernels on CPU tensors, block by block, and refuses what a GPU leaves undefined."""

from .errors import AliasError, InterpreterError, OutOfBoundsError, PollingError, RaceError
from .run import launch

__all__ = [
    "AliasError",
    "InterpreterError",
    "OutOfBoundsError",
    "PollingError",
    "RaceError",
    "launch",
]
