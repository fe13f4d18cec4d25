"""The documents of the repository say what their records say."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from bench import documents, plot
from bench.__main__ import main
from bench.record import Cell, Record, load, to_json

from .test_record import RUN, SHAPE, TIMED

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
DOCUMENTS = [ROOT / "README.md", ROOT / "bench" / "README.md"]

each_document = pytest.mark.parametrize(
    "path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)


@each_document
def test_text_between_markers_is_what_the_record_prints(path):
    assert documents.blocks(path)
    assert path.read_text() == documents.rewritten(path)


@each_document
def test_every_marker_is_read(path):
    text = path.read_text()
    assert text.count("<!-- ") == 2 * len(documents.blocks(path))


@each_document
def test_plots_show_their_records(path):
    for block in documents.blocks(path):
        if block.kind == "plot":
            assert documents.is_drawn(path, block)


def test_every_table_of_measurements_stands_between_markers():
    text = documents.BLOCK.sub("", DOCUMENTS[1].read_text())
    assert not [line for line in text.splitlines() if line.startswith("|")]


def test_every_record_is_shown_in_a_document():
    shown = {
        (path.parent / source).resolve()
        for path in DOCUMENTS
        for block in documents.blocks(path)
        if block.kind != "run"
        for source, _ in block.sources
    }
    assert shown == set(RESULTS.glob("*.jsonl"))


def test_readme_fits_on_a_few_screens():
    assert len(DOCUMENTS[0].read_text().splitlines()) <= 200


@pytest.mark.filterwarnings("ignore::tilenorm.ReferenceWarning")
def test_first_example_of_the_readme_prints_what_its_comments_say():
    code = re.search(r"```python\n(.*?)```", DOCUMENTS[0].read_text(), re.DOTALL)[1]
    expected = re.findall(r"^print\(.*  # (.*)$", code, re.MULTILINE)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code.replace('"cuda"', '"cpu"'), {})
    assert expected
    assert printed.getvalue().splitlines() == expected


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


def test_command_rewrites_the_tables_of_a_document_in_place(folder):
    path = folder("<!-- table: a.jsonl op=rms_norm direction=forward dtype=bfloat16 -->")
    assert main(["--markdown", str(path)]) == 0
    lines = path.read_text().splitlines()
    assert (lines[0], lines[-2], lines[-1]) == ("before", "<!-- end -->", "after")
    assert "old" not in lines
    assert [line for line in lines if line.startswith("**")] == [
        "**rms_norm forward, bfloat16: GB/s (% of a copy)**"
    ]
    again = path.read_text()
    main(["--markdown", str(path)])
    assert path.read_text() == again


def test_table_of_a_document_is_the_table_that_the_command_prints(folder, capsys):
    path = folder("<!-- table: a.jsonl op=rms_norm direction=backward -->")
    source = str(path.with_name("a.jsonl"))
    narrowed = ["--from", source, "--op", "rms_norm", "--direction", "backward", "--markdown"]
    main(narrowed)
    (block,) = documents.BLOCK.finditer(documents.rewritten(path))
    assert block["text"].strip() in capsys.readouterr().out


def test_summary_has_a_row_for_each_n_and_direction_and_a_column_for_each_op(folder):
    rows = documents.rewritten(folder("<!-- summary: a.jsonl -->")).splitlines()
    rows = [" ".join(row.split()) for row in rows if row.startswith("|")]
    assert rows[0] == "| N | direction | rms_norm | layer_norm |"
    assert rows[2:] == [
        "| 1024 | forward | 2000 (0.80 × quack) | 2000 (0.80 × quack) |",
        "| 1024 | backward | 2000 (0.80 × quack) | 2000 (0.80 × quack) |",
    ]


def test_summary_of_several_records_marks_shapes_without_torch_compile(folder):
    others = "provider=tilenorm,torch,quack"
    path = folder(
        f"<!-- summary: a.jsonl op=rms_norm direction=forward {others}\na.jsonl op=layer_norm -->"
    )
    rows = [" ".join(row.split()) for row in documents.rewritten(path).splitlines()]
    assert [row for row in rows if row.startswith("| 1024")] == [
        "| 1024 | forward | 2000 (0.80 × quack) * | 2000 (0.80 × quack) |",
        "| 1024 | backward | - | 2000 (0.80 × quack) |",
    ]


def test_table_has_one_record_and_other_words_no_cell_twice(folder):
    with pytest.raises(ValueError, match="a table has one record"):
        documents.rewritten(folder("<!-- table: a.jsonl op=rms_norm a.jsonl op=layer_norm -->"))
    with pytest.raises(ValueError, match="two records have the same cells"):
        documents.rewritten(folder("<!-- losses: a.jsonl op=rms_norm a.jsonl -->"))


def test_losses_name_every_shape_at_which_a_peer_is_faster(folder):
    text = documents.rewritten(folder("<!-- losses: a.jsonl op=rms_norm -->"))
    assert "Another provider is faster at 2 of the 2 measured shapes." in text
    assert "`rms_norm` forward: 0.80 × quack at 1024; `rms_norm` backward: 0.80" in text
    text = documents.rewritten(folder("<!-- losses: a.jsonl provider=tilenorm,torch -->"))
    assert "No other provider is faster at any of the 4 measured shapes." in text


def test_run_names_machine_versions_date_and_command(folder):
    text = documents.rewritten(folder("<!-- run: a.jsonl -->"))
    assert "Some GPU, 2026-01-02, torch 2.11, CUDA 13.0" in text
    assert "tilenorm 0.1 at commit abc, by `python -m bench`." in text


def test_plot_is_drawn_beside_its_record(folder):
    pytest.importorskip("matplotlib")
    path = folder("<!-- plot: a.jsonl op=rms_norm -->")
    main(["--markdown", str(path)])
    assert "![GB/s against N](a.svg)" in path.read_text()
    record = load([path.with_name("a.jsonl")])
    svg = path.with_name("a.svg").read_text()
    named = folder(
        "<!-- plot: other.svg\na.jsonl op=rms_norm direction=forward a.jsonl op=layer_norm -->"
    )
    main(["--markdown", str(named)])
    assert "![GB/s against N](other.svg)" in named.read_text()
    assert plot.digest_in(named.with_name("other.svg").read_text()) is not None
    assert plot.digest_in(svg) == plot.digest(record.narrowed(op=["rms_norm"]))
    assert plot.digest_in(svg) != plot.digest(record)


@pytest.mark.parametrize("marker", ["tabel: a.jsonl", "table: a.jsonl hidden=1024"])
def test_unknown_words_in_markers_are_refused(folder, marker):
    with pytest.raises(ValueError, match="is unknown in <!-- tab"):
        documents.rewritten(folder(f"<!-- {marker} -->"))


def test_record_that_was_cut_off_still_prints(folder):
    path = folder("<!-- table: a.jsonl op=layer_norm direction=forward -->")
    source = path.with_name("a.jsonl")
    whole = source.read_text()
    source.write_text(whole[: whole.rindex('"provider"')])
    assert "0.80 quack" in documents.rewritten(path)
    assert isinstance(load([source]), Record)
