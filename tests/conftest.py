import os
from pathlib import Path

import pytest
import torch

from tilenorm.__main__ import main
from tilenorm.launch import plan, user_table

from . import cases
from .executors import Executor, Gpu, Interpreter


def pytest_configure() -> None:
    # The interpreter's tiles are small: a second thread doubles the CPU time of the kernels' tests
    # (116 s to 230 s), and where cores are shared its waiting takes minutes.
    torch.set_num_threads(1)
    # A user's own tables would change the plans. There is no such folder; processes that tests
    # start look there too.
    os.environ["TILENORM_CACHE_DIR"] = str(Path(__file__).parent / "no_tables")


@pytest.fixture
def refused(capsys):
    """A function of command line arguments that are refused, which returns what is said of them."""

    def told(arguments: list[str]) -> str:
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
        return capsys.readouterr().err

    return told


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """An empty folder for a user's tables, of which nothing is remembered before or after."""
    folder = tmp_path / "tables"
    monkeypatch.setenv("TILENORM_CACHE_DIR", str(folder))
    caches = (user_table.configs, plan.plan_forward, plan.plan_backward)
    for cache in caches:
        cache.cache_clear()
    yield folder
    for cache in caches:
        cache.cache_clear()


@pytest.fixture(params=cases.EXECUTORS)
def executor(request) -> Executor:
    """Each executor by name; tests over cases.matrix name the executor themselves."""
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
