"""The sanitizer's script: what it launches, and what it makes of what the tools print."""

from unittest.mock import patch

import pytest
import torch

from tests import cases
from tests.executors import Interpreter
from tests.ops.helpers import NEEDS_GPU
from tilenorm.launch.calls import bound
from tilenorm.launch.target import MULTIPROCESSORS, Target

from . import __main__ as script
from . import workload

CLEAN = "========= ERROR SUMMARY: 0 errors"
NO_HAZARD = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
INVALID = "========= Invalid __global__ write of size 4 bytes\n========= ERROR SUMMARY: 3 errors"
HAZARD = "========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)"
RAN = "workload: 16 jobs ran"
# What a tool prints after its status, and what the script makes of it.
REPORTS = [
    (0, f"{RAN}\n{CLEAN}", "clean"),
    (0, f"{RAN}\n{NO_HAZARD}", "clean"),
    (86, f"{RAN}\n{INVALID}", "status 86\n========= Invalid"),
    (0, f"{RAN}\n{HAZARD}", "status 0\n========= RACECHECK"),
    (0, RAN, "status 0"),
    (1, f"{RAN}\n{CLEAN}", "status 1"),
    (0, CLEAN, "status 0"),  # without the workload
]


@pytest.mark.parametrize("status, prints, verdict", REPORTS)
def test_what_a_tool_prints_decides(status, prints, verdict, capsys):
    assert script.report("memcheck", status, prints) is (verdict == "clean")
    assert capsys.readouterr().out.startswith(f"memcheck: {verdict}")


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """A compute-sanitizer that runs the command and is clean. The command is a stand-in, too."""
    check = f'[ "$PYTORCH_NO_CUDA_MEMORY_CACHING" = 1 ] && echo "{RAN}"'
    (tmp_path / "workload").write_text(f"#!/bin/sh\n{check}\n")
    path = tmp_path / "compute-sanitizer"
    words = 'echo "$@" >> "$0.calls"; for last; do :; done'
    path.write_text(f"#!/bin/sh\n{words}; \"$last\"; echo '{CLEAN}'\n")
    for file in tmp_path.iterdir():
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(script, "COMMAND", [str(tmp_path / "workload")])
    return path


def test_every_tool_runs_the_workload(tool, capsys):
    assert script.main([]) == 0
    printed = [f"{name}: clean" for name in script.TOOLS]
    assert capsys.readouterr().out.splitlines() == printed
    asked = (tool.parent / "compute-sanitizer.calls").read_text().splitlines()
    assert [words.split()[:2] for words in asked] == [["--tool", name] for name in script.TOOLS]


# Which program does something else, what it does, and what the script says.
FAULTS = [
    ("compute-sanitizer", f"echo '{RAN}\n{INVALID}'; exit 86", "memcheck: status 86"),
    ("compute-sanitizer", "exec sleep 60", "stopped after 0.3 s"),
    ("workload", "echo broken; exit 3", "fails by itself, with status 3:\nbroken"),
]


@pytest.mark.parametrize("program, does, says", FAULTS)
def test_what_fails(program, does, says, tool, monkeypatch, capsys):
    monkeypatch.setattr(script, "SECONDS", 0.3)
    (tool.parent / program).write_text(f"#!/bin/sh\n{does}\n")
    assert script.main(["--tools", "memcheck"]) == 1
    assert says in capsys.readouterr().out


def test_without_a_gpu(tool, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script.main([]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().out


def test_the_workload_has_every_kernel_and_schedule():
    interpreter, launched = Interpreter("sm_90"), set()
    interpret = interpreter.run()

    def recorded(launches, arrays, index):
        launched.update(call.kernel._pyfunc.__name__ for call in bound(launches, arrays))
        interpret(launches, arrays, index)

    with patch.object(interpreter, "run", lambda: recorded):
        assert not any(reason for _, reason in workload.run(interpreter))
    kernels = {"row_forward", "stream_forward", "shared_forward", "norm_backward", "column_sum"}
    assert launched == kernels | {"clear_slots"}
    names = {cases.schedule(job.config, job.spec.hidden) for job in workload.JOBS}
    forward = {"RowForward", "StreamForward", "SharedForward"}
    assert names == forward | {"gathered", "tile loads", "shared"}
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
