import os
from pathlib import Path

import pytest
import torch

from tilenorm.__main__ import main
from tilenorm.launch import plan, toolchain, user_table

from . import cases
from .executed import executor_of, needs_missing_gpu, pytest_terminal_summary  # noqa: F401
from .executors import Executor, Gpu, Interpreter
from .quick import slow_cases
from .stand_in_compiler import Compiler

COLLECTED = pytest.StashKey[list]()  # every case, before any is deselected


def pytest_configure() -> None:
    # The interpreter's tiles are small. A second thread doubles the CPU time of the kernels' tests
    # from 116 s to 230 s, and takes minutes of waiting where other processes use the cores.
    torch.set_num_threads(1)
    # A user's own tables would change the plans. This folder does not exist. Processes that tests
    # start inherit the variable.
    os.environ["TILENORM_CACHE_DIR"] = str(Path(__file__).parent / "no_tables")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items: list[pytest.Item]) -> None:
    for item in slow_cases(items):
        item.add_marker("slow")
    config.stash[COLLECTED] = list(items)
    # Without a GPU thousands of skipped cases would take time, and hide the others that skip.
    config.hook.pytest_deselected(items=[item for item in items if needs_missing_gpu(item)])
    items[:] = [item for item in items if not needs_missing_gpu(item)]
    for item in items:
        item.user_properties.append(("executor", executor_of(item)))


@pytest.fixture
def refused(capsys):
    """A function that runs a command that must be refused, and returns the error message."""

    def message(arguments: list[str]) -> str:
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
        return capsys.readouterr().err

    return message


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """An empty folder for a user's tables; plans made before and during the test are forgotten."""
    folder = tmp_path / "tables"
    monkeypatch.setenv("TILENORM_CACHE_DIR", str(folder))
    caches = (user_table.configs, plan.plan_forward, plan.plan_backward)
    caches += (toolchain.compiler_problem, toolchain.toolkit_problem)
    for cache in caches:
        cache.cache_clear()
    yield folder
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def compiler(tables, tmp_path, monkeypatch) -> Compiler:
    """A program in the place of tileiras. Plans keep kernels, and are forgotten with it."""
    return Compiler(tmp_path, monkeypatch)


@pytest.fixture(params=cases.EXECUTORS)
def executor(request) -> Executor:
    """Each executor in turn. Tests over cases.matrix choose the executor of each case."""
    if request.param != "gpu":
        return Interpreter(request.param.removeprefix("interpreter_"))
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    return Gpu()


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo
    torch._dynamo.reset()
