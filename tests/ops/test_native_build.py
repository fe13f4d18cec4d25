"""How the extension in C++ is built: its key, one build at a time, what fails and is remembered,
and when a process loads it.

A shell script stands in for the compiler, and libraries in C for what it makes. test_native.py
builds the extension by a real compiler.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tilenorm
from tilenorm.__main__ import main
from tilenorm.ops import bound, call, native, torch_private
from tilenorm.ops.native import build, check
from tilenorm.ops.native.build import BuildError
from tilenorm.tools import info

from .helpers import slow
from .pretended import pretended_gpu

pytestmark = pytest.mark.skipif(
    bool(sys.platform != "linux" or build.refused() or build.missing()),
    reason="no extension is built here",
)

SCRIPT = """#!/bin/sh
echo run >> {log}
for word in "$@"; do [ "$before" = -o ] && output=$word; before=$word; done
{commands}
"""
GOOD = 'echo extension > "$output"'
LIBRARY = """
#include <Python.h>
static PyObject *none(PyObject *self, PyObject *args) { {none} Py_RETURN_NONE; }
static PyMethodDef methods[] = {
    {"start", none, METH_VARARGS}, {"repeat", none, METH_VARARGS}, {"served", none, METH_VARARGS},
    {"remember", none, METH_VARARGS}, {"forget", none, METH_VARARGS}, {0},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "tilenorm_native", 0, -1, methods};
PyMODINIT_FUNC PyInit_tilenorm_native(void) { return PyModule_Create(&module); }
"""


class Compiler:
    """The script. CXX names it."""

    def __init__(self, folder: Path):
        self.path, self.log = folder / "stand-in", folder / "log"
        self.does(GOOD)

    def does(self, commands: str) -> None:
        self.log.write_text("")
        self.path.write_text(SCRIPT.format(log=self.log, commands=commands))
        self.path.chmod(0o755)

    @property
    def runs(self) -> int:
        return len(self.log.read_text().split())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The cache folder of the test, which is not there yet."""
    monkeypatch.setenv("TILENORM_CACHE_DIR", str(tmp_path / "cache"))
    build.path.cache_clear()
    yield tmp_path / "cache" / "native"
    build.path.cache_clear()


@pytest.fixture
def compiler(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(tmp_path / "stand-in"))
    monkeypatch.setattr(os, "nice", lambda by: by)
    return Compiler(tmp_path)


@pytest.fixture
def unchecked(monkeypatch):
    """Whatever the compiler makes passes the self-check, and can be loaded."""
    run = build._run
    without_check = lambda *how: None if "self-check" in how[0] else run(*how)  # noqa: E731
    monkeypatch.setattr(build, "_run", without_check)
    monkeypatch.setattr(build, "is_there", lambda path: path.exists())


@pytest.fixture
def state(monkeypatch) -> native.State:
    """What a new process knows. pytest has not started it."""
    monkeypatch.delenv("PYTEST_VERSION", raising=False)
    return native.State()


def built(aside: bool = False) -> Path:
    return build.build(print, aside)


def failing(aside: bool = False) -> str:
    with pytest.raises(BuildError) as raised:
        built(aside)
    return str(raised.value)


def of_c(folder: Path, none: str = "") -> Path:
    """A library in C that has the extension's functions, which do nothing."""
    source, made = folder / "library.c", folder / "library.so"
    source.write_text(LIBRARY.replace("{none}", none))
    include = f"-I{sysconfig.get_paths()['include']}"
    command = ["cc", "-shared", "-fPIC", "-w", include, source, "-o", made]
    subprocess.run(command, check=True)
    return made


# ------------------------------------------------------------------------------------------ the key


def key() -> str:
    build.path.cache_clear()
    build.options.cache_clear()
    return build.path().name


