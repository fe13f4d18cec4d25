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
from pathlib import Path

import torch

from ..executors import Gpu, Interpreter
from . import workload

TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck")
FOUND = "86"  # the exit status of compute-sanitizer that means: something was found
SECONDS = 1800  # for one tool; racecheck makes kernels hundreds of times slower
SHOWN = 40  # lines of what a tool found
CLEAN, UNCLEAN, UNAVAILABLE = 0, 1, 2
# "ERROR SUMMARY: 0 errors", or "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
SUMMARY = re.compile(r"SUMMARY: (\d+) (?:error|hazard)")
WORKLOAD = re.compile(r"workload: \d+ jobs ran")


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.sanitize", description=__doc__.split("\n")[0])
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--workload", action="store_true", help="run the kernels alone")
    parser.add_argument("--interpreter", action="store_true", help="run them in the interpreter")
    asked = parser.parse_args(given)
    if asked.workload:
        return run_workload(Interpreter("sm_90") if asked.interpreter else Gpu())
    sanitizer = find()
    if sanitizer is None:
        print("compute-sanitizer is missing: it is part of the CUDA toolkit; put it on PATH")
        return UNAVAILABLE
    if not torch.cuda.is_available() and not asked.interpreter:
        print("there is no CUDA GPU that PyTorch can use")
        return UNAVAILABLE
    command = [sys.executable, "-m", "tests.sanitize", "--workload"]
    command += ["--interpreter"] * asked.interpreter
    # Alone first: it fills cuTile's cache, so that no tool watches the compiler.
    status, printed = run(command)
    if status or not WORKLOAD.search(printed):
        print(f"the workload fails by itself, with status {status}:\n{printed}")
        return UNCLEAN
    verdicts = [report(tool, *run([*line(sanitizer, tool), *command])) for tool in asked.tools]
    return CLEAN if all(verdicts) else UNCLEAN


def run_workload(executor) -> int:
    ran = 0
    for job, _, found in workload.run(executor):
        if isinstance(found, str):
            print(f"{job.name}: left out: {found}")
        else:
            ran += 1
    if executor.device == "cuda":
        torch.cuda.synchronize()
    print(f"workload: {ran} jobs ran")
    return CLEAN


def find() -> str | None:
    """compute-sanitizer from PATH, or from the CUDA toolkit of this machine."""
    folders = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    places = [str(Path(folder) / "bin") for folder in folders if folder]
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(places)
    )


def line(sanitizer: str, tool: str) -> list[str]:
    """PyTorch asks for symbols that a driver may lack, which memcheck would report."""
    options = ["--report-api-errors", "no"] if tool == "memcheck" else []
    return [sanitizer, "--tool", tool, "--error-exitcode", FOUND, *options]


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
    counts = [int(number) for number in SUMMARY.findall(printed)]
    ran = bool(counts) and WORKLOAD.search(printed) is not None
    if ran and not status and not any(counts):
        print(f"{tool}: clean")
        return True
    if ran and any(counts):
        print(f"{tool}: {sum(counts)} findings")
    else:
        print(f"{tool}: did not run to its end, status {status}")
    lines = printed.splitlines()
    found = [text for text in lines if text.startswith("=========")]
    print("\n".join(found[:SHOWN] or lines[-SHOWN:]))
    return False


if __name__ == "__main__":
    sys.exit(main())
