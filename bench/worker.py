"""Work in a process of its own, so that its memory, its compilers' caches and its failure are."""

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.record import first_line


class WorkerError(Exception):
    """What went wrong in a process of its own."""


def temporary_folder() -> tempfile.TemporaryDirectory:
    """One that goes at the end, but for what a compiler's last process may still put there."""
    return tempfile.TemporaryDirectory(ignore_cleanup_errors=True)


def caches(folder: str) -> dict[str, str]:
    """Environment variables that keep every compiler's cache, on the disk, in a folder."""
    names = {
        "CUDA_TILE_CACHE_DIR": "cutile",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "TRITON_CACHE_DIR": "triton",
        "CUDA_CACHE_PATH": "cuda",  # the driver's
        "XDG_CACHE_HOME": "home",
        "TMPDIR": "temporary",  # where quack and CuTe DSL keep theirs
    }
    found = {name: os.path.join(folder, place) for name, place in names.items()}
    for path in found.values():
        os.makedirs(path, exist_ok=True)
    return found


def run(function: Callable, timeout_s: float, places: dict[str, str] | None = None, **arguments):
    """What a function at the top of a module returns, of and to what JSON can say.

    ``places`` are environment variables, as of ``caches``; without them the compilers' caches
    start empty and are thrown away. Raises WorkerError with what the function raised, or, if the
    process ended otherwise or not in time, with that.
    """
    with temporary_folder() as place:
        result = Path(place, "result")
        name = f"{function.__module__}:{function.__name__}"
        command = [sys.executable, "-m", __name__, name, json.dumps(arguments), str(result)]
        environment = os.environ | (caches(place) if places is None else places)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        options = quiet | {"env": environment, "start_new_session": True}
        with subprocess.Popen(command, **options) as process:
            try:
                _, said = process.communicate(timeout=timeout_s)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)  # and the compilers that it started
                if isinstance(error, subprocess.TimeoutExpired):
                    raise WorkerError(f"not done after {timeout_s:.0f} s") from error
                raise
        if not result.exists():
            last = said.strip().splitlines()[-1:] or ["no message"]
            raise WorkerError(f"exit status {process.returncode}: {last[0][:200]}")
        value, error = json.loads(result.read_text())
    if error:
        raise WorkerError(error)
    return value


def main(name: str, arguments: str, result: str) -> None:
    """In the process of its own: call the function and write down what it returns or raises."""
    module, function = name.split(":")
    value, error = None, ""
    try:
        value = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    except Exception as raised:
        error = first_line(raised)
    Path(result).write_text(json.dumps((value, error)))


if __name__ == "__main__":
    main(*sys.argv[1:])
