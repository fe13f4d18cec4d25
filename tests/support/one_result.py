"""TILENORM_ONE_RESULT in a block, as of a process that has it from its start."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from tilenorm.launch import forcing, order


@contextmanager
def one_result(asked: bool = True) -> Iterator[None]:
    """In this block plans are made with the setting, or without it."""
    with patch.dict(os.environ, TILENORM_ONE_RESULT="01"[asked]), ExitStack() as stack:
        for forget in (order.one_result.cache_clear, *forcing.when_changed()):
            forget()
            stack.callback(forget)
        yield
