"""Runs compute-sanitizer's tools over every schedule: python -m tests.sanitize

Exits with 0 if every tool is clean, 1 if one is not, and 2 if there is no tool or no GPU to run.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys

import torch

from ..executors import Gpu
from . import workload

TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck")
SECONDS = 1800  # for one tool; racecheck makes kernels hundreds of times slower
SHOWN = 40  # lines of what a tool found
# "ERROR SUMMARY: 0 errors", or "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
SUMMARY = re.compile(r"SUMMARY: (\d+) (?:error|hazard)")
WORKLOAD = re.compile(r"workload: \d+ jobs ran")
COMMAND = [sys.executable, "-m", "tests.sanitize", "--workload"]


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.sanitize", description=__doc__.split("\n")[0])
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--workload", action="store_true", help="run the kernels alone")
    asked = parser.parse_args(given)
    if asked.workload:
        return run_workload(Gpu())
    sanitizer = find()
    if sanitizer is None or not torch.cuda.is_available():
        print("it needs a CUDA GPU, and compute-sanitizer of the CUDA toolkit on PATH")
        return 2
    # Alone first: it fills cuTile's cache, so that no tool watches the compiler.
    status, printed = run(COMMAND)
    if status or not WORKLOAD.search(printed):
        print(f"the workload fails by itself, with status {status}:\n{printed}")
        return 1
    verdicts = [report(tool, *run([*line(sanitizer, tool), *COMMAND])) for tool in asked.tools]
    return 0 if all(verdicts) else 1


def run_workload(executor) -> int:
    ran = 0
    for job, reason in workload.run(executor):
        if reason:
            print(f"{job.name}: left out: {reason}")
        else:
            ran += 1
    torch.cuda.synchronize()
    print(f"workload: {ran} jobs ran")
    return 0


def find() -> str | None:
    """compute-sanitizer from PATH, or from the CUDA toolkit of this machine."""
    toolkits = [os.environ.get("CUDA_HOME", "/usr/local/cuda"), "/usr/local/cuda"]
    path = os.pathsep.join([os.environ["PATH"], *(f"{toolkit}/bin" for toolkit in toolkits)])
    return shutil.which("compute-sanitizer", path=path)


def line(sanitizer: str, tool: str) -> list[str]:
    """PyTorch asks for symbols that a driver may lack, which memcheck would report."""
    options = ["--report-api-errors", "no"] if tool == "memcheck" else []
    return [sanitizer, "--tool", tool, "--error-exitcode", "86", *options]


def run(command: list[str]) -> tuple[int, str]:
    """The exit status and the output of a command. Each tensor has an allocation of its own."""
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
    try:
        printed, _ = done.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(done.pid, signal.SIGKILL)  # the tool and the workload
        printed = done.communicate()[0] + f"\nstopped after {SECONDS} s"
    return done.returncode, printed


def report(tool: str, status: int, printed: str) -> bool:
    """Whether a tool ran to its end and found nothing. Prints what it found."""
    counts = SUMMARY.findall(printed)
    ran = bool(counts) and WORKLOAD.search(printed) is not None
    clean = ran and not status and set(counts) == {"0"}
    print(f"{tool}: {'clean' if clean else f'status {status}'}")
    if not clean:
        lines = printed.splitlines()
        found = [text for text in lines if text.startswith("=========")]
        print("\n".join(found[:SHOWN] or lines[-SHOWN:]))
    return clean


if __name__ == "__main__":
    sys.exit(main())
