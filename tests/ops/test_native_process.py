"""When a process loads the extension in C++, has it built, or does without it, and what it tells.

A shell script stands in for the compiler, see test_native_build.py.
"""

import shutil
import subprocess
import sys
import sysconfig
from types import SimpleNamespace

import pytest
import torch

import tilenorm
from tests.support.pretended import pretended_gpu
from tests.support.stand_in_cxx import FAILS, failing
from tilenorm.ops import call
from tilenorm.ops.passes import bound, native
from tilenorm.ops.passes.native import build
from tilenorm.ops.pytorch import torch_private
from tilenorm.tools import info

pytestmark = pytest.mark.skipif(
    bool(sys.platform != "linux" or build.refused() or build.missing()),
    reason="no extension is built here",
)


@pytest.fixture
def state(monkeypatch) -> native.State:
    """What a new process knows. pytest has not started it."""
    monkeypatch.delenv("PYTEST_VERSION", raising=False)
    return native.State()


# ------------------------------------------------------------------------------ where none is built

REFUSED = {
    "darwin": ((sys, "platform", "darwin"), "this is darwin"),
    "a Python without a lock": (
        (sysconfig, "get_config_var", lambda name: 1),
        "a Python without a global lock is not served",
    ),
    "another PyTorch": ((torch_private, "OTHER_BITS", 0), "no way to ask for dispatch keys"),
    "no cache folder": (
        (build, "settings", lambda: native.settings()._replace(tables=None)),
        "set TILENORM_CACHE_DIR",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name, state, cxx, monkeypatch):
    change, reason = REFUSED[name]
    monkeypatch.setattr(*change)
    state.want(0)
    assert reason in state.reason and not state.waits and not cxx.runs
    assert reason in failing() and reason in state.told()


# ------------------------------------------------------------------------------ what a process does


class Started:
    """In the place of subprocess.Popen: keeps what it is given."""

    def __init__(self, monkeypatch):
        self.seen: list[dict] = []
        self.polls = 0
        monkeypatch.setattr(native, "subprocess", SimpleNamespace(Popen=self, DEVNULL=None))

    def __call__(self, **how):
        self.seen.append(how)
        return self

    def poll(self):
        self.polls += 1


@pytest.fixture
def started(monkeypatch) -> Started:
    return Started(monkeypatch)


@pytest.fixture
def loaded(monkeypatch) -> list:
    """Any file can be loaded. The extensions that a process uses."""
    used: list = []
    monkeypatch.setattr(build, "load", lambda path: Extension(str(path)))
    monkeypatch.setattr(native, "start", used.append)
    return used


class Extension:
    def __init__(self, file: str):
        self.__file__ = file

    def served(self):
        pass


def test_a_process_asks_once(state, cxx, started, build_folder):
    state.want(-1)
    assert not started.seen and not state.waits, "a call on a CPU"
    state.want(0)
    assert state.waits and state.reason == "it is being built by another process"
    state.want(0)
    [how] = started.seen
    assert how["env"]["CUDA_VISIBLE_DEVICES"] == "" and how["start_new_session"]
    assert how["env"]["TILENORM_CACHE_DIR"] == str(build_folder.parent)
    assert state.told() == "in Python: it is not built yet; python -m tilenorm build builds it"


def test_a_build_that_ends_while_the_process_runs(state, cxx, started, loaded, build_folder):
    forgotten: list[str] = []
    state.when_changed(lambda: forgotten.append("forgotten"))
    state.want(0)
    for _ in range(2 * native.LOOKS):
        state.look()
    assert state.waits and state.extension is None and not forgotten and started.polls == 2
    build_folder.mkdir(parents=True)
    build.path().touch()
    for _ in range(native.LOOKS):
        state.look()
    assert not state.waits and state.extension is loaded[0] and state.served
    assert forgotten == ["forgotten"] and state.reason == ""
    assert state.told() == f"by the extension {build.path()}"


def test_a_build_that_fails_while_the_process_runs(state, cxx, started):
    state.want(0)
    cxx.does(FAILS)
    failing(aside=True)
    for _ in range(native.LOOKS):
        state.look()
    assert not state.waits and state.told() == "in Python: it does not compile: error: no"


def test_a_file_that_does_not_load(state, cxx, started, build_folder):
    build_folder.mkdir(parents=True)
    build.path().write_text("no library")
    state.want(0)
    assert f"{build.path()} does not load: " in state.reason
    assert not state.waits and not started.seen


def test_no_process_is_started_for_nothing(state, cxx, started, build_folder, monkeypatch):
    """Where the build would fail, or is not wanted. TILENORM_NATIVE=0 also leaves out what is
    built.
    """

    def asked() -> str:
        fresh = native.State()
        fresh.want(0)
        assert not started.seen
        return fresh.reason

    with monkeypatch.context() as patched:
        patched.setenv("TILENORM_NATIVE", "0")
        assert asked() == "TILENORM_NATIVE is 0"
    with monkeypatch.context() as patched:
        patched.setenv("PYTEST_VERSION", "9")
        assert "it is not built yet" in asked()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "frozen", True, raising=False)
        assert asked() == "no program of Python's is known that could build it"
    with monkeypatch.context() as patched:
        patched.setenv("CXX", "/nowhere/c++")
        assert "there is no such program" in asked()
        assert "there is no such program" in native.State().told()
    cxx.does(FAILS)
    failing()
    assert asked() == "it does not compile: error: no"
    shutil.rmtree(build_folder.parent)
    build_folder.parent.write_text("a file")
    assert f"{build_folder.parent} is no folder that can be written" in asked()