def test_the_key(folder, tmp_path, monkeypatch):
    """It tells the source, PyTorch, Python's ABI and the options; nothing else."""
    first = key()
    sources = tmp_path / "sources"
    shutil.copytree(build.HERE, sources)
    monkeypatch.setattr(build, "HERE", sources)
    assert key() == first, "another checkout of the same source"
    for name in ("native.cpp", "launch.h"):
        text = (sources / name).read_text()
        (sources / name).write_text(text + "\n")
        assert key() != first
        (sources / name).write_text(text)
    (sources / "README.md").write_text("")
    (sources / "telling.py").write_text("")
    monkeypatch.setenv("CXX", "/another/compiler")
    assert key() == first
    changes = (
        (torch, "__version__", "2.99.0"),
        (torch.version, "git_version", "0"),
        (torch.version, "cuda", "99.0"),
        (build, "FLAGS", (*build.FLAGS, "-O3")),
        (sysconfig, "get_config_var", lambda name: "another ABI"),
        (build.platform, "machine", lambda: "another machine"),
    )
    found = [first]
    for change in changes:
        with monkeypatch.context() as patched:
            patched.setattr(*change)
            found.append(key())
    assert len(set(found)) == len(found)
    assert key() == first


def test_the_cache_folder_of_another_working_folder(folder, tmp_path, monkeypatch):
    """A path that is relative names the folder of the process that has asked first."""
    monkeypatch.setenv("TILENORM_CACHE_DIR", "cache")
    monkeypatch.chdir(tmp_path)
    build.path.cache_clear()
    assert build.path().parent == folder


# ---------------------------------------------------------------------------------- builds that end


def test_a_build(compiler, unchecked, folder):
    said: list[str] = []
    made = build.build(said.append)
    assert made == build.path() and made.read_text() == "extension\n"
    assert "compiles" in said[0] and str(made) in said[-1]
    assert sorted(p.suffix for p in folder.iterdir()) == [".lock", ".so"]
    build.build(said.append)
    assert compiler.runs == 1 and said[-1] == f"the extension is there: {made}"


def test_the_file_is_whole_when_it_is_there(compiler, unchecked, folder):
    """Nothing is at its path while the compiler writes."""
    compiler.does(f'echo half > "$output"; ls {folder} > {folder}/seen; {GOOD}')
    made = built()
    assert made.name not in (folder / "seen").read_text().split()
    assert made.read_text() == "extension\n"


def test_two_builders(compiler, unchecked, folder):
    """One compiles. The other one says so, and does not wait."""
    go = folder / "go"
    compiler.does(f"while [ ! -e {go} ]; do sleep 0.02; done; {GOOD}")
    first = threading.Thread(target=built)
    first.start()
    while not compiler.runs:
        time.sleep(0.01)
    assert failing() == "another process is building it" == failing(aside=True)
    go.touch()
    first.join()
    assert compiler.runs == 1 and build.failure(build.path()) is None
    assert built(aside=True).exists() and compiler.runs == 1


def test_what_another_process_has_built_in_between_is_taken(compiler, unchecked, monkeypatch):
    locked = build._locked

    def late(lock):
        build.path().write_text("by another process")
        return locked(lock)

    monkeypatch.setattr(build, "_locked", late)
    assert built().read_text() == "by another process" and not compiler.runs


def test_what_a_killed_build_has_left(compiler, unchecked, folder):
    """Its lock is free, its folder goes, and another key's folder stays."""
    remains = [folder / f"{build.path().stem}-abc", folder / "another-abc"]
    for each in remains:
        each.mkdir(parents=True)
        (each / "half.so").touch()
    build.path().with_suffix(".lock").touch()
    built()
    assert [each.exists() for each in remains] == [False, True]


def test_permissions_are_those_of_the_umask(compiler, unchecked):
    before = os.umask(0o027)
    try:
        assert built().stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


# --------------------------------------------------------------------------------- builds that fail


def test_no_compiler(compiler, folder, monkeypatch):
    """It is no failure that is kept: whoever installs a compiler need not know of a command."""
    compiler.path.unlink()
    assert "there is no such program" in failing()
    monkeypatch.setenv("CXX", "'")
    assert "no C++ compiler: CXX is '" in failing()
    monkeypatch.delenv("CXX")
    with monkeypatch.context() as patched:
        patched.setenv("PATH", "/nowhere")
        assert "neither c++ nor g++ is on the PATH" in failing()
        assert not folder.exists()
    with monkeypatch.context() as patched:
        patched.setattr(sysconfig, "get_paths", lambda: {"include": "/nowhere"})
        assert "there is no /nowhere/Python.h" in failing()


MESSAGES = {
    "In file included from a.h\\na.h:1: fatal error: Python.h: No such file": (
        "it does not compile: a.h:1: fatal error: Python.h: No such file"
    ),
    "ld: cannot find -ltorch\\ncollect2: error: ld returned 1 exit status": (
        "it does not compile: ld: cannot find -ltorch"
    ),
    "": "it does not compile: it ended with status 1 and no message",
}


