"""A configuration that serves in place of the tables' and rules', inside of a block."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

from .config import FORMS, Config


@contextmanager
def forced(config: Config) -> Iterator[None]:
    """Have a configuration serve every call in this block, in the place of the chosen one.

        with tilenorm.launch.forced(RowForward(rows=1, widths=(4096,))):
            y = tilenorm.rms_norm(x, (4096,), weight)

    A configuration of a forward pass serves forward passes alone, and one of a backward pass those
    backward passes that run inside of the block. Blocks of both directions may be nested; of two
    blocks of one direction the inner one serves. The block concerns all threads of the process. It
    does not concern code that torch.compile generated and that has run before. A configuration
    that does not compile is replaced by the reference, with a warning, until the block ends.
    Another configuration may add up a row in another order, which changes last bits (order.py).

    Raises TypeError for anything but a configuration. Calls in the block raise ValueError where
    the configuration cannot serve them, and launch nothing.
    """
    if not isinstance(config, FORMS):
        names = ", ".join(form.__name__ for form in FORMS)
        got = type(config).__name__
        raise TypeError(f"forced: argument 'config' takes one of {names}, got {got}")
    before = of_direction(config.direction)
    _serve(config.direction, config)
    try:
        yield
    finally:
        _serve(config.direction, before)


def of_direction(direction: str) -> Config | None:
    """The configuration that serves all calls of a direction, or None."""
    return _configs().get(direction)


@cache
def when_changed() -> list[Callable[[], None]]:
    """Functions that forget what was planned or bound by a configuration. Whoever remembers such
    things adds one.
    """
    return []


@cache
def _configs() -> dict[str, Config]:
    """The configurations of the blocks that are open, by direction."""
    return {}


def _serve(direction: str, config: Config | None) -> None:
    if config is None:
        _configs().pop(direction, None)
    else:
        _configs()[direction] = config
    for forget in when_changed():
        forget()
