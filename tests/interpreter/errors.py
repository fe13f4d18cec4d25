"""What the interpreter refuses beyond what the compiler refuses."""


class InterpreterError(RuntimeError):
    """A kernel did something whose result on a GPU is undefined."""


class RaceError(InterpreterError):
    """Two blocks touched one element, at least one of them writing, without synchronisation."""


class AliasError(InterpreterError):
    """A written array shares memory with another argument; the JIT assumes that none does."""


class OutOfBoundsError(InterpreterError):
    """An unchecked access left its array, or a tile lies wholly outside it."""


class PollingError(InterpreterError):
    """A block waits for another: sequential execution would never end."""