@pytest.mark.parametrize("output", MESSAGES)
def test_a_compiler_that_fails(output, compiler, folder):
    compiler.does(f"printf '{output}' >&2; exit 1")
    assert failing() == MESSAGES[output] == build.failure(build.path())
    text = build.path().with_suffix(".failed").read_text()
    assert output.split("\\n")[-1] in text
    assert sorted(p.suffix for p in folder.iterdir()) == [".failed", ".lock"]


def test_a_compiler_of_other_bytes_and_one_that_is_killed(compiler):
    compiler.does("printf '\\377 error \\303' >&2; exit 1")
    assert "error" in failing()
    compiler.does("kill -9 $$")
    assert failing() == "it does not compile: signal 9 has ended it"


def test_a_compiler_that_takes_too_long(compiler, tmp_path, monkeypatch):
    """The processes that the compiler has started end with it."""
    monkeypatch.setattr(build, "MOST_SECONDS", 0.5)
    compiler.does(f"sleep 60 & echo $! > {tmp_path}/child; wait")
    assert failing() == "it does not compile: it takes more than 0.5 s"
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] not in "ZX"
    except OSError:
        return False


CHECKED = {
    "no library": ("", "its self-check fails: ImportError: "),
    "nothing is served": ("none", "its self-check fails: CheckError: it does not serve a call"),
    "a crash": ("*(volatile int *)0 = 1;", "its self-check fails: signal 11 has ended it"),
    "a wait": ("for (;;);", "its self-check fails: it takes more than 5 s"),
}


@pytest.mark.parametrize("name", ["a crash", "nothing is served", *slow("no library", "a wait")])
def test_what_the_self_check_finds(name, compiler, tmp_path, monkeypatch):
    """A process of its own makes it, so that an extension that crashes is a reason too."""
    none, message = CHECKED[name]
    if name == "a wait":
        monkeypatch.setattr(build, "MOST_CHECKING", 5)
    if none:
        library = of_c(tmp_path, "" if none == "none" else none)
        compiler.does(f'cp {library} "$output"')
    assert failing().startswith(message) and not build.path().exists()
    assert build.failure(build.path()).startswith(message)
    said: list[str] = []
    with pytest.raises(BuildError):
        build.build(said.append, aside=True)
    assert said == [], "it is not compiled again"


def test_what_has_failed_is_tried_again_by_hand_alone(compiler, unchecked):
    compiler.does("echo error: no >&2; exit 1")
    reason = failing(aside=True)
    assert failing(aside=True) == reason and compiler.runs == 1
    assert failing() == reason and compiler.runs == 2
    modified = compiler.path.stat().st_mtime_ns
    compiler.path.write_text(compiler.path.read_text().replace("exit 1", GOOD))
    os.utime(compiler.path, ns=(modified, modified))
    assert failing(aside=True) == reason, "as far as anybody can see it is the same compiler"
    assert built().exists() and build.failure(build.path()) is None


def test_another_compiler_is_tried(compiler, unchecked):
    compiler.does("echo error: no >&2; exit 1")
    failing(aside=True)
    os.utime(compiler.path, ns=(0, 0))  # another version in the place of the compiler
    assert build.failure(build.path()) is None
    compiler.does(GOOD)
    assert built(aside=True).exists()


def test_a_file_that_is_cut_short_is_built_anew_by_hand(compiler, monkeypatch, folder):
    folder.mkdir(parents=True)
    build.path().write_text("half")
    compiled = []
    monkeypatch.setattr(build, "_compiled", compiled.append)
    built()
    assert compiled == [build.path()]


@pytest.mark.parametrize("aside", [False, True])
def test_a_folder_that_cannot_be_written(aside, compiler, folder):
    folder.parent.write_text("a file")
    assert f"{folder}: " in failing(aside)
    assert not compiler.runs


def test_the_command(compiler, unchecked, capsys, refused):
    assert main(["build"]) == 0
    assert f"built and checked in 0 s: {build.path()}\n" in capsys.readouterr().out
    build.path().unlink()
    compiler.does("echo error: no >&2; exit 1")
    assert "build: it does not compile: error: no" in refused(["build"])


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
def test_what_is_refused(name, state, compiler, monkeypatch):
    change, reason = REFUSED[name]
    monkeypatch.setattr(*change)
    state.want(0)
    assert reason in state.reason and not state.waits and not compiler.runs
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


