"""Compiling the extension: where it lies, what it is compiled with, and what it has to pass."""

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import signal
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

from ....settings import settings

NAME = "tilenorm_native"
HERE = Path(__file__).parent
SOURCE = HERE / "native.cpp"
FLAGS = ("-shared", "-fPIC", "-O2", "-g0", "-fvisibility=hidden", f"-DTORCH_EXTENSION_NAME={NAME}")
MOST_SECONDS = 600  # of the compiler
MOST_CHECKING = 120  # seconds of the self-check, nearly all of which imports PyTorch
LOCKED = "another process is building it"
BUILD = "from tilenorm.__main__ import main; sys.exit(main(['build', '--aside']))"
CHECK = "from tilenorm.ops.passes.native.check import main; sys.exit(main(sys.argv[1]))"


class BuildError(RuntimeError):
    """There is no extension, and why. output: all that the compiler has printed."""

    output = ""


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
    from ...pytorch.torch_private import OTHER_BITS

    return not OTHER_BITS


def missing() -> str | None:
    """What a build needs and this machine lacks, or None. A build that fails for this is not
    remembered: whoever installs a compiler has no other command to run.
    """
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not os.path.exists(header):
        return f"Python's headers are missing: there is no {header}"
    try:
        compiler()
    except BuildError as error:
        return str(error)
    return None


def compiler() -> list[str]:
    """The C++ compiler: $CXX, or c++ or g++ on the PATH. Raises BuildError without one."""
    named = os.environ.get("CXX", "")
    try:
        words = shlex.split(named)
    except ValueError as error:
        raise BuildError(f"no C++ compiler: CXX is {named}: {error}") from error
    if words:
        if shutil.which(words[0]):
            return words
        raise BuildError(f"no C++ compiler: CXX is {named}, and there is no such program")
    for name in ("c++", "g++"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler: neither c++ nor g++ is on the PATH, and CXX is not set")


def compiler_name() -> str:
    """A line that differs for another compiler, and for another version of a compiler. The compiler
    is not run: a process that asks for this is about to make a norm.
    """
    try:
        words = compiler()
        program = os.path.realpath(shutil.which(words[0]) or "")
        return f"{shlex.join(words)} {program} {os.stat(program).st_mtime_ns}"
    except (BuildError, OSError) as error:
        return str(error)


@cache
def options() -> tuple[str, ...]:
    """The compiler's options beside the files. No header of CUDA's is needed."""
    import_of = sysconfig.get_paths()
    root = Path(torch.__file__).parent
    folders = root / "include", root / "include/torch/csrc/api/include", import_of["include"]
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    abi = int(torch.compiled_with_cxx11_abi())
    flags = [*FLAGS, f"-std=c++{20 if version >= (2, 13) else 17}"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *(f"-isystem{folder}" for folder in folders)]
    flags += ["-DWITH_CUDA"] * (torch.version.cuda is not None)
    return tuple(flags)


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
    return Path(settings().tables).absolute() / "native" / f"{code.hexdigest()[:20]}.so"


def failure(extension: Path) -> str | None:
    """Why an earlier build with this compiler failed, or None."""
    try:
        text = extension.with_suffix(".failed").read_text(errors="replace")
    except OSError:
        return None
    compiled_by, _, rest = text.partition("\n")
    return rest.partition("\n")[0] or None if compiled_by == compiler_name() else None


def unwritable(extension: Path) -> str | None:
    """Why no build can put its result there, or None."""
    folder = extension.parent
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    if os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK):
        return None
    return f"{folder} is no folder that can be written: TILENORM_CACHE_DIR names another"


def load(extension: Path) -> Any:
    """Load an extension. Raises ImportError or OSError."""
    spec: Any = importlib.util.spec_from_file_location(NAME, extension)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_there(extension: Path) -> bool:
    """Whether an extension can be loaded. A machine that lost power may have left half a file."""
    if not os.path.exists(extension):
        return False
    try:
        load(extension)
    except (ImportError, OSError):
        return False
    return True


def beside(code: str, *arguments: str) -> dict[str, Any]:
    """What subprocess.Popen takes for a process that runs this code, imports what this process
    imports, and sees no GPU. Paths that are relative here are absolute there.
    """
    paths = [os.path.abspath(str(folder)) for folder in sys.path]
    started = f"import sys; sys.path[:] = {paths!r}; {code}"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment["TILENORM_CACHE_DIR"] = str(Path(settings().tables).absolute())
    return {"args": [sys.executable, "-c", started, *arguments], "env": environment}


def build(say: Callable[[str], None], aside: bool = False) -> Path:
    """Compile the extension, unless it is there, and check it in a process of its own before any
    process can find it. Returns where it lies.

    aside: lets other processes go first, and does not try again what has failed before with this
    compiler. Raises BuildError, and keeps the reason beside the extension for other processes.
    """
    if reason := refused():
        raise BuildError(reason)
    extension, start = path(), time.monotonic()
    if is_there(extension):
        say(f"the extension is there: {extension}")
        return extension
    if reason := missing() or (aside and failure(extension)):
        raise BuildError(reason)
    if aside:
        os.nice(10)
    try:
        extension.parent.mkdir(parents=True, exist_ok=True)
        with _locked(extension.with_suffix(".lock")):
            if not is_there(extension):  # another process may have built it in between
                say(f"compiles {SOURCE} for torch {torch.__version__}; it takes about 20 seconds")
                _compiled(extension)
    except OSError as error:  # a folder that cannot be written, or a file system without locks
        raise BuildError(f"{extension.parent}: {error}") from error
    say(f"built and checked in {time.monotonic() - start:.0f} s: {extension}")
    return extension


def _compiled(extension: Path) -> None:
    """Compile into a folder beside the extension, check there, and put the file in its place."""
    failed = extension.with_suffix(".failed")
    for remains in extension.parent.glob(f"{extension.stem}-*"):  # of a build that was killed
        shutil.rmtree(remains, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{extension.stem}-", dir=extension.parent) as folder:
        fresh = Path(folder) / extension.name
        command = [*compiler(), *options(), str(SOURCE), "-o", str(fresh), *libraries()]
        try:
            _run("it does not compile", MOST_SECONDS, {"args": command})
            _run("its self-check fails", MOST_CHECKING, beside(CHECK, str(fresh)))
        except BuildError as error:
            failed.write_text(f"{compiler_name()}\n{error}\n{error.output}")
            raise
        failed.unlink(missing_ok=True)
        os.replace(fresh, extension)


def _run(failing: str, seconds: float, what: dict[str, Any]) -> None:
    """Run a process to its end. Raises BuildError, which begins with `failing`."""
    environment = {**os.environ, **what.pop("env", {}), "LC_ALL": "C"}  # messages in English
    try:
        process = subprocess.Popen(
            **what,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise BuildError(f"{failing}: {error}") from error
    try:
        output, _ = process.communicate(timeout=seconds)
    except BaseException as error:  # a compiler is several processes
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise BuildError(f"{failing}: it takes more than {seconds} s") from error
        raise
    if process.returncode:
        raised = BuildError(f"{failing}: {_reason(output, process.returncode)}")
        raised.output = output
        raise raised


def _reason(output: str, status: int) -> str:
    """The line that says why a process has failed. A process that a signal ends says nothing."""
    if status < 0:
        return f"signal {-status} has ended it"
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() and "collect2" not in line]
    return (errors or lines or [f"it ended with status {status} and no message"])[0]


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """One process of all builds. Raises BuildError where another one does."""
    import fcntl

    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BuildError(LOCKED) from None
        yield
