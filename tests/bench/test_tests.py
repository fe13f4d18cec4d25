"""``python -m bench tests`` on a machine whose GPU and whose tests are stand-ins."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import provenance, record, report, tests
from bench.__main__ import main
from tests.support.calls import slow

RUN = {
    "date": "2026-01-02T03:04:05+00:00",
    "command": "",
    "device": "cuda",
    "machine": "NVIDIA H100",
    "commit": "abc",
    "torch": "2.13",
    "driver": "580",
    "tileiras": "13.4",
    "tilenorm": "1",
    "packages": {},
    "absent": {},
}
CASES = [f"tests/test_a.py::test_{i}" for i in range(6)]


@pytest.fixture
def machine(monkeypatch):
    """Its run line, what its cases do, how many it reaches, and the cases of each run."""
    made = SimpleNamespace(
        run=dict(RUN), outcome=lambda name: "passed", reaches=99, given=[], code=0
    )

    def run(command: list[str], **how):
        # pytest would take a path of its own for one of tests, and look there for its options.
        assert not [word for word in command[1:] if Path(word).is_absolute()]
        after = dict(word.split("=", 1) for word in command if "=" in word)
        left_out = Path(after["--leave-out"]).read_text().splitlines()
        made.given.append([name for name in CASES if name not in left_out])
        lines = [{"collected": made.given[-1]}]
        for name in made.given[-1][: made.reaches]:
            outcome = made.outcome(name)
            why = "" if outcome == "passed" else f"why {name[-1]}"
            lines.append({"test": name, "outcome": outcome, "seconds": 0.1, "why": why})
        with open(after["--outcomes"], "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        return SimpleNamespace(returncode=made.code)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(provenance, "describe_run", lambda *_: made.run)
    monkeypatch.setattr(tests.subprocess, "run", run)
    return made


def command(out: Path, *more: str) -> int:
    return main(["tests", "--out", str(out), *more])


def test_a_run_goes_on_where_it_ended_and_no_failure_runs_again(machine, tmp_path, capsys):
    out = tmp_path / "tests.jsonl"
    machine.outcome = {CASES[0]: "failed", CASES[1]: "skipped"}.get
    machine.reaches = 2
    assert command(out) == 1
    assert "failed: tests/test_a.py::test_0: why 0" in capsys.readouterr().out
    machine.outcome = lambda name: "passed"
    machine.reaches = 99
    assert command(out) == 1  # the failure stays one
    assert machine.given == [CASES, CASES[2:]]
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .startswith("4 passed, 1 failed, 1 skipped, 0 not reached")
    )
    [line] = record.load([out]).tests
    assert (line.passed, line.failed, line.skipped) == (4, {CASES[0]: "why 0"}, {"why 1": 1})


def test_what_was_not_reached_fails(machine, tmp_path):
    out = tmp_path / "tests.jsonl"
    machine.reaches = 4
    assert command(out) == 1
    assert record.load([out]).tests[0].not_reached == 2
    assert command(out) == 0
    assert record.load([out]).tests[0].not_reached == 0


def test_a_run_that_pytest_could_not_start_has_no_line(machine, tmp_path):
    machine.code = int(pytest.ExitCode.USAGE_ERROR)
    with pytest.raises(SystemExit, match="pytest exited with 4"):
        command(tmp_path / "tests.jsonl")
    assert not (tmp_path / "tests.jsonl").exists()


@pytest.mark.parametrize("field", ["sources", *slow("driver", "torch")])
def test_another_version_or_source_begins_anew(field, machine, tmp_path):
    out = tmp_path / "tests.jsonl"
    assert command(out) == 0
    machine.run[field] = "another"
    assert command(out) == 0
    assert machine.given == [CASES, CASES]
    shown = report.render(record.load([out]))
    assert shown.count("NVIDIA H100") == 2 and "tests that need a GPU" in shown


def test_other_tests_begin_anew_and_a_commit_of_the_same_sources_goes_on(
    machine, monkeypatch, tmp_path
):
    out = tmp_path / "tests.jsonl"
    machine.reaches = 2
    assert command(out) == 1
    machine.run["commit"], machine.reaches = "def", 99
    assert command(out) == 0
    monkeypatch.setattr(provenance, "sources", lambda *_, of: f"other {of}")
    assert command(out) == 0
    assert machine.given == [CASES, CASES[2:], CASES]
    assert [line.passed for line in record.load([out]).tests] == [2, 6]


def test_each_commit_and_path_has_a_row_of_one_machine(machine, tmp_path):
    out = tmp_path / "tests.jsonl"
    assert command(out) == command(out, "--native") == 0
    machine.run["commit"] = "def"
    assert command(out, "--native") == 0
    rows = [(line.commit, line.native) for line in record.load([out]).tests]
    assert rows == [("abc", False), ("abc", True), ("def", True)]
    machine.run["machine"] = "NVIDIA H200"
    with pytest.raises(ValueError, match="records of different machines"):
        command(out)


def test_words_for_pytest_and_a_machine_without_a_gpu(machine, monkeypatch):
    taken = []

    def run(command, **_):
        taken.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(tests.subprocess, "run", run)
    main(["tests", "--processes", "3", "--", "tests/kernels", "-x"])
    assert taken[0][-2:] == ["tests/kernels", "-x"] and "3" in taken[0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="there is no GPU"):
        main(["tests"])
