"""Counts what tilenorm's reference computes in this process, in compiled graphs too."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from tilenorm.ops.passes import reference


@contextmanager
def counting() -> Iterator[Counter]:
    """In this block: how often each op ran, and its backward pass."""
    counts = Counter()

    def counted(function, suffix):
        def count(spec, *args, **kwargs):
            counts[spec.op + suffix] += 1
            return function(spec, *args, **kwargs)

        return count

    functions = {"_by_operator": "", "formula": "", "backward": " backward"}
    with ExitStack() as stack:
        for name, suffix in functions.items():
            function = counted(getattr(reference, name), suffix)
            stack.enter_context(patch.object(reference, name, function))
        yield counts
