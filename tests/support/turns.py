"""Cases of one GPU that many processes run beside each other: memory in turns, and an end for each.

Most cases take little of a GPU's memory, and run beside each other. A case with LARGE GiB or more
needs one of the places that the memory has for such cases. A case with ALONE GiB or more waits
until no other case runs. Locks of the operating system tell it, which a process that ends gives
back.
"""

import faulthandler
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

LARGE, ALONE = 4, 30  # GiB of GPU memory
WIDE, WIDE_GIB = 65536, 20  # the wide rows of tests/kernels, and what a case of them takes at most
OTHERS = 45  # GiB that all the other cases take together, with what their processes keep
MOST_KEPT = 1 << 30  # bytes that PyTorch's allocator keeps between two cases
MOST_SECONDS = 300  # of a case. A GPU that hangs stops a process for good.


def memory_of(item: "pytest.Item", hidden: int = 0) -> float:
    """The GiB that a case takes: what its mark `gpu_memory(gib)` says, or by its rows' width."""
    mark = item.get_closest_marker("gpu_memory")
    if mark:
        return mark.args[0]
    return WIDE_GIB if hidden >= WIDE else 0


def place_in_run(item: "pytest.Item") -> int:
    """Cases are sorted by this number. Those with the mark `long` come first: begun late, they
    would run on when all others have ended. Those that run alone come last, when they wait for few
    others: a process that waits runs no other case.
    """
    if memory_of(item) >= ALONE:
        return 2
    return 0 if item.get_closest_marker("long") else 1


@contextmanager
def turn(gib: float) -> Iterator[None]:
    """A block that runs when a GPU has so much memory for it, and ends the process when it takes
    longer than MOST_SECONDS. pytest-xdist then names the case, and starts another process.
    """
    with ExitStack() as stack:
        stack.enter_context(_locked("all", alone=gib >= ALONE))
        if gib >= LARGE:
            stack.enter_context(_place(places(memory_of_gpu())))
        stack.callback(_give_back)
        faulthandler.dump_traceback_later(MOST_SECONDS, exit=True, file=sys.__stderr__)
        stack.callback(faulthandler.cancel_dump_traceback_later)
        yield


def places(gib: float) -> int:
    """How many cases with LARGE GiB or more run beside each other on a GPU of so many GiB."""
    return max(1, int(gib - OTHERS) // WIDE_GIB)


def memory_of_gpu() -> float:
    """The GiB of this process's GPU; 0 without one."""
    cuda = _cuda()
    if cuda is None or not cuda.is_available():
        return 0
    return cuda.get_device_properties(0).total_memory / 2**30


def _cuda():
    """torch.cuda, or None in a process that has not imported PyTorch."""
    return getattr(sys.modules.get("torch"), "cuda", None)


@contextmanager
def _place(count: int) -> Iterator[None]:
    """One of so many places, as soon as one is free."""
    for number in itertools.cycle(range(count)):
        with ExitStack() as stack:
            try:
                stack.enter_context(_locked(f"large-{number}", alone=True, wait=False))
            except BlockingIOError:
                time.sleep(0.05)
                continue
            yield
            return


def _give_back() -> None:
    """Leave the memory that this process keeps for later cases to other processes."""
    cuda = _cuda()
    if cuda and cuda.is_initialized() and cuda.memory_reserved() > MOST_KEPT:
        cuda.empty_cache()


@contextmanager
def _locked(name: str, alone: bool, wait: bool = True) -> Iterator[None]:
    """alone: no other process has the lock; else others that do not ask for it alone may have it.
    Without `wait`, raises BlockingIOError where it would wait. Windows has no such locks: there
    nothing waits.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    device = os.environ.get("CUDA_VISIBLE_DEVICES", "all").replace(",", "-")
    path = Path(tempfile.gettempdir()) / f"tilenorm-tests-{os.getuid()}-{device}-{name}.lock"
    with open(path, "w") as file:
        kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        fcntl.flock(file, kind if wait else kind | fcntl.LOCK_NB)
        yield
