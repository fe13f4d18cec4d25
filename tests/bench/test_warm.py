"""Compiling before a run, on the CPU; in this process, but for the last test."""

import json
import os

import pytest

from bench import first_call, warm, worker
from bench.__main__ import main
from bench.cases import LATENCIES, Case
from bench.providers import Provider

CASES = [Case("rms_norm", "float32", 64, 128), Case("layer_norm", "float32", 64, 128)]
HOST = [Case(case.op, "bfloat16", 32, 1024) for case in CASES]
NAMES = {"rms_norm": ["torch", "other"], "layer_norm": ["torch"]}
DIRECTIONS = ("forward", "backward")


@pytest.fixture
def called(monkeypatch):
    """What is called, and with which environment, by workers that are this process."""
    found = []

    def run(function, timeout_s, places, **task):
        assert timeout_s > 0
        assert os.path.isdir(places["TORCHINDUCTOR_CACHE_DIR"])
        found.append((task, places))
        return function(**task)

    monkeypatch.setattr(worker, "run", run)
    monkeypatch.setenv("TRITON_CACHE_DIR", "kept")
    providers = {
        name: Provider(name, lambda op: op.eager, on_cpu=True) for name in NAMES["rms_norm"]
    }
    monkeypatch.setattr(first_call, "PROVIDERS", providers)
    return found


def up(**options):
    return warm.up(CASES, NAMES, DIRECTIONS, "cpu", 2, **options)


def test_every_call_of_a_run_is_made_once(called, capsys):
    assert up() > 0
    expected = [
        (case, name, ways)
        for some, ways in ((CASES, DIRECTIONS), (HOST, LATENCIES))
        for case in some
        for name in NAMES[case.op]
    ]
    made = [
        (Case(**case), call["provider"], tuple(call["directions"]))
        for task, _ in called
        for call in task["calls"]
        for case in call["cases"]
    ]
    assert len(called) == 2  # processes
    assert len(made) == len(expected) == 6
    assert set(made) == set(expected)
    assert capsys.readouterr().err.startswith("compiling in 2 processes: 12 of 12 calls in ")


def test_what_inductor_decides_is_thrown_away_and_binaries_are_kept(called):
    up()
    for _, places in called:
        assert not os.path.exists(places["TORCHINDUCTOR_CACHE_DIR"])
        assert places.keys().isdisjoint({"TRITON_CACHE_DIR", "CUDA_TILE_CACHE_DIR", "TMPDIR"})
    assert os.environ["TRITON_CACHE_DIR"] == "kept"


def test_a_provider_or_a_process_that_fails_is_passed_over(called, monkeypatch, capsys):
    def forward_only(op):
        return lambda x, w: op.eager(x.detach(), w.detach())

    monkeypatch.setitem(first_call.PROVIDERS, "other", Provider("other", forward_only, on_cpu=True))
    run = worker.run

    def failing(function, timeout_s, places, **task):
        if any(call["directions"] == LATENCIES for call in task["calls"]):
            raise worker.WorkerError("exit status -11: no message")
        return run(function, timeout_s, places, **task)

    monkeypatch.setattr(worker, "run", failing)
    warm.up(CASES, NAMES, DIRECTIONS, "cpu", 6)
    # All of the host's, and of the other's backward
    assert ": 5 of 12 calls in " in capsys.readouterr().err


def test_no_process_is_started_when_half_of_the_time_is_over(called, capsys):
    up(max_seconds=0.0)
    assert not called
    assert ": 0 of 12 calls in " in capsys.readouterr().err


def test_each_process_gets_as_many_calls_of_a_provider(called):
    up()
    for name, most in (("torch", 2), ("other", 1)):
        counts = [sum(c["provider"] == name for c in task["calls"]) for task, _ in called]
        assert counts == [most, most]


def test_a_run_is_the_same_with_and_without(stand_in, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("bench.__main__.CPU_ELEMENTS", 4096)
    monkeypatch.setattr("bench.__main__.CPU_BUDGET_S", 0.0)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    lines = []
    for options in ([], ["--jobs", "2", "--max-seconds", "600"]):
        path = str(tmp_path / "run.jsonl")
        what = ["--op", "rms_norm", "--dtype", "bfloat16", "--hidden", "1024"]
        main([*what, "--provider", "torch", *options, "--out", path])
        with open(path) as file:
            found = [json.loads(line) for line in file]
        lines.append(
            [(line["record"], line.get("direction"), line.get("status")) for line in found]
        )
    assert lines[0] == lines[1]
    assert [line for line in lines[0] if line[0] == "cell"] == [
        ("cell", way, "ok") for way in DIRECTIONS
    ]
    assert found[0]["command"].startswith("python -m bench --op rms_norm")
    assert "--jobs 2" in found[0]["command"]
    assert "compiling in 2 processes: 4 of 4 calls in " in capsys.readouterr().err
