import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch

import tilenorm
from bench import norms, record, timing, worker
from bench.__main__ import main

from ..distributed.conftest import world  # noqa: F401


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    """On the CPU, few calls are timed, without warming up: no test uses the value. Other tests have
    the threads that they had before.
    """
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if not torch.cuda.is_available():
        monkeypatch.setattr(timing, "WARM_UP_S", 0.0)
        monkeypatch.setattr(timing, "CPU_BUDGET_S", 0.0)
        monkeypatch.setattr(timing, "host", partial(timing.host, samples=2, calls=2))


@pytest.fixture
def graphs(monkeypatch) -> list:
    """The graphs that torch.compile and tilenorm.compile make. They run as they are."""
    found = []

    def backend(graph, inputs):
        found.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for module in (torch, tilenorm):
        monkeypatch.setattr(module, "compile", partial(module.compile, backend=backend))
    return found


@pytest.fixture
def without_gpu(monkeypatch):
    """The bench runs on the CPU, where tilenorm's reference serves."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def inline(monkeypatch):
    """What a worker process would run runs in this one."""

    def run(function, timeout_s, places=None, **arguments):
        return function(**arguments)

    monkeypatch.setattr(worker, "run", run)


@pytest.fixture
def liger(monkeypatch):
    """Modules in place of Liger's, which compute as PyTorch's do, and know what they were asked."""

    def made(base, hidden, eps, **asked):
        module = base(hidden, eps)
        module.asked = {"eps": eps, **asked}
        return module

    for base, (name, kind) in norms.LIGER.items():
        for package in ("liger_kernel", "liger_kernel.transformers"):
            monkeypatch.setitem(sys.modules, package, ModuleType(package))
        module = SimpleNamespace(**{kind: partial(made, base)})
        monkeypatch.setitem(sys.modules, f"liger_kernel.transformers.{name}", module)


@pytest.fixture
def tiny(monkeypatch, without_gpu):
    """The bench runs on the CPU with few rows."""
    monkeypatch.setattr("bench.__main__.CPU_ELEMENTS", 4096)


@pytest.fixture
def again(tmp_path, capsys):
    """A function that runs a command twice: the second time from its record, with equal output."""

    def run(command: list[str]) -> tuple[record.Record, str, str]:
        """The record, and what is printed to stdout and to stderr."""
        path = str(tmp_path / "new" / "run.jsonl")
        assert not main([*command, "--out", path])
        out, err = capsys.readouterr()
        assert not main(["--from", path])
        assert capsys.readouterr().out == out
        return record.load([path]), out, err

    return run


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return "cuda"
