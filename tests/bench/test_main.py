"""The command line on the CPU, with stand-ins for the providers."""

import json

import pytest

from bench import report
from bench.__main__ import main
from bench.cases import OPS
from bench.providers import Provider


@pytest.fixture
def tiny(monkeypatch, stand_in):
    monkeypatch.setattr("bench.__main__.CPU_ELEMENTS", 4096)
    monkeypatch.setattr("bench.__main__.CPU_BUDGET_S", 0.0)


RMS_NORM = ("--op", "rms_norm", "--dtype", "bfloat16")


def test_command_prints_the_same_from_its_record(tiny, tmp_path, capsys):
    path = str(tmp_path / "new" / "run.jsonl")
    main([*RMS_NORM, "--hidden", "1024", "4096", "--out", path])
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == out.splitlines()[-1] == report.CPU_NOTICE
    assert "absent: compile (needs a GPU)" in out
    assert err.count("\n") == 1 + 2 + 2 * 2 * 2  # notice, host times, N x provider x direction
    with open(path) as file:
        run, *lines = map(json.loads, file)
    assert run["command"].endswith("--hidden 1024 4096 --out run.jsonl")
    kinds = [line["record"] for line in lines]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "host": 2,
        "copy": 2,
        "cell": 8,
    }
    main(["--from", path])
    assert capsys.readouterr().out == out


def test_every_op_of_a_suite_has_tables_and_each_shape_is_copied_once(tiny, tmp_path, capsys):
    path = str(tmp_path / "run.jsonl")
    main(["--suite", "full", "--dtype", "bfloat16", "--hidden", "128", "512", "--out", path])
    out = capsys.readouterr().out
    titles = [line.split(":")[0] for line in out.splitlines() if "% of a copy" in line]
    ops = tuple(name for name in OPS if name != "head_rms_norm")
    assert titles == [
        f"{op} {direction}, bfloat16"
        for op in (*ops, "head_rms_norm")
        for direction in ("forward", "backward")
    ]
    assert all(status not in out for status in ("wrong", "failed", "refused"))
    with open(path) as file:
        lines = [json.loads(line) for line in file]
    copies = [(line["m"], line["n"]) for line in lines if line["record"] == "copy"]
    assert len(copies) == len(set(copies))


def test_provider_without_an_op_is_absent_from_that_op_alone(tiny, monkeypatch, capsys):
    eager = OPS["rms_norm"].eager
    some = Provider("some", lambda op: {"rms_norm": eager}.get(op.name), on_cpu=True)
    broken = Provider("broken", lambda op: 1 / 0, on_cpu=True)
    named = {provider.name: provider for provider in (some, broken)}
    for module in ("bench.__main__", "bench.providers", "bench.run"):
        monkeypatch.setattr(f"{module}.PROVIDERS", named)
    main(["--suite", "full", "--dtype", "bfloat16", "--hidden", "512"])
    out = capsys.readouterr().out
    lacks = ("layer_norm", "add_rms_norm", "add_layer_norm", "head_rms_norm")
    assert f"absent: some ({'; '.join(f'has no {op}' for op in lacks)})" in out
    assert "absent: broken (ZeroDivisionError: division by zero)" in out
    assert "rms_norm forward, bfloat16" in out
    assert "layer_norm forward" not in out


def test_options_narrow_a_record_like_a_run(tiny, tmp_path, capsys):
    path = str(tmp_path / "run.jsonl")
    main([*RMS_NORM, "--hidden", "1024", "4096", "--out", path])
    capsys.readouterr()
    main(["--from", path, "--hidden", "4096", "--direction", "forward", "--provider", "torch"])
    out = capsys.readouterr().out
    assert "backward, bfloat16" not in out
    assert "\n1024" not in out.replace(" ", "")
    assert "tilenorm" not in [line.split()[0] for line in out.splitlines()[2:] if line.strip()]
    assert "host time" not in out
    main(["--from", path, "--direction", "host"])
    out = capsys.readouterr().out
    assert "rms_norm: host time" in out and "GB/s (" not in out


def test_small_batches_are_shown_in_microseconds(tiny, capsys):
    main(["--suite", "latency", "--op", "rms_norm", "--hidden", "2048"])
    out = capsys.readouterr().out
    assert "rms_norm inference, bfloat16: µs" in out
    assert "GB/s" not in out
    lines = [line.split() for line in out.splitlines()]
    assert [row[1] for row in lines if row[:1] == ["2048"]] == ["1", "2"]  # fewer rows on a CPU


def test_size_outside_the_suite_is_refused_with_a_list_of_sizes(tiny):
    with pytest.raises(SystemExit, match=r"rms_norm \[1024, 4096, 16384\]; "):
        main(["--hidden", "1024", "77"])


def test_sizes_are_measured_in_the_given_order_with_all_ops_of_a_size_together(tiny, tmp_path):
    path = str(tmp_path / "run.jsonl")
    both = ["--op", "rms_norm", "layer_norm", "--dtype", "bfloat16", "--direction", "forward"]
    main(["--suite", "full", *both, "--hidden", "512", "256", "--provider", "torch", "--out", path])
    with open(path) as file:
        cells = [line for line in map(json.loads, file) if line["record"] == "cell"]
    assert [(cell["n"], cell["op"]) for cell in cells] == [
        (n, op) for n in (512, 256) for op in ("rms_norm", "layer_norm")
    ]
