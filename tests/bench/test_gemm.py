"""bench gemm: the ways are right, they run in turn, and the decisions follow from the times."""

import json
from dataclasses import replace

import pytest
import torch

from bench import gemm, gemm_table, report
from bench.__main__ import main
from bench.gemm import MOST_ERROR, SITES, WAYS, operands, timed, wrong_by
from bench.lines import Gemm
from bench.record import Record, merge, read, to_json
from bench.shapes import LLAMA, MODELS, tiny

from .test_pair import FOREVER, Clock
from .test_record import RUN, rows_of

each_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.site}: {way.name}")


@pytest.fixture
def given():
    return operands(tiny(MODELS[LLAMA]).shape, 80, "cpu")


@each_way
def test_way_computes_the_sum_of_its_site(way, given):
    assert wrong_by(way, given) < MOST_ERROR / 4


@each_way
def test_way_of_another_sum_is_wrong(way, given):
    other = replace(way, beta=way.beta + 0.5, site="down" if way.site[0] in "gq" else way.site)
    assert wrong_by(other, given) > MOST_ERROR


def test_sites_are_of_existing_tensors_with_fitting_sizes(given):
    for products, addend in SITES.values():
        for a, b in products:
            assert (getattr(given, a) @ getattr(given, b)).shape == given.x.shape
        if addend:
            assert getattr(given, addend).shape == given.x.shape


def test_each_second_round_runs_backwards_and_the_warm_up_does_not_count():
    clock, ways = Clock(), []
    for name, us in (("a", 1.0), ("b", 20.0), ("c", 300.0)):
        run = clock.step(name, lambda us=us: us)
        ways.append(gemm.Way("down", name, lambda given, run=run: run()))
    assert timed(ways, None, clock, (1, 2), FOREVER) == [[1.0] * 2, [20.0] * 2, [300.0] * 2]
    assert "".join(clock.order) == "abccbaabc"
    assert timed(ways, None, clock, (1, 2), 0.0) == [[], [], []]


def lines_of(**us: float) -> list[Gemm]:
    """Lines with these times; the others are those of a machine where a read of C takes 10 µs."""
    times = {"2 mm": 400.0, "mm, addmm_": 404.0, "3 mm": 200.0, "mm, 2 addmm_": 210.0}
    times |= {"down mm": 300.0, "down mm + add": 340.0, "down addmm_": 306.0}
    times |= {"o mm": 100.0, "o mm + add": 130.0, "o addmm_": 120.0, "C copy": 20.0}
    times |= us
    found = []
    for way in WAYS:
        time = times.get(way.name, times.get(f"{way.site} {way.name}"))
        status = "ok" if time else "skipped"
        found.append(Gemm("s", way.site, way.name, way.addends, status, time, 0.01, 9))
    return found


def test_decisions_follow_from_the_times():
    (said,) = gemm_table.said(lines_of())
    lines = said.splitlines()
    assert lines[0] == "One read of C, half of the time of its copy: 10.0 µs."
    assert "gate, up: c = ((mm, addmm_) - (2 mm)) / (reads of C) = 0.40" in lines
    assert "q, k, v: c = ((mm, 2 addmm_) - (3 mm)) / (reads of C) = 0.50" in lines
    assert "down: c = ((addmm_) - (mm)) / (reads of C) = 0.60" in lines
    assert "o: c = ((addmm_) - (mm)) / (reads of C) = 2.00" in lines
    assert [line.partition(",")[0] for line in lines[5:]] == [
        "Sums of gradients in the multiplications: worth building",
        "The block's output in the down multiplication: worth building",
        "x + attention in the o multiplication: not worth building",
    ]
    assert "because c = 0.47 of both" in lines[5]
    assert "saves 34.0 µs" in lines[6] and "saves 10.0 µs" in lines[7]


def test_decisions_turn_at_their_limits():
    (said,) = gemm_table.said(lines_of(**{"mm, addmm_": 410.0, "down mm + add": 326.0}))
    assert "multiplications: not worth building, because c = 0.67" in said
    assert "down multiplication: not worth building, because it saves 20.0" in said


def test_without_a_time_there_is_no_decision_on_it():
    (said,) = gemm_table.said(lines_of(**{"2 mm": None}))
    assert "Sums of gradients" not in said and "gate, up" not in said and "q, k, v" in said
    assert gemm_table.said(lines_of(**{"C copy": None})) == []


def test_table_shows_each_way_beside_the_first_of_its_site():
    lines = lines_of()
    assert read([to_json(line) for line in (RUN, *lines)]).gemms == lines
    assert merge([Record([RUN], gemms=lines)] * 2).gemms == lines
    rows = rows_of(report.render(Record([RUN], gemms=lines)))
    assert "gate, up mm, addmm_ 404.0 (1.0%) +4.0" in rows
    assert "down mm + add 340.0 (1.0%) +40.0" in rows
    assert "q, k, v cat of weights, 1 mm skipped -" in rows


def test_command_prints_the_same_from_its_record(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    wrong = replace(WAYS[5], run=lambda t: (t.h @ t.wd) * 2)
    monkeypatch.setattr(gemm, "WAYS", (*WAYS[:5], wrong, *WAYS[6:]))
    path = str(tmp_path / "run.jsonl")
    command = ["gemm", "--model", "OLMo 2 7B", "--rounds", "3", "--warm-up", "0", "--out", path]
    assert main(command) == 0
    out = capsys.readouterr().out
    with open(path) as file:
        run, *lines = map(json.loads, file)
    assert run["command"].endswith("--warm-up 0 --out run.jsonl")
    bad, *rest = lines
    assert (bad["site"], bad["way"], bad["status"]) == ("down", "mm", "wrong")
    assert "the result is wrong by 1 of its norm" in bad["error"] and bad["error"] in out
    assert len(rest) == len(WAYS) - 1
    assert {(line["status"], line["samples"]) for line in rest} == {("ok", 3)}
    assert main(["--from", path]) == 0
    assert capsys.readouterr().out == out


@pytest.mark.parametrize("options", [["--model", "ViT-L"], ["--rounds", "1"], ["--tokens", "0"]])
def test_bad_options_are_refused(options, capsys):
    with pytest.raises(SystemExit):
        gemm.main(options)
    assert options[0] in capsys.readouterr().err