def test_a_process_asks_once(state, compiler, started, folder):
    state.want(-1)
    assert not started.seen and not state.waits, "a call on a CPU"
    state.want(0)
    assert state.waits and state.reason == "it is being built by another process"
    state.want(0)
    [how] = started.seen
    assert how["env"]["CUDA_VISIBLE_DEVICES"] == "" and how["start_new_session"]
    assert how["env"]["TILENORM_CACHE_DIR"] == str(folder.parent)
    assert state.told() == "in Python: it is not built yet; python -m tilenorm build builds it"


def test_a_build_that_ends_while_the_process_runs(state, compiler, started, loaded, folder):
    forgotten: list[str] = []
    state.when_changed(lambda: forgotten.append("forgotten"))
    state.want(0)
    for _ in range(2 * native.LOOKS):
        state.look()
    assert state.waits and state.extension is None and not forgotten and started.polls == 2
    folder.mkdir(parents=True)
    build.path().touch()
    for _ in range(native.LOOKS):
        state.look()
    assert not state.waits and state.extension is loaded[0] and state.served
    assert forgotten == ["forgotten"] and state.reason == ""
    assert state.told() == f"by the extension {build.path()}"


def test_a_build_that_fails_while_the_process_runs(state, compiler, started):
    state.want(0)
    compiler.does("echo error: no >&2; exit 1")
    failing(aside=True)
    for _ in range(native.LOOKS):
        state.look()
    assert not state.waits and state.told() == "in Python: it does not compile: error: no"


def test_what_is_built_is_loaded_at_once(state, compiler, started, loaded, folder):
    folder.mkdir(parents=True)
    build.path().touch()
    state.want(0)
    assert loaded and not state.waits and not started.seen


def test_a_file_that_does_not_load(state, compiler, started, folder):
    folder.mkdir(parents=True)
    build.path().write_text("no library")
    state.want(0)
    assert f"{build.path()} does not load: " in state.reason
    assert not state.waits and not started.seen


def test_no_process_is_started_for_nothing(state, compiler, started, folder, monkeypatch):
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
    compiler.does("echo error: no >&2; exit 1")
    failing()
    assert asked() == "it does not compile: error: no"
    shutil.rmtree(folder.parent)
    folder.parent.write_text("a file")
    assert f"{folder.parent} is no folder that can be written" in asked()


def test_no_process_can_be_started(state, compiler, monkeypatch):
    def none(**_):
        raise OSError("too many processes")

    monkeypatch.setattr(native, "subprocess", SimpleNamespace(Popen=none, DEVNULL=None))
    state.want(0)
    assert state.reason == "no process to build it: too many processes" and not state.waits


def test_the_process_beside_imports_what_this_one_imports(compiler, tmp_path, monkeypatch):
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
def test_a_process_builds_beside_another(state, compiler, tmp_path, folder):
    """The real process, which the stand-in compiler fails."""
    compiler.does("echo error: no >&2; exit 1")
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


def test_info_and_describe(process, compiler, loaded, folder, monkeypatch):
    not_built = "it is not built yet; python -m tilenorm build builds it"
    assert line() == f"repeated calls: in Python: {not_built}"
    monkeypatch.setenv("TILENORM_NATIVE", "0")
    assert line() == "repeated calls: in Python: TILENORM_NATIVE is 0"
    assert native.describe() == "python"
    monkeypatch.delenv("TILENORM_NATIVE")
    folder.mkdir(parents=True)
    build.path().touch()
    assert line() == f"repeated calls: by the extension {build.path()}"
    assert native.describe() == "native"


def test_what_python_has_prepared_is_forgotten(process, compiler, started, loaded, folder):
    """Calls look for the extension, and prepare anew for it."""
    x = torch.randn(3, 16)

    def norm():
        return tilenorm.rms_norm(x, (16,), eps=1e-6)

    with pretended_gpu():
        norm()
        process.want(0)
        folder.mkdir(parents=True)
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


def test_the_self_check_refuses_an_extension_that_knows_every_call():

    class Wrong:
        def __getattr__(self, name):
            return lambda *_: torch.ones(3, 8)

    with pytest.raises(check.CheckError, match="a call that it does not know"):
        check.check(Wrong())
