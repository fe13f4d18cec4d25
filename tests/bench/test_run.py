"""The run and the command line, on the CPU, with stand-ins for the providers."""

import json

import pytest
import torch

from bench import providers, report
from bench.__main__ import main
from bench.cases import OPS, Case
from bench.providers import Provider
from bench.run import run

EAGER = OPS["rms_norm"].eager
CASE = Case("rms_norm", "float32", 64, 128)


class _InPlace(torch.autograd.Function):
    """RMSNorm whose backward writes dx over the gradient that it is given, as Liger's does."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return EAGER(x, weight)

    @staticmethod
    def backward(ctx, dy):
        leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            dx, dw = torch.autograd.grad(EAGER(*leaves), leaves, dy)
        return dy.copy_(dx), dw


def _refuses(x, weight):
    raise ValueError("at most 64 columns")


def _fails(x, weight):
    raise OSError("no compiler")


def measured(monkeypatch, loads, directions=("forward", "backward"), **options):
    """The results of one case for the given functions, by provider and direction."""
    named = {name: Provider(name, lambda op, f=f: f, on_cpu=True) for name, f in loads.items()}
    monkeypatch.setattr(providers, "PROVIDERS", named)
    monkeypatch.setattr("bench.run.PROVIDERS", named)
    lines = []
    run([CASE], list(named), directions, "cpu", lines.append, budget_s=0.0, **options)
    return {
        (line.provider, getattr(line, "direction", "host")): line
        for line in lines
        if hasattr(line, "provider")
    }


def test_a_wrong_output_is_not_timed(monkeypatch):
    found = measured(monkeypatch, {"late": lambda x, w: EAGER(x, w) * 1.0001})
    for direction, output in (("forward", "y"), ("backward", "dx")):
        cell = found["late", direction]
        assert (cell.status, cell.median_us) == ("wrong", None)
        assert cell.error.startswith(f"{output} is off by ")


def test_a_wrong_weight_gradient_alone_is_found(monkeypatch):
    found = measured(monkeypatch, {"half": lambda x, w: EAGER(x, w + w.detach() - w)})
    assert found["half", "forward"].status == "ok"
    assert found["half", "backward"].error.startswith("dweight is off by ")


def test_refusals_and_failures_are_results_and_do_not_end_the_run(monkeypatch):
    found = measured(monkeypatch, {"small": _refuses, "broken": _fails, "torch": EAGER})
    assert found["small", "forward"].status == "refused"
    assert found["small", "forward"].error == "ValueError: at most 64 columns"
    assert found["broken", "backward"].status == "failed"
    assert found["small", "host"].error == "ValueError: at most 64 columns"
    assert found["torch", "backward"].status == "ok"
    assert found["torch", "host"].forward_us > 0


def test_a_backward_in_place_spoils_neither_its_check_nor_the_next_provider(monkeypatch):
    found = measured(monkeypatch, {"in-place": _InPlace.apply, "torch": EAGER})
    assert found["in-place", "backward"].status == "ok"
    assert found["torch", "backward"].status == "ok"


def test_out_of_time_is_said_of_every_cell_left(monkeypatch):
    found = measured(monkeypatch, {"torch": EAGER}, max_seconds=0.0)
    assert found["torch", "backward"].status == "skipped"
    assert {line.error for line in found.values()} == {"out of time"}


@pytest.fixture
def tiny(monkeypatch, stand_in):
    monkeypatch.setattr("bench.__main__.CPU_ELEMENTS", 4096)
    monkeypatch.setattr("bench.__main__.CPU_BUDGET_S", 0.0)


def test_command_line_on_the_cpu_and_again_from_its_record(tiny, tmp_path, capsys):
    path = str(tmp_path / "new" / "run.jsonl")
    main(["--hidden", "1024", "4096", "--dtype", "bfloat16", "--out", path])
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == out.splitlines()[-1] == report.CPU_NOTICE
    assert "absent: compile (needs a GPU)" in out
    assert err.count("\n") == 1 + 2 + 2 * 2 * 2  # notice, host times, N x provider x direction
    with open(path) as file:
        kinds = [json.loads(line)["record"] for line in file]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "run": 1,
        "host": 2,
        "copy": 2,
        "cell": 8,
    }
    main(["--from", path])
    assert capsys.readouterr().out == out


def test_a_record_is_narrowed_as_a_run_is(tiny, tmp_path, capsys):
    path = str(tmp_path / "run.jsonl")
    main(["--hidden", "1024", "4096", "--dtype", "bfloat16", "--out", path])
    capsys.readouterr()
    main(["--from", path, "--hidden", "4096", "--direction", "forward", "--provider", "torch"])
    out = capsys.readouterr().out
    assert "backward, bfloat16" not in out
    assert "\n1024" not in out.replace(" ", "")
    assert "tilenorm" not in [line.split()[0] for line in out.splitlines()[2:] if line.strip()]


def test_a_size_outside_the_suite_is_refused_with_those_inside(tiny):
    with pytest.raises(SystemExit, match=r"its N are \[1024, 4096, 8192, 16384\]"):
        main(["--hidden", "1024", "77"])
