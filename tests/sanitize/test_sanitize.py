"""The sanitizer's script: what it launches, and what it makes of what the tools print."""

import shutil
import sys
from unittest.mock import patch

import pytest
import torch

from tests import cases
from tests.executors import Interpreter
from tests.ops.helpers import NEEDS_GPU
from tests.tolerance import assert_close
from tilenorm.launch.calls import bound
from tilenorm.launch.target import MULTIPROCESSORS, Target

from . import __main__ as script
from . import workload

CLEAN = "========= ERROR SUMMARY: 0 errors"
NO_HAZARD = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
INVALID = "========= Invalid __global__ write of size 4 bytes\n========= ERROR SUMMARY: 3 errors"
HAZARD = "========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)"
RAN = "workload: 16 jobs ran"


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A function that puts a compute-sanitizer on PATH, which runs the command and then a script.

    The command is a stand-in for Python.
    """
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    def put(prints: str, status: int = 0, python: str = f"echo '{RAN}'"):
        check = '[ "$PYTORCH_NO_CUDA_MEMORY_CACHING" = 1 ] || exit 9\n'
        tool = 'echo "$@" >> "$0.calls"\nwhile [ "${1#*/python}" = "$1" ]; do shift; done\n"$@"\n'
        for name, text in (
            ("python", check + python),
            ("compute-sanitizer", f"{tool}echo '{prints}'\nexit {status}"),
        ):
            (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / name).chmod(0o755)
        return tmp_path / "compute-sanitizer.calls"

    return put


@pytest.mark.parametrize("prints", [CLEAN, NO_HAZARD])
def test_clean(tools, prints, capsys):
    calls = tools(prints)
    assert script.main([]) == 0
    assert capsys.readouterr().out.split("\n")[:4] == [f"{tool}: clean" for tool in script.TOOLS]
    asked = calls.read_text().splitlines()
    assert [words.split()[:2] for words in asked] == [["--tool", tool] for tool in script.TOOLS]
    assert all("-m tests.sanitize --workload" in words for words in asked)


@pytest.mark.parametrize(
    "prints, status, count", [(INVALID, 86, 3), (HAZARD, 0, 1), (INVALID, 0, 3)]
)
def test_findings(tools, prints, status, count, capsys):
    tools(prints, status)
    assert script.main(["--tools", "racecheck"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith(f"racecheck: {count} findings") and prints in printed


@pytest.mark.parametrize("prints, status", [("", 0), ("no device", 1), (CLEAN, 1)])
def test_a_tool_that_does_not_run_to_its_end(tools, prints, status, capsys):
    tools(prints, status)
    assert script.main(["--tools", "memcheck"]) == 1
    assert "memcheck: did not run to its end" in capsys.readouterr().out


def test_a_workload_that_a_tool_does_not_run(tools, capsys):
    tools(CLEAN, python=f'[ -e "$0.ran" ] || echo "{RAN}"; touch "$0.ran"')
    assert script.main(["--tools", "memcheck"]) == 1
    assert "did not run to its end" in capsys.readouterr().out


def test_a_workload_that_fails_by_itself(tools, capsys):
    tools(CLEAN, python="echo broken; exit 3")
    assert script.main([]) == 1
    assert "fails by itself, with status 3:\nbroken" in capsys.readouterr().out


def test_a_tool_that_hangs(tools, monkeypatch, capsys):
    monkeypatch.setattr(script, "SECONDS", 0.2)
    tools(
        CLEAN,
        python='[ -e "$0.ran" ] && exec sleep 60; touch "$0.ran"; echo "workload: 1 jobs ran"',
    )
    assert script.main(["--tools", "memcheck"]) == 1
    assert "stopped after 0.2 s" in capsys.readouterr().out


def test_without_the_tool_or_a_gpu(tools, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    assert script.main([]) == 2
    assert "compute-sanitizer is missing" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setattr(script, "find", lambda: "/bin/true")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script.main([]) == 2
    assert "no CUDA GPU" in capsys.readouterr().out


@pytest.fixture(scope="module")
def launched():
    """What the interpreter gives for the workload, and the names of the kernels that it ran."""
    interpreter, kernels = Interpreter("sm_90"), set()
    interpret = interpreter.run()

    def recorded(launches, arrays, index):
        kernels.update(call.kernel._pyfunc.__name__ for call in bound(launches, arrays))
        interpret(launches, arrays, index)

    with patch.object(interpreter, "run", lambda: recorded):
        return list(workload.run(interpreter)), kernels


def test_the_workload_is_right(launched):
    for job, inputs, found in launched[0]:
        truth, own = inputs.truth(job.spec), inputs.own(job.spec)
        for name, tensor in found.items():
            shape = truth[name].value.shape
            assert_close(name, tensor.reshape(shape), truth[name], own[name])


def test_the_workload_has_every_kernel_and_schedule(launched):
    assert launched[1] == {
        "row_forward",
        "stream_forward",
        "shared_forward",
        "norm_backward",
        "column_sum",
        "clear_slots",
    }
    names = {cases.schedule(job.config, job.spec.hidden) for job in workload.JOBS}
    assert names == {
        "RowForward",
        "StreamForward",
        "SharedForward",
        "gathered",
        "tile loads",
        "shared",
    }
    streams = {job.config.tma for job in workload.JOBS if job.name.startswith("stream")}
    assert streams == {False, True}


@pytest.mark.parametrize("arch", MULTIPROCESSORS)
def test_every_gpu_runs_the_workload(arch):
    target = Target(arch, cases.MULTIPROCESSORS)
    left_out = {job.name for job in workload.JOBS if workload.refusal(job, target)}
    assert left_out == {job.name for job in workload.JOBS if job.config.tma and not target.has_tma}


@NEEDS_GPU
@pytest.mark.skipif(script.find() is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("tool", script.TOOLS)
def test_every_tool_is_clean(tool):
    assert script.main(["--tools", tool]) == 0
