"""The fast path of calls in C++, where it is built: which extension serves, and why none does.

README.md in this folder says how it works, when it is built, and what stays with Python.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from ...settings import settings
from .. import torch_private
from . import build

LOOKS = 256  # calls in Python between two looks for an extension that is being built


class State:
    """What this process knows of its extension.

    extension: the module, or None. served: its function of that name: see calls.h. reason: why
    there is no extension, in words.
    """

    def __init__(self) -> None:
        self.extension: Any = None
        self.served: Callable | None = None
        self.reason = "no call on CUDA has been repeated yet"
        self.waits = False
        self._asked, self._calls = False, 0
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
        if self.reason:
            return
        if not self._loaded() and "PYTEST_VERSION" not in os.environ:
            self._built_aside()

    def look(self) -> None:
        """Load the extension, now and then, once it is built. Called while `waits`."""
        self._calls += 1
        if self._calls % LOOKS == 0:
            self._loaded()

    def _loaded(self) -> bool:
        path = build.path()
        failed = build.failure(path)
        if path.exists() and not failed:
            try:
                extension = build.load(path)
            except (ImportError, OSError) as error:
                failed = f"{path} does not load: {error}"
            else:
                self.reason = ""
                self.use(extension)
                return True
        self.waits = not failed
        self.reason = failed or "it is not built yet; python -m tilenorm build builds it"
        return False

    def _built_aside(self) -> None:
        if not self.waits:
            return
        root = str(Path(__file__).parents[3])
        paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        try:
            subprocess.Popen(
                [sys.executable, "-m", "tilenorm", "build", "--aside"],
                env={**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            self.waits, self.reason = False, f"no process to build it: {error}"
        else:
            self.reason = "it is being built by another process"


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

    from ...launch import driver

    keys = ~torch_private.OTHER_BITS & (1 << 64) - 1
    extension.start(keys, torch.Size, *driver.addresses())


def describe() -> str:
    """Which path serves the calls of this process: "native" or "python"."""
    return "python" if state().extension is None else "native"
