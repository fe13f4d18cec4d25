import gc
import itertools
import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest
import torch

from tests.support import cases, turns
from tests.support.calls import NEEDS_GPU
from tests.support.executors import Executor, Gpu, Interpreter
from tests.support.outcomes import Outcomes
from tests.support.pretended import forgotten
from tests.support.stand_in_compiler import Compiler
from tilenorm.__main__ import main
from tilenorm.launch import plan, toolchain, user_table
from tilenorm.ops.passes import native
from tilenorm.ops.passes.native import build
from tilenorm.spec import NormSpec

EXTENSION = "TESTS_EXTENSION"  # a variable: the file of the extension that serves
TURNS = "test_accuracy"  # the dtypes take turns in the quick cases of this test
ONE_OF = 6  # cases that combine what other cases of a test have: so many of them stand for one


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "serve repeated calls by the extension in C++, which `python -m tilenorm build` builds"
    parser.addoption("--native", action="store_true", help=text)
    text = "run the cases alone that need a GPU"
    parser.addoption("--only-gpu", action="store_true", help=text)
    text = "write what each case does to a file, as lines of JSON"
    parser.addoption("--outcomes", metavar="FILE", type=Path, help=text)
    text = "leave out the cases that a file names, one on a line"
    parser.addoption("--leave-out", metavar="FILE", type=Path, help=text)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("outcomes") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(config.getoption("outcomes")))
    if config.getoption("--native"):
        # Processes of pytest-xdist inherit the variable, and another cache folder.
        extension = Path(os.environ.setdefault(EXTENSION, str(build.path())))
        if not extension.exists():
            raise pytest.UsageError("--native: first run `python -m tilenorm build`")
        native.state().use(build.load(extension))
    elif not build.refused() and build.path().exists():
        os.environ.setdefault(EXTENSION, str(build.path()))  # a build takes half a minute
    build.path.cache_clear()
    # The interpreter's tiles are small. A second thread doubles the CPU time of the kernels' tests
    # from 116 s to 230 s, and takes minutes of waiting where other processes use the cores.
    torch.set_num_threads(1)
    # A user's own tables would change the plans. This folder does not exist. Processes that tests
    # start inherit the variable.
    os.environ["TILENORM_CACHE_DIR"] = str(Path(__file__).parent / "no_tables")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep Python's search for unreachable objects from what collection makes and imports: that
    lives to the end, and to look at it again and again took a twentieth of the run.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items: list[pytest.Item]) -> None:
    """Mark as slow each case that tests nothing that a quick case of the same test does not test:
    it combines what they have. Of those, one of ONE_OF runs, drawn by its name; all with -m ''.

    Of test_accuracy each function is quick by each way of serving, in one dtype, and all other
    cases are slow: accuracy is the first contract. All cases of a GPU are quick, because nothing
    else runs them and wide rows are fast there. Without a GPU they are left out: thousands of
    skipped cases would take time, and hide the others that skip.
    """
    _mark_out_of_turn([item for item in items if item.originalname == TURNS])
    seen, left_out = defaultdict(set), set()
    for item in sorted(items, key=lambda item: getattr(spec_of(item), "hidden", 0)):
        if not (is_of_gpu(item) or item.get_closest_marker("slow") or item.originalname == TURNS):
            tested = tested_by(item)
            if tested and tested <= seen[item.function]:
                item.add_marker("slow")
                if config.option.markexpr and crc32(item.nodeid.encode()) % ONE_OF:
                    left_out.add(item)
            seen[item.function] |= tested
    _keep(config, items, lambda item: item not in left_out)
    if not torch.cuda.is_available():
        _keep(config, items, lambda item: not is_of_gpu(item))
    if config.getoption("only_gpu"):
        _keep(config, items, is_of_gpu)
        items.sort(key=turns.place_in_run)
    if config.getoption("leave_out"):
        names = {*config.getoption("leave_out").read_text().splitlines()}
        _keep(config, items, lambda item: item.nodeid not in names)


def _mark_out_of_turn(items: list[pytest.Item]) -> None:
    """Mark as slow all cases but one of each function and way of serving. The dtypes take turns
    from one function to the next.
    """
    groups = defaultdict(lambda: defaultdict(list))
    for item in itertools.filterfalse(is_of_gpu, items):
        given = parameters(item)
        groups[str(given["form"])][given["served"]].append(item)
    for turn, by_way in enumerate(groups.values()):
        for group in by_way.values():
            for item in group:
                if item is not group[turn % len(group)]:
                    item.add_marker("slow")


def _keep(config, items: list[pytest.Item], kept: Callable[[pytest.Item], bool]) -> None:
    config.hook.pytest_deselected(items=list(itertools.filterfalse(kept, items)))
    items[:] = filter(kept, items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    if not torch.cuda.is_available() or not is_of_gpu(item):
        return (yield)
    with turns.turn(turns.memory_of(item, getattr(spec_of(item), "hidden", 0))):
        return (yield)


def parameters(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def is_of_gpu(item: pytest.Item) -> bool:
    executor = parameters(item).get("executor")
    named = getattr(executor, "name", executor) == "gpu"
    return named or NEEDS_GPU.mark in item.iter_markers("skipif")


def spec_of(item: pytest.Item) -> NormSpec | None:
    """What a case of tests/kernels runs, or a spec of its size where the test makes the spec."""
    given = parameters(item) if item.path.parent.name == "kernels" else {}
    if "hidden" in given:
        return NormSpec("rms", given["hidden"], "bfloat16")
    return given.get("spec")


def tested_by(item: pytest.Item) -> set:
    """Each value of a parameter, and each schedule of the kernels. Of wide rows, the latter only:
    they take the interpreter long.
    """
    given, spec = parameters(item), spec_of(item)
    values = {(name, str(value)) for name, value in given.items()}
    if spec is None:
        return values
    executor = given.get("executor", "sm_80")
    arch = getattr(executor, "name", executor).removeprefix("interpreter_")
    name = f"{item.path.stem} {item.originalname}"
    schedules = {
        (direction, cases.schedule(config, spec.hidden))
        for direction in [d for d in cases.DIRECTIONS if d in name] or cases.DIRECTIONS
        for config in [cases.config(direction, spec, cases.target(arch))]
    }
    return {arch, *schedules} if spec.hidden > cases.NARROW else {arch, *schedules, *values}


@pytest.fixture(scope="session")
def extension_file(tmp_path_factory) -> Path | None:
    """The extension in C++: one that is built where users have it, or for these tests, once for all
    processes of pytest-xdist. None where there is no compiler.
    """
    if EXTENSION in os.environ:
        return Path(os.environ[EXTENSION])
    if build.refused() or build.missing():
        return None
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("TILENORM_CACHE_DIR", str(folder / "extension"))
            build.path.cache_clear()
            while True:
                try:
                    return build.build(print)
                except build.BuildError as error:
                    if str(error) != build.LOCKED:
                        raise
                time.sleep(0.5)
    finally:
        build.path.cache_clear()


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
    with forgotten(*caches):
        yield folder


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