def test_no_process_can_be_started(state, cxx, monkeypatch):
    def none(**_):
        raise OSError("too many processes")

    monkeypatch.setattr(native, "subprocess", SimpleNamespace(Popen=none, DEVNULL=None))
    state.want(0)
    assert state.reason == "no process to build it: too many processes" and not state.waits


def test_the_process_beside_imports_what_this_one_imports(cxx, tmp_path, monkeypatch):
    """Also from another working folder, whose modules it does not import."""
    (tmp_path / "torch.py").write_text("raise ZeroDivisionError")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILENORM_CACHE_DIR", "cache")
    code = "from importlib.util import find_spec; print(find_spec('torch').origin, sys.argv[1])"
    how = build.beside(code, "word")
    done = subprocess.run(**how, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [torch.__file__, "word"]
    assert how["env"]["TILENORM_CACHE_DIR"] == str(tmp_path / "cache")


@pytest.mark.slow
def test_a_process_builds_beside_another(state, cxx, tmp_path, build_folder):
    """The real process, which the stand-in compiler fails."""
    cxx.does(FAILS)
    state.want(0)
    assert state._builder.wait() == 2
    for _ in range(native.LOOKS):
        state.look()
    assert state.reason == "it does not compile: error: no" and not state.waits


# ------------------------------------------------------------------------------------- what is told


@pytest.fixture
def process(monkeypatch, state) -> native.State:
    """In the test, this process knows what a new one knows."""
    state.when_changed(call.remembered.cache_clear)
    state.when_changed(bound.bound_for.cache_clear)
    for module in (native, info.native):
        monkeypatch.setattr(module, "state", lambda: state)
    monkeypatch.setattr(call, "NATIVE", state)
    return state


def line() -> str:
    lines, wrong = info.information()
    [found] = [each for each in lines if each.startswith("repeated calls: ")]
    assert not any("repeated" in each for each in wrong)
    return found


def test_info_and_describe(process, cxx, loaded, build_folder, monkeypatch):
    not_built = "it is not built yet; python -m tilenorm build builds it"
    assert line() == f"repeated calls: in Python: {not_built}"
    monkeypatch.setenv("TILENORM_NATIVE", "0")
    assert line() == "repeated calls: in Python: TILENORM_NATIVE is 0"
    assert native.describe() == "python"
    monkeypatch.delenv("TILENORM_NATIVE")
    build_folder.mkdir(parents=True)
    build.path().touch()
    assert line() == f"repeated calls: by the extension {build.path()}"
    assert native.describe() == "native"


def test_what_python_has_prepared_is_forgotten(process, cxx, started, loaded, build_folder):
    """Calls look for the extension, and prepare anew for it."""
    x = torch.randn(3, 16)

    def norm():
        return tilenorm.rms_norm(x, (16,), eps=1e-6)

    with pretended_gpu():
        norm()
        process.want(0)
        build_folder.mkdir(parents=True)
        build.path().touch()
        for _ in range(native.LOOKS - 1):
            norm()
        assert bound.bound_for.cache_info().currsize and call.remembered.cache_info().currsize
        process._calls = native.LOOKS - 1
        norm()
        assert process.extension is loaded[0]
        assert not bound.bound_for.cache_info().currsize
        assert not call.remembered.cache_info().currsize
        process.use(None)
