"""The command tune: what it lists, writes and prints.

tests/tools/test_tune.py tests how it measures.
"""

import json

import pytest
import torch

from tilenorm.__main__ import main
from tilenorm.launch import heuristics, user_table
from tilenorm.launch.config import Backward, Hints, RowForward
from tilenorm.launch.target import Target
from tilenorm.spec import NormSpec
from tilenorm.tools import options
from tilenorm.tools import tune as tuning
from tilenorm.tools.candidates import Search
from tilenorm.tools.explain import planned_device

H200 = Target.of("sm_90")
BEST = {"forward": RowForward(2, Hints(8), (1024,)), "backward": Backward((1024,), 2)}


@pytest.fixture
def measured(monkeypatch, tables):
    """A list of what was tuned, by a fake GPU that measures the same for every configuration."""
    found = []

    def tuned(search, how):
        found.append((search.spec, search.direction, how.rows, how.seconds))
        how.report("halfway")
        numbers = (67.125, 0.0031, 96, 4000.5, 16384, "a spec", {}, {}, "a GPU", "580", "a day")
        return user_table.Entry(search.key(), BEST[search.direction], *numbers)

    monkeypatch.setattr(tuning, "tune", tuned)
    monkeypatch.setattr(options, "gpu", lambda: planned_device("sm_90"))
    return found


def test_tune(measured, tables, capsys):
    assert main(["tune", "--hidden", "1024", "--seconds", "3", "--rows", "512"]) == 0
    spec = NormSpec("rms", 1024, "bfloat16", "bfloat16")
    assert measured == [(spec, "forward", 512, 3), (spec, "backward", 512, 3)]
    out, err = capsys.readouterr()
    title = "rms_norm 1024 bfloat16 (weight bfloat16, bias None, offset 0) forward"
    assert f"{title}: 67.125 µs, spread 0.31%, 4000.5 GB/s, 96 samples\n" in out
    assert "  RowForward(rows=2, hints=Hints(occupancy=8), widths=(1024,))\n" in out
    assert f"written to {tables / 'sm_90.json'}\n" in out
    assert err.splitlines()[:2] == [title, "halfway"]
    assert heuristics.chosen(spec, H200) == BEST["forward"]


def test_several_terms_of_dy(measured, tables, capsys):
    main(["tune", "--hidden", "1024", "--terms", "2"])
    (entry,) = user_table.read(tables / "sm_90.json", "sm_90")
    assert (entry.key.direction, entry.key.terms) == ("backward", 2)
    assert "(weight bfloat16, bias None, offset 0, 2 terms of dy) back" in capsys.readouterr().out


def test_into_a_file(measured, tables, tmp_path, capsys):
    path = tmp_path / "folder" / "mine.json"
    main(["tune", "--hidden", "1024", "--direction", "forward", "--out", str(path)])
    assert [e.config for e in user_table.read(path, "sm_90")] == [BEST["forward"]]
    assert f"written to {path}" in capsys.readouterr().out
    assert not tables.exists()


def test_as_a_shipped_table(measured, capsys):
    main(["tune", "--hidden", "1024", "--shipped"])
    text = capsys.readouterr().out
    assert '[1024, {"form": "Backward", "widths": [1024], "rows": 2}, "4000"]' in text
    main(["tune", "--arch", "sm_90", "--shipped"])
    again = capsys.readouterr().out
    assert again.startswith('{\n "spills": {') and text.endswith(again)
    assert len(measured) == 2, "printing a table tunes nothing"


def test_info_lists_user_tables(measured, tables, capsys):
    main(["info"])
    assert "user table" not in capsys.readouterr().out
    main(["tune", "--hidden", "1024"])
    path = tables / "sm_90.json"
    main(["info"])
    assert f"user table {path}: 2 configurations\n" in capsys.readouterr().out
    path.write_text(json.dumps(json.loads(path.read_text()) | {"arch": "sm_80"}))
    assert main(["info"]) == 1
    printed = capsys.readouterr().out
    assert f"wrong: the user table {path} is ignored: it is for sm_80, not for sm_90" in printed


def test_dry_run(tables, capsys, monkeypatch):
    some = {
        "forward": [RowForward(1, Hints(4), (1024,)), RowForward(1, Hints(), (1024,))],
        "backward": [Backward((1024,), hints=Hints(5)), Backward((1024,), 4, hints=Hints(5))],
    }
    monkeypatch.setattr(Search, "configs", property(lambda search: some[search.direction]))
    arguments = ["--arch", "sm_90", "--hidden", "1024", "--processes", "1", "--spills", "0"]
    assert main(["tune", "--dry-run", *arguments]) == 0
    out, err = capsys.readouterr()
    forward, backward = out.split("rms_norm 1024 bfloat16")[1:]
    assert "forward on sm_90: 1 of 2 to be timed\n" in forward
    assert "RowForward(widths=(1024,)): same code as RowForward(hints=Hints(occupancy=4)" in forward
    assert "backward on sm_90: 1 of 2 to be timed\n" in backward
    assert "rows=4, hints=Hints(occupancy=5)): spills" in backward
    assert err.count("compiled 2 of 2") == 2
    assert not tables.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu(refused, tables):
    assert "there is no NVIDIA GPU, or no driver for it" in refused(["tune", "--hidden", "64"])
