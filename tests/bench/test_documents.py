"""The documents of the repository say what their records say.

The pages of the records hold what each kind of a record prints, those of README.md what a summary,
an index and a list of gains say. tests/test_documents.py holds the rest of all documents.
"""

import re
from pathlib import Path

import pytest

from bench import documents, plot, provenance
from bench.__main__ import main
from bench.providers import PROVIDERS
from bench.record import Cell, Pair, Turns, load, to_json

from .test_record import RUN, SHAPE, TIMED

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
DOCUMENTS = [ROOT / "README.md", ROOT / "bench" / "README.md"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_text_between_markers_is_what_the_records_print(path):
    blocks = documents.blocks(path)
    assert path.read_text() == documents.rewritten(path)
    assert path.read_text().count("<!-- ") == 2 * len(blocks) > 0
    assert all(block.is_drawn(path.parent) for block in blocks if block.kind == "plot")


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_page_of_a_record_is_what_the_record_prints(path):
    assert path.with_suffix(".md").read_text() == documents.page(path)


def test_every_record_is_in_the_index():
    text = DOCUMENTS[1].read_text()
    records = {path.stem for path in RESULTS.iterdir() if path.suffix in (".jsonl", ".md")}
    assert (
        set(re.findall(r"^\|.*\| \[([\w-]+)\]\(results/\1\.md\) \|", text, re.MULTILINE)) == records
    )


def test_page_says_whether_a_release_is_of_other_kernels(folder, monkeypatch):
    path = folder("<!-- measured: *.jsonl -->")
    monkeypatch.setattr(provenance, "ROOT", path.parent)
    kernel = path.parent / "tilenorm" / "kernels" / "a.py"
    for file in kernel, kernel.with_name("README.md"), kernel.parents[1] / "ops.py":
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("1")
    here = provenance.sources(*provenance.KERNELS)
    runs = {"a": (2, "G 1", None), "b": (9, "G 1", here), "c": (1, "G 2", None)}
    for name, (day, machine, kernels) in runs.items():
        run = {**RUN, "machine": machine, "commit": name, "date": f"2026-01-0{day}"}
        path.with_name(f"{name}.jsonl").write_text(to_json({**run, "kernels": kernels}))

    def printed() -> list[str]:
        return [line for line in documents.rewritten(path).splitlines() if line.startswith("- ")]

    older = "- The 2's release is of older kernels: commit c, 2026-01-01."
    kernel.with_name("README.md").write_text("2")
    (kernel.parents[1] / "ops.py").write_text("2")
    assert printed() == ["- The 1's release is of these kernels: commit b, 2026-01-09.", older]
    kernel.write_text("2")
    assert printed() == ["- The 1's release is of older kernels: commit b, 2026-01-09.", older]


@pytest.fixture
def folder(tmp_path):
    """A record of two ops, and a function that writes a document beside it."""
    shapes = [
        {**SHAPE, "op": op, "direction": direction}
        for op in ("layer_norm", "rms_norm")
        for direction in ("forward", "backward")
    ]
    times = {"tilenorm": 2.0, "torch": 4.0, "compile": 3.0, "quack": 1.6}
    lines = [
        Cell(**shape, **TIMED, provider=name, median_us=us)
        for shape in shapes
        for name, us in times.items()
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(to_json, [RUN, *lines])))

    def write(marker: str, text: str = "old") -> Path:
        path = tmp_path / "DOCUMENT.md"
        path.write_text(f"before\n{marker}\n{text}\n<!-- end -->\nafter\n")
        return path

    return write


def test_command_rewrites_documents_and_pages_in_place(folder):
    path = folder("<!-- losses: a.jsonl op=rms_norm -->")
    record = path.with_name("a.jsonl")
    assert main(["--markdown", str(path), str(record)]) == 0
    text = path.read_text()
    assert text.startswith("before\n<!--") and text.endswith("<!-- end -->\nafter\n")
    assert "old" not in text and documents.rewritten(path) == text
    assert record.with_suffix(".md").read_text() == documents.page(record)


def test_losses_take_the_latest_number_of_each_provider_and_list_numbers_of_rows(folder):
    shape = {**SHAPE, **TIMED, "op": "rms_norm", "direction": "forward"}
    lines = [Cell(**shape, provider="tilenorm", median_us=1.65)]
    lines.append(Cell(**{**shape, "m": 8}, provider="tilenorm", median_us=2.0))
    lines.append(Cell(**{**shape, "m": 8}, provider="quack", median_us=1.9))
    path = folder("<!-- losses: *.jsonl op=rms_norm direction=forward -->")
    later = [{**RUN, "date": "2026-02-02"}, *lines]
    path.with_name("0.jsonl").write_text("\n".join(map(to_json, later)))
    assert "0.95 to 0.97 × quack at 1024 with 8, 1000 rows" in documents.rewritten(path)


def test_turns_are_shown_with_losses_first_and_counted_in_the_index(folder):
    path = folder("<!-- turns: b.jsonl way=model -->\n<!-- end -->\n<!-- index: b.jsonl -->")
    times = {"eager": [2e3] * 6, "modules": [1e3] * 6, "patch": [3e3] * 6}
    lines = [Turns("model", "M", "eager", name, us={"step": us}) for name, us in times.items()]
    lines.append(Turns("cold", "C", "torch", "torch", us={"both": [1.0]}))
    path.with_name("b.jsonl").write_text("\n".join(map(to_json, [RUN, *lines])))
    rows = [" ".join(row.split()) for row in documents.rewritten(path).splitlines()]
    assert [row for row in rows if row.startswith("| M |")] == [
        "| M | | eager | patch | 2.00 → 3.00 ms | +1000.0 | 1.500 (1.500 to 1.500) |",
        "| M | | eager | modules | 2.00 → 1.00 ms | -1000.0 | 0.500 (0.500 to 0.500) |",
    ]
    assert "| M: host time of patch, modules | 0.500 to 1.500 × eager's; slower at 1 of 2 |" in (
        row[: row.index(" [b]")] for row in rows if "[b]" in row
    )


