"""How the extension in C++ calls CUDA's driver: threads without a context, launches that fail.

Functions in Python stand for the driver's. tests/launch/test_driver.py compares what the driver
gets with what cuTile gives it.
"""

import ctypes

import pytest
import torch

import tilenorm
from tests.support.pretended import pretended_gpu
from tilenorm.launch import driver
from tilenorm.launch.driver import Argument, Prepared
from tilenorm.ops.passes import cutile, native
from tilenorm.ops.passes.native import build

N, KERNEL, CONTEXT, WARM = 64, 7, 1234, 4
POINTER = ctypes.c_void_p


class Driver:
    """A thread of a driver. failing: what launches return where the thread has a context.

    queued: how often it has launched. context: the thread's. settable: whether it takes one.
    """

    def __init__(self):
        self.context: int | None = CONTEXT
        self.queued, self.failing, self.settable = 0, 0, True
        # The extension may have let go of Python's lock, which these functions take.
        launch = ctypes.CFUNCTYPE(ctypes.c_int, *[POINTER] * 4)(self._launch)
        current = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(POINTER))(self._current)
        enter = ctypes.CFUNCTYPE(ctypes.c_int, POINTER)(self._enter)
        self.functions = launch, current, enter

    def addresses(self) -> list[int]:
        return [ctypes.cast(each, POINTER).value for each in self.functions]

    def _launch(self, config, function, arguments, _) -> int:
        assert function == KERNEL
        if self.context is None:
            return 201
        self.queued += not self.failing
        return self.failing

    def _current(self, found) -> int:
        found[0] = self.context
        return 0

    def _enter(self, context) -> int:
        if self.settable:
            self.context = context
        return not self.settable


@pytest.fixture
def thread(extension_file, no_memory, monkeypatch):
    """The extension serves norms, whose kernel is launched by a driver."""
    if extension_file is None:
        pytest.skip(build.refused() or build.missing())
    made, before = Driver(), native.state().extension

    def prepare(index, stream, launches, arrays, numbered, addresses):
        prepared = [
            Prepared(KERNEL, each.grid, (Argument(8, place=0),), False) for each in launches
        ]
        return driver.repeating(lambda *_: made.failing, prepared, addresses)

    monkeypatch.setattr(driver, "addresses", made.addresses)
    monkeypatch.setattr(cutile, "primary_context", lambda index: CONTEXT)
    with pretended_gpu():
        native.state().use(before or build.load(extension_file))
        monkeypatch.setattr(cutile, "prepare", prepare)
        yield made
    monkeypatch.undo()
    native.state().use(before)


@pytest.fixture
def by_cutile(thread, monkeypatch) -> list:
    """A list that gets a word for each launch by cuTile."""
    launched: list[str] = []
    monkeypatch.setattr(cutile, "launch", lambda *_: launched.append("launched"))
    return launched


def norm() -> torch.Tensor:
    return tilenorm.rms_norm(torch.ones(3, N), (N,), eps=1e-6)


def warm(thread: Driver, launched: list) -> None:
    for _ in range(WARM):
        norm()
    thread.queued = 0
    launched.clear()
    norm()
    assert thread.queued and not launched, "the extension serves"


def test_a_thread_without_a_context_gets_it_and_launches_again(thread, by_cutile):
    warm(thread, by_cutile)
    queued, thread.context = thread.queued, None
    norm()
    assert thread.context == CONTEXT and thread.queued == 2 * queued and not by_cutile


@pytest.mark.parametrize("why", ["no context is taken", "a launch fails"])
def test_a_launch_that_fails_is_made_by_cutile(why, thread, by_cutile):
    warm(thread, by_cutile)
    queued, kinds = thread.queued, native.state().extension.kinds()
    if why == "a launch fails":
        thread.failing = 400
    else:
        thread.context, thread.settable = None, False
    y = norm()
    assert by_cutile and thread.queued == queued and y.shape == (3, N)
    assert native.state().extension.kinds() == kinds
    thread.failing, thread.context = 0, CONTEXT
    by_cutile.clear()
    norm()
    assert thread.queued == 2 * queued and not by_cutile, "later calls are served as before"


def test_a_launch_that_fails_in_a_backward_pass(thread, by_cutile):
    def step() -> torch.Tensor:
        x = torch.ones(3, N, requires_grad=True)
        y = tilenorm.rms_norm(x, (N,), eps=1e-6)
        thread.queued = 0
        by_cutile.clear()
        y.backward(torch.ones_like(y))
        return x.grad

    for _ in range(WARM):
        step()
    assert thread.queued and not by_cutile
    x = torch.ones(3, N, requires_grad=True)
    y = tilenorm.rms_norm(x, (N,), eps=1e-6)
    thread.failing = 400
    y.backward(torch.ones_like(y))
    assert by_cutile and x.grad.shape == x.shape
    thread.failing = 0
    step()
    assert thread.queued and not by_cutile
