"""fingerprint: equal where processes compute the same bits, and another one where they may not."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tilenorm
from tests.launch.test_user_table import FORWARD, SPEC, entry
from tests.support.one_result import one_result
from tilenorm.launch import toolchain, user_table
from tilenorm.launch.target import Target
from tilenorm.ops.passes import registry
from tilenorm.tools import fingerprint as tool

ROOT = Path(__file__).parents[2]
H200 = Target.of("sm_90")


@pytest.fixture
def gpu(monkeypatch, tables):
    """A function that has a GPU of a target in this machine."""

    def in_machine(target: Target = H200) -> tilenorm.tools.fingerprint.Fingerprint:
        device = registry.Device("cuda", target, registry.MIN_DRIVER)
        monkeypatch.setattr(tool, "device_of", lambda *_: device)
        return tilenorm.fingerprint("cuda:0")

    return in_machine


def test_another_process_has_the_same():
    code = "import tilenorm; print(tilenorm.fingerprint('cpu'))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.strip() == str(tilenorm.fingerprint("cpu")), run.stderr


def test_on_a_gpu(gpu):
    current = gpu()
    assert (current.target, current.implementation) == ("sm_90 of 132 multiprocessors", "cutile")
    assert current.compiler.startswith(f"tileiras {toolchain.compiler_version()}, cuda-tile ")
    assert current == gpu() and str(current) == str(gpu())
    assert all(field in str(current) for field in current)


def test_without_a_gpu():
    current = tilenorm.fingerprint("cpu")
    assert (current.target, current.tables) == ("cpu", "none")
    assert current.implementation == f"reference of torch {torch.__version__}"
    if not torch.cuda.is_available():
        assert tilenorm.fingerprint() == current


def other_machine(gpu, _):
    return gpu(Target.of("sm_90_H100"))


def other_count(gpu, _):
    return gpu(replace(H200, multiprocessors=114))


def other_compiler(gpu, monkeypatch):
    monkeypatch.setattr(user_table, "versions", lambda: {"tileiras": "13.5.37"})
    return gpu()


def other_table(gpu, _):
    user_table.write(user_table.path_of("sm_90"), "sm_90", [entry(FORWARD, SPEC)])
    return gpu()


def other_backend(gpu, monkeypatch):
    monkeypatch.setenv("TILENORM_BACKEND", "reference")
    return gpu()


def other_orders(gpu, _):
    with one_result():
        return gpu()


def other_code(gpu, monkeypatch):
    monkeypatch.setattr(tool, "code_digest", lambda: "another")
    return gpu()


OTHERS = {
    other_machine: {"tables", "target"},
    other_count: {"target"},
    other_compiler: {"compiler"},
    other_table: {"tables"},
    other_backend: {"options"},
    other_orders: {"options"},
    other_code: {"code"},
}


@pytest.mark.parametrize("change", OTHERS, ids=lambda change: change.__name__)
def test_what_changes_it(change, gpu, monkeypatch):
    before, after = gpu(), change(gpu, monkeypatch)
    changed = {n for n in before._fields if getattr(before, n) != getattr(after, n)}
    assert changed == OTHERS[change]
    assert str(before).split()[0] != str(after).split()[0]


def test_a_process_has_one_result_from_its_start():
    code = "import os, tilenorm; print(tilenorm.fingerprint('cpu').options);"
    code += "del os.environ['TILENORM_ONE_RESULT']; print(tilenorm.fingerprint('cpu').options)"
    environment = os.environ | {"TILENORM_ONE_RESULT": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert run.stdout.splitlines() == ["TILENORM_ONE_RESULT=1"] * 2, run.stderr


def test_an_edited_file_is_other_code(tmp_path, monkeypatch):
    digests = set()
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.json", "2"), ("notes.txt", "2")):
        (tmp_path / "tools").mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(tool, "__file__", str(tmp_path / "tools" / "fingerprint.py"))
        digests.add(tool.code_digest.__wrapped__())
    assert len(digests) == 3, "a text is no code"


@pytest.mark.parametrize("name", ("sm_90", "sm_90_H100", "sm_100"))
def test_a_compiler_that_nothing_was_measured_with(name, monkeypatch):
    target = Target.of(name)
    measured = {"tileiras": "13.4.92", "cuda-tile": "1.7.0"}
    monkeypatch.setattr(user_table, "versions", lambda: measured)
    assert tool.other_compiler(target) is None
    monkeypatch.setattr(user_table, "versions", lambda: measured | {"tileiras": "13.5.37"})
    told = f"for {name} were measured with tileiras 13.4.92, cuda-tile 1.7.0, and this is tileiras"
    assert told in tool.other_compiler(target)