def test_steps_are_told_with_those_that_are_slower_first(folder):
    path = folder("<!-- steps: b.jsonl -->")
    pairs = {"Fast": [10.0, 8.0], "Slow": [10.0, 20.0], "Even": [10.0, 9.0]}
    lines = [
        Pair(
            label,
            "compile",
            "ours",
            1,
            6,
            pairs_us=[times, *[[10.0, 10.01]] * (label == "Even")] * 6,
        )
        for label, times in pairs.items()
    ]
    few = Pair("Few", "compile", "ours", 1, 6, pairs_us=[[10.0, 99.0]] * 2)  # without an interval
    lines = [*of_pairs(("Fast", "eager", "ours", 9.0)), *lines, few]
    path.with_name("b.jsonl").write_text("\n".join(map(to_json, [RUN, *lines])))
    sentences = re.findall("^- `ours` beside `(.*?)`", documents.rewritten(path), re.MULTILINE)
    assert sentences == ["compile", "eager"]
    assert (
        "- `ours` beside `compile`: slower in 1 of 3 steps: Slow -50.00% (-50.00 to -50.00%);"
        " +5.51 to +25.00% tokens/s in the other 2; the interval begins at or below 0 in 2.\n"
    ) in documents.rewritten(path)


def of_pairs(*pairs: tuple[str, str, str, float]) -> list[Pair]:
    """Pairs of steps of a model, A and B. A takes 10 µs, and B the number."""
    return [
        Pair(model, a, b, 1, 6, pairs_us=[[10.0, us]] * 6, peak_bytes=[None, None])
        for model, a, b, us in pairs
    ]


def rows_of(text: str) -> list[list[str]]:
    """The cells of the tables in a text."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


def test_gains_have_losses_first_and_those_of_liger_beside_the_same_steps(folder):
    path = folder("<!-- gains: b.jsonl -->")
    ours = of_pairs(
        ("M", "eager", "modules", 9.0), ("M", "compile", "ours", 12.5), ("L", "eager", "patch", 8.0)
    )
    few = Pair("F", "eager", "patch", 1, 6, pairs_us=[[10.0, 99.0]] * 2)  # without an interval
    path.with_name("b.jsonl").write_text("\n".join(map(to_json, [RUN, *ours, few])))
    header, _, *rows = rows_of(documents.rewritten(path))
    assert "Liger's, beside A" not in header
    assert [row[3] for row in rows] == ["ours", "modules", "patch"]
    liger = of_pairs(("M", "eager", "liger", 10.5), ("O", "eager", "liger", 20.0))
    path.with_name("b.jsonl").write_text(
        "\n".join(map(to_json, [RUN, *liger[:1], *ours, liger[1]]))
    )
    header, _, *rows = rows_of(documents.rewritten(path))
    column = header.index("Liger's, beside A")
    assert [(row[0], row[3], row[column].split(" ")[0]) for row in rows] == [
        ("O", "liger", "-50.00%"),  # for no other variant was measured there
        ("M", "ours", "-"),
        ("M", "modules", "-4.76%"),
        ("L", "patch", "-"),
    ]


def test_page_of_pairs_has_losses_first_and_what_has_no_times_last(folder):
    path = folder("<!-- gains: b.jsonl -->").with_name("b.jsonl")
    lines = of_pairs(("M", "eager", "modules", 9.0), ("M", "eager", "liger", 10.5))
    lines.insert(0, Pair("M", "eager", "patch", 1, 6, status="failed", error="out of memory"))
    path.write_text("\n".join(map(to_json, [RUN, *lines])))
    text = documents.page(path)
    assert [row[2] for row in rows_of(text)[2:]] == ["liger", "modules", "patch"]
    assert "M, eager, patch: failed: out of memory" in text


def test_plot_is_drawn_again_when_its_record_has_changed(folder):
    pytest.importorskip("matplotlib")
    path = folder("<!-- plot: a.svg a.jsonl op=rms_norm -->")
    main(["--markdown", str(path)])
    assert "![GB/s against N](a.svg)" in path.read_text()
    svg, (block,) = path.with_name("a.svg"), documents.blocks(path)
    assert block.is_drawn(path.parent)
    svg.write_text(svg.read_text().replace(plot.digest(block.record), "0" * 16))
    assert not block.is_drawn(path.parent)
    main(["--markdown", str(path)])
    assert block.is_drawn(path.parent)
    record = load([path.with_name("a.jsonl")])
    assert plot.digest(record) != plot.digest(record.narrowed(op=["rms_norm"]))
    assert {*plot._STYLES} == {*PROVIDERS}


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("losses: a.jsonl hidden=1024", "hidden is unknown in <!-- losses"),
        ("summary: a.jsonl op=rms_norm a.jsonl", "two records have the same cells"),
    ],
)
def test_unknown_words_in_markers_are_refused(folder, marker, message):
    with pytest.raises(ValueError, match=message):
        documents.rewritten(folder(f"<!-- {marker} -->"))
