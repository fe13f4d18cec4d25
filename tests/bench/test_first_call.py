import json
import os

import pytest
import torch

from bench import first_call, worker
from bench.__main__ import main
from bench.cases import OPS, Case
from bench.providers import Provider
from tilenorm.spec import NormSpec
from tilenorm.tools import lines

CASE = vars(Case("rms_norm", "float32", 8, 16))


def test_cold_and_warm_calls_run_in_two_processes_with_one_cache(monkeypatch, tmp_path, capsys):
    folders = []

    def run(function, timeout_s, places, **arguments):
        folders.append(os.path.dirname(places["TRITON_CACHE_DIR"]))
        return function(**arguments)

    monkeypatch.setattr(worker, "run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(first_call, "ROWS", 8)
    path = str(tmp_path / "run.jsonl")
    options = ["--hidden", "16", "--dtype", "float32", "--provider", "torch", "quack"]
    assert main(["first-call", *options, "--out", path]) == 0
    out = capsys.readouterr().out
    assert len(folders) == 2
    assert len(set(folders)) == 1
    assert "absent: quack (needs a GPU)" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["N", "dtype", "direction", "torch"] in rows
    found = [row[:3] for row in rows if len(row) > 3 and row[2] in ("forward", "backward")]
    specs = (["512", "float16"], ["16", "float32"])
    assert found == [[*spec, way] for spec in specs for way in ("forward", "backward")]
    with open(path) as file:
        lines = [json.loads(line) for line in file][1:]
    assert {line["record"] for line in lines} == {"firstcall"}
    assert all(line["cold_s"] > 0 and line["warm_s"] > 0 for line in lines)
    assert main(["--from", path]) == 0
    assert capsys.readouterr().out == out


def test_failure_is_shown_for_its_direction_alone(monkeypatch):
    def forward_only(op):
        return lambda x, w: op.eager(x.detach(), w.detach())

    named = {"half": Provider("half", forward_only, on_cpu=True)}
    monkeypatch.setattr(first_call, "PROVIDERS", named)
    forward, backward = first_call.measure([CASE], "half", "cpu")
    assert forward["seconds"] > 0
    assert not forward["error"]
    assert backward["seconds"] is None
    assert backward["error"] == "NotImplementedError: has a forward only"


def test_failed_process_is_one_line(monkeypatch):
    def run(*arguments, **options):
        raise worker.WorkerError("not done after 1 s")

    monkeypatch.setattr(worker, "run", run)
    (line,) = first_call._first_calls([Case(**CASE), Case(**CASE)], "torch", "cpu")
    assert (line.provider, line.cold_s, line.error) == ("torch", None, "not done after 1 s")


@pytest.mark.parametrize("op", [op for op in OPS if op != "head_rms_norm"])
def test_precompile_compiles_the_specs_that_are_called(monkeypatch, op):
    specs = []
    monkeypatch.setattr(worker, "run", lambda function, timeout_s, arguments: function(arguments))
    monkeypatch.setattr(
        lines, "precompile", lambda all, *rest: specs.extend(all) or [[] for _ in all]
    )
    found = first_call.precompile(op, [64, 128], ["float32"], "sm_90")
    assert found.seconds > 0
    parameters = {"weight": "float32", "bias": "float32" if "bias" in OPS[op].columns else None}
    assert specs == [NormSpec.of(op, n, "float32", **parameters) for n in (64, 128)]
