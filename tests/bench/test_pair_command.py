"""bench train --pair on the command line, what its record says, and the tables of it."""

import json

import pytest
import torch

from bench import documents, pair, pair_table, report, train, worker
from bench.__main__ import main
from bench.record import Pair, Record, merge, read, to_json

from .test_record import RUN, rows_of

pytestmark = pytest.mark.filterwarnings("ignore::tilenorm.ReferenceWarning")
KERNELS = [
    [
        {"name": "triton_add", "calls": 2, "ms": 3.0, "bytes": 4_000_000_000},
        {"name": "gemm", "calls": 9, "ms": 90.0, "bytes": None},
    ],
    [
        {"name": "norm_backward of 7 arrays", "calls": 1, "ms": 1.25, "bytes": 3_000_000_000},
        {"name": "gemm", "calls": 9, "ms": 90.5, "bytes": None},
    ],
]
MEASURED = Pair(
    "32 layers of 4096",
    "Llama 3 8B, 32 layers",
    "compile",
    "tilenorm-compile",
    tokens=8192,
    asked=8,
    pairs_us=[[700e3 + i, 696e3 - i] for i in range(8)],
    peak_bytes=[82 << 30, 78 << 30],
    losses=[12.5, 12.5],
    gradient_change=0.0123,
    gradient="head.norm.weight",
    kernels=KERNELS,
    reports=["", "graph 0: 2 norms replaced"],
)
NAMES = {"model": "m", "label": "ViT-L, 24 layers", "base": "eager", "variant": "patch"}
CUT = Pair(**NAMES, tokens=100, asked=40, pairs_us=[[2e3, 1e3]] * 5, peak_bytes=[None, None])
SKIPPED = Pair(**NAMES | {"model": "n"}, tokens=1, asked=40, status="skipped", error="out of time")


