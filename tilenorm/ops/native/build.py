"""Compiling the extension: where it lies, what it is compiled with, and what it has to pass."""

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ...settings import settings
from .check import check

NAME = "tilenorm_native"
HERE = Path(__file__).parent
SOURCE = HERE / "native.cpp"
FLAGS = ("-shared", "-fPIC", "-O2", "-g0", "-fvisibility=hidden", f"-DTORCH_EXTENSION_NAME={NAME}")
MOST_SECONDS = 600  # of the compiler


class BuildError(RuntimeError):
    """There is no extension, and why."""


def refused() -> str | None:
    """Why the extension is never built here, or None."""
    if sys.platform != "linux":
        return f"it is built on Linux alone, and this is {sys.platform}"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "a Python without a global lock is not served"
    if torch_private_missing():
        return "this PyTorch has no way to ask for dispatch keys"
    if settings().tables is None:
        return "there is no cache folder: set TILENORM_CACHE_DIR"
    return None


def torch_private_missing() -> bool:
    from ..torch_private import OTHER_BITS

    return not OTHER_BITS


def compiler_missing() -> str | None:
    """Why there is no compiler, or None."""
    try:
        compiler()
    except BuildError as error:
        return str(error)
    return None


def compiler() -> list[str]:
    """The C++ compiler: $CXX, or c++ or g++ on the PATH. Raises BuildError without one."""
    named = os.environ.get("CXX")
    if named:
        return shlex.split(named)
    for name in ("c++", "g++"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler: c++ is not on the PATH, and CXX is not set")


@cache
def options() -> tuple[str, ...]:
    """The compiler's options beside the files. No header of CUDA's is needed."""
    import_of = sysconfig.get_paths()
    root = Path(torch.__file__).parent
    folders = root / "include", root / "include/torch/csrc/api/include", import_of["include"]
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    found = [*FLAGS, f"-std=c++{20 if version >= (2, 13) else 17}"]
    found += [f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *(f"-isystem{folder}" for folder in folders)]
    found += ["-DWITH_CUDA"] * (torch.version.cuda is not None)
    return tuple(found)


def libraries() -> list[str]:
    names = ["c10", "torch_cpu", "torch", "torch_python"]
    names += ["torch_cuda"] * (torch.version.cuda is not None)
    return [f"-L{Path(torch.__file__).parent / 'lib'}", *(f"-l{name}" for name in names)]


@cache
def path() -> Path:
    """Where the extension lies, for this source, PyTorch and Python. The name is their digest."""
    sources = sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")])
    what = [torch.__version__, torch.version.git_version, torch.version.cuda, platform.machine()]
    what += [sysconfig.get_config_var("SOABI"), *options(), *libraries()]
    code = hashlib.sha256(repr(what).encode())
    for source in sources:
        code.update(source.read_bytes())
    return Path(settings().tables) / "native" / f"{code.hexdigest()[:20]}.so"


def failure(extension: Path) -> str | None:
    """Why an earlier build failed, or None."""
    try:
        return extension.with_suffix(".failed").read_text() or None
    except OSError:
        return None


def load(extension: Path) -> Any:
    """Load an extension. Raises ImportError or OSError."""
    spec: Any = importlib.util.spec_from_file_location(NAME, extension)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(say: Callable[[str], None], aside: bool = False) -> Path:
    """Compile the extension, unless it is there, and check it, in this process, before any other
    process can load it. Returns where it lies.

    aside: lets other processes go first, and does not try again what has failed before. Raises
    BuildError, and keeps the reason beside the extension for other processes.
    """
    if reason := refused():
        raise BuildError(reason)
    made, start = path(), time.monotonic()
    if made.exists() and not failure(made):
        say(f"the extension is there: {made}")
        return made
    if aside and failure(made):
        raise BuildError(failure(made))
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        with _locked(made.with_suffix(".lock")):
            if aside:
                os.nice(10)
            say(f"compiles {SOURCE} for torch {torch.__version__}; it takes about 20 seconds")
            _compiled(made)
    except OSError as error:  # a folder that cannot be written
        raise BuildError(f"{made.parent}: {error}") from error
    say(f"built and checked in {time.monotonic() - start:.0f} s: {made}")
    return made


def _compiled(made: Path) -> None:
    """Compile into a folder beside `made`, check there, and put the file in its place whole."""
    failed = made.with_suffix(".failed")
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        fresh = Path(folder) / made.name
        try:
            command = [*compiler(), *options(), str(SOURCE), "-o", str(fresh), *libraries()]
            done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS)
            if done.returncode:
                errors = [line for line in done.stderr.splitlines() if "error" in line]
                raise BuildError(f"it does not compile: {(errors or ['no message'])[0]}")
            check(load(fresh))
        except (BuildError, ImportError, OSError, subprocess.SubprocessError) as error:
            failed.write_text(str(error))
            raise error if isinstance(error, BuildError) else BuildError(str(error)) from error
        os.replace(fresh, made)
    failed.unlink(missing_ok=True)


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """One process of all builds. Raises BuildError where another one does."""
    import fcntl

    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BuildError("another process is building it") from None
        yield
