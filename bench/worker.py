"""Run a function in a worker process with its own memory and its own compilers' caches."""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.text import first_line

TIMEOUT_S = 1800.0
# The last steps, the kernels' profile and the end of the process come after the deadline.
GRACE_S = 60.0
# Processes that work beside each other on one GPU. They leave a core to the process that waits.
MOST_PROCESSES = 15
PROCESSES = min(MOST_PROCESSES, max(1, (os.cpu_count() or 2) - 1))


class WorkerError(Exception):
    """A failure of a worker process."""


def temporary_folder() -> tempfile.TemporaryDirectory:
    """A temporary folder. Files that a compiler's process still writes at the end may stay."""
    return tempfile.TemporaryDirectory(ignore_cleanup_errors=True)


def caches(folder: str) -> dict[str, str]:
    """Environment variables that put the disk caches of all compilers into a folder."""
    names = {
        "CUDA_TILE_CACHE_DIR": "cutile",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "TRITON_CACHE_DIR": "triton",
        "CUDA_CACHE_PATH": "cuda",  # the driver's cache
        "XDG_CACHE_HOME": "home",
        "TMPDIR": "temporary",  # the caches of quack and CuTe DSL
    }
    found = {name: os.path.join(folder, place) for name, place in names.items()}
    for path in found.values():
        os.makedirs(path, exist_ok=True)
    return found


def run(function: Callable, timeout_s: float, places: dict[str, str] | None = None, **arguments):
    """The result of a module-level function, called in a worker process.

    pickle has to be able to hold the arguments and the result. ``places`` are environment variables
    from ``caches``. Without them the compilers' caches start empty and are deleted at the end.
    Raises WorkerError if the function raises, if the process dies, or if it takes too long.
    """
    with temporary_folder() as place:
        call, result = Path(place, "call"), Path(place, "result")
        call.write_bytes(pickle.dumps((function, arguments)))
        command = [sys.executable, "-m", __name__, str(call), str(result)]
        environment = os.environ | (caches(place) if places is None else places)
        options: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        options |= {"text": True, "env": environment, "start_new_session": True}
        with subprocess.Popen(command, **options) as process:
            try:
                _, said = process.communicate(timeout=timeout_s)
            except BaseException as stopped:
                os.killpg(process.pid, signal.SIGKILL)  # and the processes that it started
                if isinstance(stopped, subprocess.TimeoutExpired):
                    raise WorkerError(f"not done after {timeout_s:.0f} s") from stopped
                raise
        if not result.exists():
            last = said.strip().splitlines()[-1:] or ["no message"]
            raise WorkerError(f"exit status {process.returncode}: {last[0][:200]}")
        value, error = pickle.loads(result.read_bytes())
    if error:
        raise WorkerError(error)
    return value


def until(deadline: float, function: Callable, **arguments):
    """The result of a function that starts nothing after its deadline, a value of time.time().

    The compilers' caches are those of this process. Raises WorkerError as ``run`` does, and if it
    is late.
    """
    left = deadline - time.time()
    if left <= 0:
        raise WorkerError("out of time")
    limit = min(TIMEOUT_S, left + GRACE_S)
    return run(function, limit, places={}, deadline=deadline, **arguments)


def main(call: str, result: str) -> None:
    """The worker process: call the function, and write its result or its exception to a file."""
    function, arguments = pickle.loads(Path(call).read_bytes())
    value, error = None, ""
    try:
        value = function(**arguments)
    except Exception as raised:
        error = first_line(raised)
    Path(result).write_bytes(pickle.dumps((value, error)))


if __name__ == "__main__":
    main(*sys.argv[1:])