@pytest.fixture
def in_process(monkeypatch):
    """Workers run here, one after another, without a GPU. Its value has their time limits."""
    limits = []

    def run(function, timeout_s, places=None, **arguments):
        limits.append(timeout_s)
        return json.loads(json.dumps(function(**json.loads(json.dumps(arguments)))))

    monkeypatch.setattr(worker, "run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return limits


def test_command_prints_the_same_from_its_record(in_process, tmp_path, capsys):
    path = str(tmp_path / "run.jsonl")
    command = ["train", "--tiny", "--pairs", "6", "--pair", "eager", "patch"]
    command += ["--model", "Llama 3.2 1B", "ViT-L", "--layers", "1", "--out", path]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert err.count("6 of 6 pairs") == 2
    with open(path) as file:
        run, *lines = map(json.loads, file)
    assert run["command"].endswith("--layers 1 --out run.jsonl")
    assert [line["record"] for line in lines] == ["pair", "pair"]
    for line, name in zip(lines, ("Llama 3.2 1B", "ViT-L"), strict=True):
        assert line["model"].startswith(f"{name}'s form: 1 layers of 32 with 4 heads")
        assert line["label"].startswith(f"{name}'s form in other sizes, 1 layers")
        assert len(line["pairs_us"]) == line["asked"] == 6
        median, low, high = line["difference_us"]
        assert low <= median <= high
        assert f"{low / 1e3:+.2f} to {high / 1e3:+.2f}" in out
    assert main(["--from", path]) == 0
    assert capsys.readouterr().out == out


def test_models_after_the_end_of_the_time_are_skipped(in_process, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(train.time, "time", lambda: now[0])

    def measure(names, settings, pairs, deadline):
        assert deadline == 100.0
        now[0] += 70.0
        return {
            "pairs_us": [[2.0, 1.0]] * (3 if now[0] > deadline else pairs),
            "peak_bytes": [1, 2],
        }

    measure.__module__, measure.__name__ = pair.__name__, "measure"
    monkeypatch.setattr(pair, "measure", measure)
    options = ["--tiny", "--pair", "eager", "patch", "--model", "Llama 3 8B", "Qwen3 8B", "ViT-L"]
    assert main(["train", *options, "--max-seconds", "100"]) == 0
    out, err = capsys.readouterr()
    assert in_process == [100 + train.GRACE_S, 30 + train.GRACE_S]
    assert [line for line in err.splitlines() if line.endswith("pairs")] == [
        "40 of 40 pairs",
        "3 of 40 pairs",
        "0 of 40 pairs",
    ]
    assert "out of time after 3 of 40 pairs" in out
    assert "ViT-L's form in other sizes, 2 layers, 2 x 8 tokens, eager, patch: skipped" in out


def test_failed_pair_is_shown_and_the_next_runs(monkeypatch, capsys):
    def run(function, timeout_s, names, **arguments):
        assert arguments["places"] == {} and arguments["deadline"] == float("inf")
        if names[1] == "compile":
            raise worker.WorkerError("OutOfMemoryError: CUDA out of memory")
        return {"pairs_us": [[2e3, 1e3]] * 40, "peak_bytes": [None, None]}

    monkeypatch.setattr(worker, "run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    main(["train", "--tiny", "--pair", "eager", "compile", "--pair", "eager", "patch"])
    out = capsys.readouterr().out
    assert "eager, compile: failed: OutOfMemoryError: CUDA out of memory" in out
    assert any("eager patch 40 2.00 / 1.00 -1.00 (-1.00 to -1.00)" in row for row in rows_of(out))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pair", "eager", "patch", "--variant", "eager"], "not allowed with argument"),
        (["--pair", "eager"], "expected 2 arguments"),
        (["--pair", "eager", "nothing"], "invalid choice: 'nothing'"),
        (["--model", "Llama 4"], "invalid choice: 'Llama 4'"),
        (["--pairs", "0", "--pair", "eager", "patch"], "--pairs: got 0, takes at least 1"),
        (["--max-seconds", "9"], "--max-seconds: is for --pair"),
        (["--dropout", "1.0"], "--dropout: got 1.0, takes 0 to 1, without 1"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        train.main(options)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_written_pairs_are_read_back_and_a_later_one_counts():
    record = Record([RUN], pairs=[MEASURED, CUT, SKIPPED])
    lines = [to_json(line) for line in (RUN, *record.pairs)]
    assert read(lines) == record
    written = json.loads(lines[1])
    assert written["medians_us"] == [700003.5, 695996.5]
    assert written["difference_us"] == [-4007.0, -4014.0, -4000.0]
    assert json.loads(lines[3])["more_tokens"] is None
    assert merge([record, record]).pairs == record.pairs
    assert len(merge([record, Record([RUN], pairs=[CUT])]).pairs) == 3


def test_row_of_a_pair_has_the_difference_with_its_interval():
    rows = rows_of(report.render(Record([RUN], pairs=[MEASURED, CUT, SKIPPED])))
    shown = "8 700.00 / 696.00 -4.01 (-4.01 to -4.00) 11703 / 11770 +0.58% (+0.57 to +0.58%)"
    kernels = "82.00 / 78.00 4.0 GB, 3.00 ms 3.0 GB, 1.25 ms 0.012"
    assert f"Llama 3 8B, 32 layers compile tilenorm-compile {shown} {kernels}" in rows
    cut = "5 2.00 / 1.00 -1.00 (too few pairs) 50000 / 100000 +100.00% (too few pairs) - / -"
    assert f"ViT-L, 24 layers eager patch {cut} - - -" in rows
    assert "ViT-L, 24 layers, eager, patch: out of time after 5 of 40 pairs" in rows
    assert "ViT-L, 24 layers, eager, patch: skipped: out of time" in rows


def test_kernels_with_the_largest_differences_stand_first(monkeypatch):
    monkeypatch.setattr(pair_table, "KERNELS", 2)
    rows = rows_of(report.render(Record([RUN], pairs=[MEASURED])))
    start = rows.index("kernels of a step: A is compile, B is tilenorm-compile: 32 layers of 4096")
    assert rows[start + 2 : start + 6] == [
        "triton_add 2 3.000 4.000 - - -",
        "norm_backward of 7 arrays - - - 1 1.250 3.000",
        "all kernels 11 93.000 4.000 10 91.750 3.000",
        "1 kernels whose time differs less are left out.",
    ]


def test_document_prints_the_pairs_of_several_records(tmp_path):
    for name, lines in (("a", [MEASURED, CUT]), ("b", [SKIPPED])):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(map(to_json, [RUN, *lines])))
    path = tmp_path / "DOCUMENT.md"
    path.write_text("<!-- pairs: a.jsonl b.jsonl -->\nold\n<!-- end -->\n")
    assert main(["--markdown", str(path)]) == 0
    shown = path.read_text()
    assert shown.count("| compile | tilenorm-compile |") == 1 and "skipped" in shown
    assert "kernels of a step" not in shown
    path.write_text("<!-- table: a.jsonl variant=tilenorm-compile -->\nold\n<!-- end -->\n")
    shown = documents.rewritten(path)
    assert "kernels of a step" in shown and "ViT-L" not in shown
