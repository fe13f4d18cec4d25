"""Records are written, read, merged and shown. test_documents.py tests whole pages."""

from dataclasses import replace
from itertools import product
from random import Random

import pytest

from bench import report
from bench.plot import _STYLES, save
from bench.providers import PROVIDERS
from bench.record import (
    CONFIDENCE,
    Accuracy,
    Cell,
    Copy,
    FirstCall,
    Host,
    Precompile,
    Record,
    estimate,
    merge,
    read,
    to_json,
)

RUN = {
    "date": "2026-01-02T03:04:05+00:00",
    "command": "python -m bench",
    "device": "cuda",
    "machine": "Some GPU",
    "python": "3.12",
    "torch": "2.11",
    "cuda": "13.0",
    "tileiras": None,
    "packages": {"triton": "3.6", "tilegym": None},
    "tilenorm": "0.1",
    "commit": "abc",
    "absent": {"tilegym": "ModuleNotFoundError: No module named 'tilegym'"},
}
SHAPE = {"op": "rms_norm", "dtype": "bfloat16", "m": 1000, "n": 1024, "direction": "forward"}
TIMED = {"bytes": 4_000_000, "spread": 0.01, "samples": 10, "timing": "graph"}
SPEC = {"op": "rms_norm", "dtype": "float32", "m": 2048, "n": 4096}
OTHER_LINES = (
    FirstCall(**SPEC, direction="forward", provider="tilenorm", cold_s=1.25, warm_s=0.0312),
    FirstCall(**SPEC, direction="forward", provider="compile", cold_s=4.5),
    FirstCall(**SPEC, direction="backward", provider="quack", error="ValueError: no"),
    Precompile("rms_norm", "--arch sm_90 --hidden 4096", 16, 7.5),
    Accuracy(**SPEC, inputs="normal", provider="torch", ulps={"y": 0.5}),
    Accuracy(**SPEC, inputs="zero rows", provider="torch", ulps={"y": 0.25}),
)


def cell(provider: str, us: float | None = None, **fields) -> Cell:
    return Cell(
        **{**SHAPE, **(TIMED if us else {"bytes": 1}), **fields}, provider=provider, median_us=us
    )


@pytest.fixture
def record():
    lines = [
        Copy("bfloat16", 1000, 1024, 4_000_000, 1.0, 0.0, 10, "graph"),
        cell("quack", m=10, n=131072, status="refused", error="ValueError: too wide"),
        cell("tilenorm", 2.0),
        cell("torch", 4.0),
        cell("quack", 1.6),
        Host("rms_norm", "bfloat16", 16, 1024, "tilenorm", 11.25, None, "OSError: no"),
        Host("rms_norm", "bfloat16", 16, 1024, "torch", 9.0, 70.0),
    ]
    return Record([RUN], lines)


def written(record):
    return [to_json(line) for line in (*record.runs, *record.lines)]


def rows_of(text):
    return [" ".join(line.split()) for line in text.splitlines()]


def test_written_record_is_read_back_with_rates_beside_the_times(record):
    for line in OTHER_LINES:
        record.add(line)
    assert read(written(record)) == record
    assert merge([record, record]) == replace(record, runs=[RUN, RUN])
    assert [cell.gbps for cell in record.cells] == [None, 2000.0, 1000.0, 2500.0]


def test_last_line_of_a_run_that_was_cut_off_is_ignored(record):
    lines = written(record)
    whole = read(lines)
    assert read([*lines, lines[-1][:-9]]) == whole
    with pytest.raises(ValueError, match="line 2 "):
        read([lines[0], lines[1][:-9] + "}", lines[2]])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no run line"),
        (["{"], "line 1 "),
        (['{"record": "run"}', '{"record": "mystery"}'], "line 2 "),
        (['{"record": "run"}', '{"record": "cell", "op": "rms_norm"}'], "line 2 "),
        (['{"record": "cell"}'], "line 1 "),
    ],
)
def test_damaged_record_is_refused_with_its_line(lines, message):
    with pytest.raises(ValueError, match=message):
        read(lines)


def test_records_of_one_machine_are_merged_into_one_report(record):
    later = {**RUN, "date": "2026-01-03", "absent": {"quack": "has no layer_norm"}}
    other = Record([later], [cell("tilenorm", 4.0, op="layer_norm"), cell("quack", 3.0)])
    merged = merge([record, other])
    assert [cell.median_us for cell in merged.cells if cell.n == 1024] == [2.0, 4.0, 3.0, 4.0]
    lines = report.render(merged).splitlines()
    assert lines[:2] == [f"tilenorm 0.1 (abc) on Some GPU, {run['date']}" for run in (RUN, later)]
    assert lines[2].startswith("torch 2.11, CUDA 13.0")
    assert lines[3].startswith("absent: tilegym (ModuleNotFoundError")
    assert lines[4] == "absent: quack (has no layer_norm)"
    table = lines.index("layer_norm forward, bfloat16: GB/s (% of a copy)")
    assert lines[table + 2].split() == ["1024", "1000", "1000", "(25%)", "4000", "-"]
    with pytest.raises(ValueError, match="Another GPU"):
        merge([record, Record([{**RUN, "machine": "Another GPU"}])])


def test_plot_is_an_svg_with_a_style_for_every_provider(record, tmp_path):
    assert set(_STYLES) == {*PROVIDERS}
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.svg"
    record.add(cell("torch", 1.0, direction="inference"))
    save(record, str(path))
    text = path.read_text()
    assert "<svg" in text and "rms_norm forward, bfloat16" in text and "inference" not in text
    with pytest.raises(ValueError, match="nothing to plot"):
        save(Record([RUN]), str(path))


@pytest.mark.parametrize("n", range(1, 13))
def test_share_of_all_signs_that_the_interval_misses(n):
    """Each sample is below or above the median with probability 1/2: all 2^n cases are as likely.

    The interval misses as few cases as it can: the next narrower one misses too many.
    """
    median, low, high = estimate(Random(n).sample(range(n), n))
    assert median == (n - 1) / 2
    if low is None:
        assert 2 * 0.5**n > 1 - CONFIDENCE
        return
    assert low + high == n - 1

    def missed(k: int) -> float:
        """The share of the cases that have at most k samples on one side of the median."""
        cases = [sum(signs) for signs in product((0, 1), repeat=n)]
        return sum(below <= k or below >= n - k for below in cases) / len(cases)

    assert missed(low) <= 1 - CONFIDENCE < missed(low + 1)
