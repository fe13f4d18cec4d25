"""Which executor runs each case. A run of pytest prints how many cases each executor ran."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch

from . import cases
from .executors import Executor
from .ops.helpers import NEEDS_GPU

COMPILER, OPS, HOST = "compiler", "PyTorch on the CPU", "host code alone"
CHOSEN = "interpreter, for the architecture that the test chooses"
INTERPRETER_TESTS = "interpreter, in its own tests"
# This variable names a file of counts. Each run of pytest adds its counts: .ci/run has two runs.
FILE = "TILENORM_TEST_COUNTS"
EXECUTORS = (*cases.EXECUTORS, CHOSEN, INTERPRETER_TESTS, COMPILER, OPS, HOST)


def parameters(item: pytest.Item) -> dict[str, object]:
    callspec = getattr(item, "callspec", None)
    return callspec.params if callspec else {}


def executor_of(item: pytest.Item) -> str:
    """The executor of a case: one of EXECUTORS."""
    params, fixtures = parameters(item), getattr(item, "fixturenames", ())
    folder = item.path.parent.name
    if NEEDS_GPU.mark in item.iter_markers("skipif"):
        return "gpu"
    if "executor" in params:
        executor = params["executor"]
        return executor.name if isinstance(executor, Executor) else executor
    if "as_on_a_gpu" in fixtures or "pretends" in fixtures:
        return "interpreter_sm_90"
    if "job" in params:
        return COMPILER
    if folder == "kernels":
        return CHOSEN
    if item.path.name.startswith("test_interpreter"):
        return INTERPRETER_TESTS
    return OPS if folder in ("ops", "integrations", "distributed") or "device" in params else HOST


def needs_missing_gpu(item: pytest.Item) -> bool:
    return executor_of(item) == "gpu" and not torch.cuda.is_available()


def pytest_terminal_summary(terminalreporter, config) -> None:
    if config.option.collectonly or hasattr(config, "workerinput"):  # a worker of xdist
        return
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, [])]
    ran = Counter(dict(r.user_properties).get("executor") for r in reports if r.when == "call")
    del ran[None]
    title, file = "cases that ran, by executor", os.environ.get(FILE)
    if file:
        path = Path(file)
        before = json.loads(path.read_text()) if path.exists() else {}
        ran.update(before)
        path.write_text(json.dumps(ran))
        title += ", with those of the runs before" if before else ""
    terminalreporter.section(title)
    for executor in EXECUTORS:
        terminalreporter.line(f"{ran[executor]:6}  {executor}")
    terminalreporter.line(f"{ran.total():6}  in all")
