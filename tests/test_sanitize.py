"""Every schedule under NVIDIA's compute-sanitizer."""

import os
import shutil
import subprocess
import sys
from unittest.mock import patch

import pytest

from tests import sanitize
from tests.support import cases
from tests.support.calls import NEEDS_GPU
from tests.support.executors import Interpreter
from tilenorm.launch.calls import bound
from tilenorm.launch.target import MULTIPROCESSORS, Target

SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
# PyTorch asks for symbols that a driver may lack, which memcheck would report.
TOOLS = {
    "memcheck": ["--report-api-errors", "no"],
    "initcheck": [],
    "racecheck": [],
    "synccheck": [],
}


def test_every_kernel_and_schedule_runs():
    interpreter, launched = Interpreter("sm_90"), set()
    interpret = interpreter.run()

    def recorded(launches, arrays, index):
        launched.update(call.kernel._pyfunc.__name__ for call in bound(launches, arrays))
        interpret(launches, arrays, index)

    with patch.object(interpreter, "run", lambda: recorded):
        assert not any(reason for _, reason in sanitize.run(interpreter))
    kernels = {"row_forward", "stream_forward", "shared_forward", "norm_backward", "column_sum"}
    assert launched == kernels | {"clear_slots"}
    names = {cases.schedule(job.config, job.spec.hidden) for job in sanitize.JOBS}
    forward = {"RowForward", "StreamForward", "SharedForward"}
    assert names == forward | {"gathered", "tile loads", "shared"}
    streams = {job.config.tma for job in sanitize.JOBS if job.name.startswith("stream")}
    assert streams == {False, True}


@pytest.mark.parametrize("arch", MULTIPROCESSORS)
def test_every_gpu_runs_what_its_architecture_has(arch):
    target = Target(arch, cases.MULTIPROCESSORS)
    left_out = {job.name for job in sanitize.JOBS if sanitize.refusal(job, target)}
    assert left_out == {job.name for job in sanitize.JOBS if job.config.tma and not target.has_tma}


@pytest.mark.long
@NEEDS_GPU
@pytest.mark.skipif(not os.path.exists(SANITIZER), reason="needs compute-sanitizer")
@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_is_clean(tool):
    """Each tensor has an allocation of its own. No tool watches the compiler, which runs first."""
    kernels = [sys.executable, "-m", "tests.sanitize"]
    subprocess.run(kernels, check=True)
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [SANITIZER, "--tool", tool, *TOOLS[tool], *kernels]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "SUMMARY: 0 " in done.stdout, done.stdout[-3000:]
    assert "backward, shared, sums alone: ran" in done.stdout
