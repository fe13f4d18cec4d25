"""The suite of a release: it goes on in its file, and no table has two commits."""

import json

import pytest

from bench import documents, provenance, record
from bench.__main__ import main
from bench.record import Cell, Copy, merge, to_json, what, writing

from .test_record import RUN, SHAPE, TIMED

pytestmark = pytest.mark.filterwarnings("ignore::tilenorm.ReferenceWarning")
SUITE = ["--suite", "release", "--op", "rms_norm", "--dtype", "bfloat16", "--hidden", "256"]


def keys(path) -> list[tuple]:
    found = record.load([path])
    return [what(line) for line in (*found.cells, *found.copies, *found.hosts)]


def test_a_run_that_ended_early_goes_on_in_its_file(tmp_path, capsys, tiny):
    path = tmp_path / "release.jsonl"
    command = [*SUITE, "--out", str(path)]
    main([*command, "--provider", "torch", "--direction", "forward"])
    (first,) = [line for line in path.read_text().splitlines() if '"cell"' in line]
    path.write_text(path.read_text() + '{"record": "cell", "op"')  # cut off
    main([*command, "--max-seconds", "-1"])
    assert "out of time after 0 of 5" in capsys.readouterr().err
    main(command)
    lines = path.read_text().splitlines()
    assert first in lines and all(map(json.loads, lines))
    assert sum('"run"' in line for line in lines) == 3
    assert len(keys(path)) == len({*keys(path)}) == 4 + 1 + 2
    whole = path.read_text()
    path.write_text(whole.replace('"suite": "release"', '"suite": "quick"'))
    with pytest.raises(SystemExit, match="suite quick, not release: give another file"):
        main(command)
    path.write_text(whole)
    main(command)
    assert path.read_text().startswith(whole) and len(keys(path)) == 7


@pytest.mark.parametrize("field", ["commit", "sources", "machine", "torch", "packages"])
def test_a_file_of_another_run_is_refused_and_left_as_it_was(tmp_path, field):
    path = tmp_path / "release.jsonl"
    run = {**RUN, "suite": "release", "sources": "1"}
    with writing(str(path), run):
        pass
    before = path.read_text()
    other = writing(str(path), run | {field: "2"})
    with pytest.raises(SystemExit, match=f"is of {field} .*: give another file"), other:
        pass
    assert path.read_text() == before
    with writing(str(path), run) as (found, _):
        assert found.runs == [run, run]


def test_sources_are_a_digest_of_the_package(monkeypatch, tmp_path):
    (tmp_path / "tilenorm").mkdir()
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    digests = {provenance._sources()}
    for name, text in (("a.py", "x"), ("a.py", "y"), ("b.json", "y"), ("c.md", "y")):
        (tmp_path / "tilenorm" / name).write_text(text)
        digests.add(provenance._sources())
    assert len(digests) == 4


@pytest.mark.parametrize("kind", ["summary", "losses", "plot", "hosts", "index"])
def test_a_table_of_a_release_and_another_commit_is_refused(tmp_path, kind):
    release, other = {**RUN, "suite": "release"}, {**RUN, "commit": "def"}
    for name, run in (("a", release), ("b", other)):
        line = Cell(**SHAPE | {"op": name}, **TIMED, provider="tilenorm", median_us=1.0)
        copy = Copy("bfloat16", SHAPE["m"], SHAPE["n"], **TIMED, median_us=1.0)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(to_json, (run, copy, line))))
    path = tmp_path / "a.md"
    path.write_text(f"<!-- {kind}: a.jsonl b.jsonl -->\n<!-- end -->\n")
    if kind == "index":  # each record has its own row, with its commit
        assert "| abc |" in documents.rewritten(path) and "| def |" in documents.rewritten(path)
        return
    with pytest.raises(ValueError, match="beside no other commit's, got abc, def"):
        documents.rewritten(path)
    records = [record.load([tmp_path / f"{name}.jsonl"]) for name in "ab"]
    assert len(merge([records[0], records[0]]).cells) == 1
