"""Errors that the interpreter raises where the compiler accepts a kernel."""


class InterpreterError(RuntimeError):
    """A kernel did something that has an undefined result on a GPU."""


class RaceError(InterpreterError):
    """Two blocks accessed one element without synchronisation, and at least one wrote it."""


class AliasError(InterpreterError):
    """A written array shares memory with another argument. The compiler assumes that none does."""


class OutOfBoundsError(InterpreterError):
    """An unchecked access is outside its array, or a whole tile is."""


class StateError(InterpreterError):
    """PyTorch has yet to do something to an argument: its memory does not hold its values."""
