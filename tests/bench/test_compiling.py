"""``python -m bench --compile-first``, on the CPU, with stand-ins for the providers."""

import os

import pytest

from bench import compiling
from bench.command import Run
from bench.op import Case
from bench.providers import Provider
from bench.record import Cell, Record
from bench.run import run
from tests.support.calls import slow

CASES = [Case("rms_norm", "float32", 8, n) for n in (16, 32)]


def cells(*names: str) -> dict[Case, list[Cell]]:
    ways = ("forward", "backward")
    return {
        case: [
            Cell(**vars(case), direction=way, provider=name, bytes=1)
            for name in names
            for way in ways
        ]
        for case in CASES
    }


def test_a_task_is_a_provider_of_a_case_that_compiles_and_times_nothing():
    found = compiling.tasks(cells("tilenorm", "torch", "compile", "liger"))
    both = ("forward", "backward")
    assert found == [
        compiling.Task(case, name, both) for case in CASES[::-1] for name in ("liger", "tilenorm")
    ]


def test_each_direction_is_called_once_and_failures_are_for_the_run(monkeypatch):
    called = []

    def load(op):
        def function(*inputs):
            called.append(len(inputs))
            if len(called) > 1:
                raise OSError("no compiler")
            return op.eager(*inputs)

        return function

    monkeypatch.setattr(compiling, "PROVIDERS", {"a": Provider("a", load, on_cpu=True)})
    compiling.compile_one(
        compiling.Task(CASES[0], "a", ("inference", "forward", "backward")), "cpu"
    )
    assert called == [2, 2, 2]


def test_the_run_goes_on_where_a_process_dies(monkeypatch, capsys):
    monkeypatch.setattr(compiling, "PROCESSES", 2)
    monkeypatch.setattr(compiling, "compile_one", dies)
    compiling.compile_all(cells("tilenorm"), "cpu", lambda: False)
    assert "compiled" in capsys.readouterr().err


def dies(task: compiling.Task, device: str) -> None:
    os._exit(3)


@pytest.mark.parametrize("late", [False, *slow(True)])
def test_processes_end(monkeypatch, capsys, late):
    monkeypatch.setattr(compiling, "PROCESSES", 2)
    compiling.compile_all(cells("tilenorm", "quack"), "cpu", lambda: late)
    assert "compiled" in capsys.readouterr().err


def test_a_run_says_first_what_it_will_measure():
    seen = []
    course = Run("cpu", {"rms_norm": ["torch"]}, found := Record(), found.add, lambda: False)
    run(CASES[:1], course, ["forward"], lambda todo: seen.append((dict(todo), len(found.lines))))
    [(todo, lines)] = seen
    assert lines == 0 and [cell.provider for cell in todo[CASES[0]]] == ["torch"]
    assert [c.status for c in found.cells] == ["ok"]
