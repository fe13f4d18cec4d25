"""First uses of a package: pieces of code, each in a fork of one new process."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
EACH_IN_A_FORK = """
import os, sys

exec(sys.argv[1])
for use in sys.argv[2:]:
    child = os.fork()
    if child == 0:
        first(use)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print("fails:", use)
"""


def failing(before: str, uses: Sequence[str]) -> str:
    """The uses that fail, with what they print. before: code that the process runs once. It defines
    first(use), which each fork calls.
    """
    command = [sys.executable, "-W", "ignore", "-c", EACH_IN_A_FORK, before, *uses]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr if "fails:" in done.stdout else done.stdout
