"""The fast path of calls in C++, where it is built: which extension serves, and why none does.

README.md in this folder says how it works, when it is built, and what stays with Python.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from ....settings import settings
from ...pytorch import torch_private
from . import build

LOOKS = 256  # calls in Python between two looks for an extension that is being built


class State:
    """What this process knows of its extension.

    extension: the module, or None. served: its function of that name: see calls.h. reason: why
    there is no extension, in words. waits: whether an extension may still come.
    """

    def __init__(self) -> None:
        self.extension: Any = None
        self.served: Callable | None = None
        self.reason = "no call on CUDA has been repeated yet"
        self.waits = False
        self._asked, self._calls = False, 0
        self._builder: subprocess.Popen | None = None
        self._changed: list[Callable[[], None]] = []

    def when_changed(self, forget: Callable[[], None]) -> None:
        """Call a function whenever another extension, or none, serves from then on."""
        self._changed.append(forget)

    def use(self, extension: Any) -> None:
        """Have an extension serve, or none."""
        if extension is not None:
            start(extension)
        self.extension, self.served = extension, extension and extension.served
        self.waits = False
        for forget in self._changed:
            forget()

    def forget(self) -> None:
        """Have the extension serve no call that it knows."""
        if self.extension is not None:
            self.extension.forget()

    def want(self, index: int) -> None:
        """Load the extension if it is built, and else have it built beside this process, which does
        not wait for it. A process asks once, when it first repeats a call on CUDA. index: the
        device's, negative for a CPU.
        """
        if self._asked or index < 0:
            return
        self._asked = True
        self.reason = refused() or ""
        if self.reason or self._loaded():
            return
        if self.waits and "PYTEST_VERSION" not in os.environ:
            self._built_aside()

    def look(self) -> None:
        """Load the extension, now and then, once it is built. Called while `waits`."""
        self._calls += 1
        if self._calls % LOOKS == 0:
            if self._builder is not None:
                self._builder.poll()  # else the process that has ended stays in the system's table
            self._loaded()

    def told(self) -> str:
        """What makes repeated calls on CUDA, in words. An extension that is there is loaded."""
        if self.extension is None:
            self.reason = refused() or ""
            if not self.reason and not self._loaded() and self.waits:
                self.reason = build.missing() or self.reason
        if self.extension is None:
            return f"in Python: {self.reason}"
        return f"by the extension {self.extension.__file__}"

    def _loaded(self) -> bool:
        path = build.path()
        if os.path.exists(path):
            try:
                extension = build.load(path)
            except (ImportError, OSError) as error:
                failed: str | None = f"{path} does not load: {error}"
            else:
                self.reason = ""
                self.use(extension)
                return True
        else:
            failed = build.failure(path)
        self.waits = not failed
        self.reason = failed or "it is not built yet; python -m tilenorm build builds it"
        return False

    def _built_aside(self) -> None:
        lacking = build.missing() or build.unwritable(build.path())
        if getattr(sys, "frozen", False) or not sys.executable:
            lacking = "no program of Python's is known that could build it"
        if lacking:
            self.waits, self.reason = False, lacking
            return
        null = subprocess.DEVNULL
        streams: dict[str, Any] = {"stdin": null, "stdout": null, "stderr": null}
        try:
            process = subprocess.Popen(
                **build.beside(build.BUILD), **streams, start_new_session=True
            )
        except OSError as error:
            self.waits, self.reason = False, f"no process to build it: {error}"
        else:
            self._builder, self.reason = process, "it is being built by another process"


@cache
def state() -> State:
    return State()


def refused() -> str | None:
    """Why this process uses no extension, or None."""
    if not settings().native:
        return "TILENORM_NATIVE is 0"
    return build.refused()


def start(extension: Any) -> None:
    """Tell an extension the dispatch keys of plain tensors, and the driver's functions."""
    import torch

    from ....launch import driver

    keys = ~torch_private.OTHER_BITS & (1 << 64) - 1
    extension.start(keys, torch.Size, *driver.addresses())


def describe() -> str:
    """Which path serves the calls of this process: "native" or "python"."""
    return "python" if state().extension is None else "native"
