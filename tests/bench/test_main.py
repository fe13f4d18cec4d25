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
        kinds = [json.loads(line)["record"] for line in file]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "run": 1,
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


def test_records_of_single_ops_are_printed_as_one_report(tiny, tmp_path, capsys):
    paths = [str(tmp_path / f"{op}.jsonl") for op in ("add_layer_norm", "gated_rms_norm")]
    for path in paths:
        main(["--op", path.rsplit("/", 1)[1].removesuffix(".jsonl"), "--out", path])
    capsys.readouterr()
    main(["--from", *paths])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("tilenorm 0.0 ") for line in lines) == 2
    assert "add_layer_norm forward, bfloat16: GB/s (% of a copy)" in lines
    assert "gated_rms_norm backward, bfloat16: GB/s (% of a copy)" in lines
    assert sum(line.startswith("Bytes: ") for line in lines) == 1


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


@pytest.mark.parametrize("direction", ["host", "forward"])
def test_single_direction_is_measured_alone(direction, tiny, capsys):
    main([*RMS_NORM, "--hidden", "1024", "--provider", "torch", "--direction", direction])
    out = capsys.readouterr().out
    assert ("rms_norm: host time" in out) == (direction == "host")
    assert ("rms_norm forward, bfloat16: GB/s" in out) == (direction == "forward")
    assert "backward, bfloat16" not in out


def test_small_batches_are_shown_in_microseconds(tiny, capsys):
    main(["--suite", "latency", "--op", "rms_norm", "--hidden", "2048"])
    out = capsys.readouterr().out
    assert "rms_norm inference, bfloat16: µs" in out
    assert "GB/s" not in out
    lines = [line.split() for line in out.splitlines()]
    assert [row[1] for row in lines if row[:1] == ["2048"]] == ["1", "2"]  # fewer rows on a CPU


def test_exit_status_tells_whether_anything_is_slower_than_a_record(tiny, tmp_path, capsys):
    old, new = (str(tmp_path / name) for name in ("old.jsonl", "new.jsonl"))
    assert main([*RMS_NORM, "--hidden", "1024", "--provider", "torch", "--out", old]) == 0
    with open(old) as file, open(new, "w") as other:
        for line in map(json.loads, file):
            if line.get("direction") == "backward":
                line["median_us"] *= 2 * (2 + line["spread"])
            print(json.dumps(line), file=other)
    capsys.readouterr()
    assert main(["--from", old, "--compare", old]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 compared, 0 slower"
    assert main(["--from", new, "--compare", old]) == 1
    count, line = capsys.readouterr().out.splitlines()[-2:]
    assert count == "2 compared, 1 slower"
    assert line.startswith("rms_norm backward bfloat16 4 x 1024, torch: ")
    narrowed = ["--direction", "forward", "--from", new, "--compare", old]
    assert main(narrowed) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 compared, 0 slower"


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


def test_only_measures_a_provider_at_the_given_sizes(tiny, capsys):
    ways = ["--provider", "torch", "tilenorm", "--direction", "forward"]
    main([*RMS_NORM, "--hidden", "1024", "4096", *ways, "--only", "torch", "4096"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    table = {row[0]: row for row in rows if row[:1] in (["1024"], ["4096"])}
    assert [(row[-1], "-" in row) for row in table.values()] == [("-", True), ("torch", False)]
    with pytest.raises(SystemExit):
        main([*RMS_NORM, "--only", "nobody", "4096"])


def test_record_names_the_file_of_its_command_without_the_folder(tiny, tmp_path):
    path = str(tmp_path / "run.jsonl")
    main([*RMS_NORM, "--hidden", "1024", "--provider", "torch", "--out", path])
    with open(path) as file:
        assert json.loads(file.readline())["command"].endswith("--provider torch --out run.jsonl")
