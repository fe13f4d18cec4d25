"""Records are read, written and merged, and what does not belong together is refused."""

import json
from dataclasses import replace

import pytest

from bench import documents, provenance, record
from bench.__main__ import main
from bench.cases import RESUMED
from bench.record import Cell, Copy, Record, merge, read, to_json, what, writing

RUN = {
    "date": "2026-01-02T03:04:05+00:00",
    "command": "python -m bench",
    "device": "cuda",
    "machine": "Some GPU",
    "torch": "2.11",
    "cuda": "13.0",
    "packages": {"triton": "3.6"},
    "tilenorm": "0.1",
    "commit": "abc",
    "absent": {},
}
SHAPE = {"op": "rms_norm", "dtype": "bfloat16", "m": 1000, "n": 1024, "direction": "forward"}
TIMED = {"bytes": 4_000_000, "spread": 0.01, "samples": 10, "timing": "graph"}
SUITE = ["--suite", "release", "--op", "rms_norm", "--dtype", "bfloat16", "--hidden", "256"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no run line"),
        (['{"record": "run"}', '{"record": "mystery"}'], "line 2 "),
        (['{"record": "run"}', '{"record": "cell", "op": "rms_norm"}'], "line 2 "),
    ],
)
def test_damaged_record_is_refused_with_its_line(lines, message):
    with pytest.raises(ValueError, match=message):
        read(lines)


def keys(path) -> list[tuple]:
    found = record.load([path])
    return [what(line) for line in (*found.cells, *found.copies, *found.hosts)]


@pytest.mark.filterwarnings("ignore::tilenorm.ReferenceWarning")
def test_a_run_that_ended_early_goes_on_in_its_file(tmp_path, capsys, tiny):
    path = tmp_path / "release.jsonl"
    command = [*SUITE, "--out", str(path)]
    main([*command, "--provider", "torch", "--direction", "forward"])
    (first,) = [line for line in path.read_text().splitlines() if '"cell"' in line]
    path.write_text(path.read_text() + '{"record": "cell", "op"')  # cut off
    assert len(keys(path)) == 2
    main([*command, "--max-seconds", "-1"])
    assert "out of time after 0 of 5" in capsys.readouterr().err
    main(command)
    lines = path.read_text().splitlines()
    assert first in lines and all(map(json.loads, lines))
    assert sum('"run"' in line for line in lines) == 3
    assert len(keys(path)) == len({*keys(path)}) == 4 + 1 + 2
    whole = path.read_text()
    main(command)
    assert path.read_text().startswith(whole) and len(keys(path)) == 7


@pytest.mark.parametrize("suite", RESUMED)
def test_runs_of_large_suites_go_on_in_their_files(tmp_path, suite):
    """Of another commit, too, if the kernels are the same."""
    path, run = tmp_path / "a.jsonl", {**RUN, "suite": suite, "kernels": "1"}
    line = Cell(**SHAPE, **TIMED, provider="torch", median_us=1.0)
    for commit, earlier in (("a", []), ("b", [line])):
        with writing(str(path), {**run, "commit": commit}) as (found, emit):
            assert found.cells == earlier
            emit(line)


@pytest.mark.parametrize("field", ["suite", "kernels", "machine", "torch", "packages"])
def test_a_file_of_another_run_is_refused_and_left_as_it_was(tmp_path, field):
    path = tmp_path / "release.jsonl"
    run = {**RUN, "suite": "release", "kernels": "1"}
    path.write_text(to_json(run | {field: "2"}) + "\n")
    before = path.read_text()
    other = writing(str(path), run)
    with pytest.raises(SystemExit, match=f"is of {field} 2, .*: give another file"), other:
        pass
    assert path.read_text() == before


def test_sources_are_a_digest_of_the_package(monkeypatch, tmp_path):
    (tmp_path / "tilenorm").mkdir()
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    digests = {provenance.sources(".")}
    for name, text in (("a.py", "x"), ("a.py", "y"), ("b.json", "y"), ("c.md", "y")):
        (tmp_path / "tilenorm" / name).write_text(text)
        digests.add(provenance.sources("."))
    assert len(digests) == 4
    a = tmp_path / "tilenorm" / "a.py"
    code = 'def f():\n    return f"{1}# 2", "#"\n'
    for text in (code, "# 3\n\n" + code.replace("f():", "f():  # 4"), code.replace("2", "5")):
        a.write_text(text)
        digests.add(provenance.sources("."))
    assert len(digests) == 6  # a comment changes none
    before = provenance.sources(".", of="tests")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(code)
    assert provenance.sources(".", of="tests") != before
    assert provenance.sources(".") in digests


def test_a_table_of_a_release_and_another_commit_or_machine_is_refused(tmp_path):
    runs = {**RUN, "suite": "release"}, {**RUN, "commit": "def"}
    for name, run in zip("ab", runs, strict=True):
        line = Cell(**SHAPE | {"op": name}, **TIMED, provider="tilenorm", median_us=1.0)
        copy = Copy("bfloat16", SHAPE["m"], SHAPE["n"], **TIMED, median_us=1.0)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(to_json, (run, copy, line))))
    path = tmp_path / "a.md"
    path.write_text("<!-- summary: a.jsonl b.jsonl -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match="beside no other kernels', got abc, def"):
        documents.rewritten(path)
    of_release = record.load([tmp_path / "a.jsonl"])
    later = Record(of_release.runs, [replace(of_release.cells[0], median_us=2.0)])
    assert [cell.median_us for cell in merge([of_release, later]).cells] == [2.0]
    with pytest.raises(ValueError, match="Another GPU"):
        merge([of_release, Record([{**RUN, "machine": "Another GPU"}])])
