"""The command line on the CPU, with tilenorm's reference."""

from itertools import groupby

import pytest

from bench import report
from bench.__main__ import main
from bench.cases import OPS
from bench.op import DIRECTIONS
from bench.providers import Provider

pytestmark = [
    pytest.mark.filterwarnings("ignore::tilenorm.ReferenceWarning"),
    pytest.mark.usefixtures("tiny"),
]
RMS_NORM = ("--op", "rms_norm", "--dtype", "bfloat16")
RELEASE = ("--suite", "release", "--dtype", "bfloat16")


def test_command_prints_the_same_from_its_record(again):
    found, out, err = again([*RMS_NORM, "--hidden", "1024", "4096"])
    assert out.splitlines()[0] == out.splitlines()[-1] == report.CPU_NOTICE
    assert "absent: compile (needs a GPU)" in out
    assert err.count("\n") == 1 + 2 + 2 * 2 * 2  # notice, host times, N x provider x direction
    assert found.runs[0]["command"].endswith("--hidden 1024 4096 --out run.jsonl")
    assert [*map(len, (found.hosts, found.copies, found.cells))] == [2, 2, 8]


def test_every_op_of_a_suite_has_tables_and_each_shape_is_copied_once(again):
    found, out, _ = again([*RELEASE, "--hidden", "256", "1024", "128"])
    titles = [line.split(":")[0] for line in out.splitlines() if "% of a copy" in line]
    assert sorted(titles) == sorted(
        f"{op.name} {way}, bfloat16"
        for op in OPS.values()
        for way in DIRECTIONS
        if way in op.directions
    )
    assert all(status not in out for status in ("wrong", "failed", "refused"))
    assert len(found.copies) == len({(copy.m, copy.n) for copy in found.copies})
    assert [n for n, _ in groupby(cell.n for cell in found.cells)] == [256, 1024, 128]


def test_provider_without_an_op_is_absent_from_that_op_alone(monkeypatch, capsys):
    eager = OPS["rms_norm"].eager
    some = Provider("some", lambda op: {"rms_norm": eager}.get(op.name), on_cpu=True)
    broken = Provider("broken", lambda op: 1 / 0, on_cpu=True)
    named = {provider.name: provider for provider in (some, broken)}
    for module in ("bench.command", "bench.providers", "bench.run"):
        monkeypatch.setattr(f"{module}.PROVIDERS", named)
    main([*RELEASE, "--hidden", "512"])
    out = capsys.readouterr().out
    lacks = ("layer_norm", "add_rms_norm", "add_layer_norm", "head_rms_norm")
    assert f"absent: some ({'; '.join(f'has no {op}' for op in lacks)})" in out
    assert "absent: broken (ZeroDivisionError: division by zero)" in out
    assert "rms_norm forward, bfloat16" in out and "layer_norm forward" not in out


def test_options_narrow_a_run_and_a_record(tmp_path, capsys):
    path = str(tmp_path / "run.jsonl")
    main([*RMS_NORM, "--hidden", "1024", "4096", "--out", path])
    capsys.readouterr()
    narrowed = ["--hidden", "4096", "--direction", "forward", "--provider", "torch"]
    for command in (["--from", path], [*RMS_NORM]):
        main([*command, *narrowed])
        out = capsys.readouterr().out
        assert "rms_norm forward, bfloat16" in out and "backward, bfloat16" not in out
        assert "\n1024" not in out.replace(" ", "") and "host time" not in out


def test_small_batches_are_shown_in_microseconds(capsys):
    main(["--suite", "latency", "--op", "rms_norm", "--hidden", "2048"])
    out = capsys.readouterr().out
    assert "rms_norm inference, bfloat16: µs" in out and "GB/s" not in out


def test_decode_steps_of_heads_are_checked_and_timed(capsys):
    main(["--suite", "latency", "--hidden", "128"])
    out = capsys.readouterr().out
    for op in ("head_rms_norm", "rms_norm_rope 32/8"):
        assert f"{op} inference, bfloat16: µs" in out
    assert all(status not in out for status in ("wrong", "failed", "refused"))


def test_size_outside_the_suite_is_refused_with_a_list_of_sizes():
    with pytest.raises(SystemExit, match=r"rms_norm \[1024, 4096, 16384\]; "):
        main(["--hidden", "1024", "77"])
