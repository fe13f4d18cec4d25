"""How the extension in C++ is built: its key, one build at a time, what fails and is remembered.

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

import pytest
import torch

from tests.support.calls import slow
from tests.support.stand_in_cxx import FAILS, GOOD, built, failing
from tilenorm.__main__ import main
from tilenorm.ops.passes.native import build, check
from tilenorm.ops.passes.native.build import BuildError

pytestmark = pytest.mark.skipif(
    bool(sys.platform != "linux" or build.refused() or build.missing()),
    reason="no extension is built here",
)

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


@pytest.fixture
def unchecked(monkeypatch):
    """Whatever the compiler makes passes the self-check, and can be loaded."""
    run = build._run
    without_check = lambda *how: None if "self-check" in how[0] else run(*how)  # noqa: E731
    monkeypatch.setattr(build, "_run", without_check)
    monkeypatch.setattr(build, "is_there", lambda path: path.exists())


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


def test_the_key(build_folder, tmp_path, monkeypatch):
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


# ---------------------------------------------------------------------------------- builds that end


def test_a_build(cxx, unchecked, build_folder):
    """Nothing is at its path while the compiler writes. Its permissions are those of the umask."""
    said: list[str] = []
    cxx.does(f'echo half > "$output"; ls {build_folder} > {build_folder}/seen; {GOOD}')
    before = os.umask(0o027)
    try:
        made = build.build(said.append)
    finally:
        os.umask(before)
    assert made == build.path() and made.read_text() == "extension\n"
    assert made.stat().st_mode & 0o777 == 0o640
    assert made.name not in (build_folder / "seen").read_text().split()
    assert "compiles" in said[0] and str(made) in said[-1]
    assert sorted(p.suffix for p in build_folder.iterdir()) == ["", ".lock", ".so"]
    build.build(said.append)
    assert cxx.runs == 1 and said[-1] == f"the extension is there: {made}"


def test_two_builders(cxx, unchecked, build_folder):
    """One compiles. The other one says so, and does not wait."""
    go = build_folder / "go"
    cxx.does(f"while [ ! -e {go} ]; do sleep 0.02; done; {GOOD}")
    first = threading.Thread(target=built)
    first.start()
    while not cxx.runs:
        time.sleep(0.01)
    assert failing() == "another process is building it" == failing(aside=True)
    go.touch()
    first.join()
    assert cxx.runs == 1 and build.failure(build.path()) is None
    assert built(aside=True).exists() and cxx.runs == 1


def test_what_another_process_has_built_in_between_is_taken(cxx, unchecked, monkeypatch):
    locked = build._locked

    def late(lock):
        build.path().write_text("by another process")
        return locked(lock)

    monkeypatch.setattr(build, "_locked", late)
    assert built().read_text() == "by another process" and not cxx.runs


def test_what_a_killed_build_has_left(cxx, unchecked, build_folder):
    """Its lock is free, its folder goes, and another key's folder stays."""
    remains = [build_folder / f"{build.path().stem}-abc", build_folder / "another-abc"]
    for each in remains:
        each.mkdir(parents=True)
        (each / "half.so").touch()
    build.path().with_suffix(".lock").touch()
    built()
    assert [each.exists() for each in remains] == [False, True]


# --------------------------------------------------------------------------------- builds that fail


def test_no_compiler(cxx, build_folder, monkeypatch):
    """It is no failure that is kept: whoever installs a compiler need not know of a command."""
    cxx.path.unlink()
    assert "there is no such program" in failing()
    monkeypatch.setenv("CXX", "'")
    assert "no C++ compiler: CXX is '" in failing()
    monkeypatch.delenv("CXX")
    with monkeypatch.context() as patched:
        patched.setenv("PATH", "/nowhere")
        assert "neither c++ nor g++ is on the PATH" in failing()
        assert not build_folder.exists()
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
def test_a_compiler_that_fails(output, cxx, build_folder):
    cxx.does(f"printf '{output}' >&2; exit 1")
    assert failing() == MESSAGES[output] == build.failure(build.path())
    text = build.path().with_suffix(".failed").read_text()
    assert output.split("\\n")[-1] in text
    assert sorted(p.suffix for p in build_folder.iterdir()) == [".failed", ".lock"]


def test_a_compiler_of_other_bytes_and_one_that_is_killed(cxx):
    cxx.does("printf '\\377 error \\303' >&2; exit 1")
    assert "error" in failing()
    cxx.does("kill -9 $$")
    assert failing() == "it does not compile: signal 9 has ended it"


def test_a_compiler_that_takes_too_long(cxx, tmp_path, monkeypatch):
    """The processes that the compiler has started end with it."""
    monkeypatch.setattr(build, "MOST_SECONDS", 0.5)
    cxx.does(f"sleep 60 & echo $! > {tmp_path}/child; wait")
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


@pytest.mark.parametrize("name", ["a crash", *slow("nothing is served", "no library", "a wait")])
def test_what_the_self_check_finds(name, cxx, tmp_path, monkeypatch):
    """A process of its own makes it, so that an extension that crashes is a reason too."""
    none, message = CHECKED[name]
    if name == "a wait":
        monkeypatch.setattr(build, "MOST_CHECKING", 5)
    if none:
        library = of_c(tmp_path, "" if none == "none" else none)
        cxx.does(f'cp {library} "$output"')
    assert failing().startswith(message) and not build.path().exists()
    assert build.failure(build.path()).startswith(message)
    said: list[str] = []
    with pytest.raises(BuildError):
        build.build(said.append, aside=True)
    assert said == [], "it is not compiled again"


def test_what_has_failed_is_tried_again_by_hand_or_by_another_compiler(cxx, unchecked):
    cxx.does(FAILS)
    reason = failing(aside=True)
    assert failing(aside=True) == reason and cxx.runs == 1
    assert failing() == reason and cxx.runs == 2
    modified = cxx.path.stat().st_mtime_ns
    cxx.path.write_text(cxx.path.read_text().replace("exit 1", GOOD))
    os.utime(cxx.path, ns=(modified, modified))
    assert failing(aside=True) == reason, "as far as anybody can see it is the same compiler"
    os.utime(cxx.path, ns=(0, 0))  # another version in the place of the compiler
    assert build.failure(build.path()) is None
    assert built(aside=True).exists()


def test_a_file_that_is_cut_short_is_built_anew_by_hand(cxx, monkeypatch, build_folder):
    build_folder.mkdir(parents=True)
    build.path().write_text("half")
    compiled = []
    monkeypatch.setattr(build, "_compiled", compiled.append)
    built()
    assert compiled == [build.path()]


@pytest.mark.parametrize("aside", [False, True])
def test_a_folder_that_cannot_be_written(aside, cxx, build_folder):
    build_folder.parent.write_text("a file")
    assert f"{build_folder}: " in failing(aside)
    assert not cxx.runs


def test_the_command(cxx, unchecked, capsys, refused):
    assert main(["build"]) == 0
    assert f"built and checked in 0 s: {build.path()}\n" in capsys.readouterr().out
    build.path().unlink()
    cxx.does(FAILS)
    assert "build: it does not compile: error: no" in refused(["build"])


def test_the_self_check_refuses_an_extension_that_knows_every_call():

    class Wrong:
        def __getattr__(self, name):
            return lambda *_: torch.ones(3, 8)

    with pytest.raises(check.CheckError, match="a call that it does not know"):
        check.check(Wrong())
