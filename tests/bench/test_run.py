"""The run and the command line, on the CPU, with stand-ins for the providers."""

import json

import pytest
import torch

from bench import providers, report
from bench.__main__ import main
from bench.cases import OPS, Case
from bench.providers import Provider
from bench.run import repeatable_call, run

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


def measured(monkeypatch, loads, case=CASE, directions=("forward", "backward"), **options):
    """The results of one case for the given functions, by provider and direction."""
    named = {name: Provider(name, lambda op, f=f: f, on_cpu=True) for name, f in loads.items()}
    monkeypatch.setattr(providers, "PROVIDERS", named)
    monkeypatch.setattr("bench.run.PROVIDERS", named)
    lines = []
    run([case], {case.op: list(named)}, directions, "cpu", lines.append, budget_s=0.0, **options)
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


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_eager_is_right_and_timed_in_every_op(monkeypatch, op, dtype):
    found = measured(monkeypatch, {"torch": op.eager}, Case(op.name, dtype, 96, 128))
    assert {found["torch", way].status for way in ("forward", "backward")} == {"ok"}
    assert found["torch", "host"].forward_backward_us > 0


def test_every_output_and_its_gradient_count(monkeypatch):
    eager = OPS["add_rms_norm"].eager

    def dropped(x, residual, weight):  # the sum is right, but no gradient comes by it
        y, total = eager(x, residual, weight)
        return y, total.detach() + 0 * total

    loads = {"dropped": dropped, "swapped": lambda *inputs: eager(*inputs)[::-1]}
    found = measured(monkeypatch, loads, Case("add_rms_norm", "float32", 64, 128))
    assert found["dropped", "forward"].status == "ok"
    assert found["dropped", "backward"].error.startswith("dx is off by ")
    assert "dresidual is off by " in found["dropped", "backward"].error
    assert found["swapped", "forward"].error.startswith("y is off by ")
    assert "sum is off by " in found["swapped", "forward"].error


def test_one_buffer_for_two_equal_gradients_is_right(monkeypatch):
    class Shared(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, residual, weight):
            y, total = OPS["add_rms_norm"].eager(x, residual, weight)
            ctx.save_for_backward(total, weight)
            return y, total

        @staticmethod
        def backward(ctx, dy, dtotal):
            leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            with torch.enable_grad():
                dx, dw = torch.autograd.grad(EAGER(*leaves), leaves, dy)
            dx += dtotal
            return dx, dx, dw

    case = Case("add_rms_norm", "float32", 64, 128)
    assert (
        measured(monkeypatch, {"shared": Shared.apply}, case)["shared", "backward"].status == "ok"
    )


def test_a_slice_of_a_fused_projection_is_read_in_place_both_ways():
    op = OPS["head_rms_norm"]
    inputs = op.inputs(96, 16, torch.float32, "cpu")
    seen = []

    class Strides(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            seen.append(x.stride())
            ctx.save_for_backward(x)
            return x * weight

        @staticmethod
        def backward(ctx, dy):
            seen.append(ctx.saved_tensors[0].stride())
            return dy, dy.sum(0)

    repeatable_call(
        Strides.apply, inputs, op.output_grads(96, 16, torch.float32, "cpu"), "backward"
    )()
    assert seen == [inputs[0].stride()] * 2


def test_a_provider_with_a_forward_only_is_timed_forward_and_refused_backward(monkeypatch):
    found = measured(monkeypatch, {"half": lambda x, w: EAGER(x.detach(), w.detach())})
    assert found["half", "forward"].status == "ok"
    assert found["half", "backward"].status == "refused"
    assert found["half", "backward"].error == "NotImplementedError: has a forward only"
    assert found["half", "host"].forward_us > 0
    assert found["half", "host"].forward_backward_us is None
    assert found["half", "host"].error == "NotImplementedError: has a forward only"


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


RMS_NORM = ("--op", "rms_norm", "--dtype", "bfloat16")


def test_command_line_on_the_cpu_and_again_from_its_record(tiny, tmp_path, capsys):
    path = str(tmp_path / "new" / "run.jsonl")
    main([*RMS_NORM, "--hidden", "1024", "4096", "--out", path])
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


def test_every_op_of_a_suite_has_its_tables_and_a_shape_is_copied_once(tiny, tmp_path, capsys):
    path = str(tmp_path / "run.jsonl")
    main(["--suite", "full", "--dtype", "bfloat16", "--hidden", "128", "512", "--out", path])
    out = capsys.readouterr().out
    titles = [line.split(":")[0] for line in out.splitlines() if "% of a copy" in line]
    ops = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "gated_rms_norm")
    assert titles == [
        f"{op} {direction}, bfloat16"
        for op in (*ops, "head_rms_norm")
        for direction in ("forward", "backward")
    ]
    assert all(status not in out for status in ("wrong", "failed", "refused"))
    with open(path) as file:
        lines = [json.loads(line) for line in file]
    copies = [(line["m"], line["n"]) for line in lines if line["record"] == "copy"]
    assert len(copies) == len(set(copies))


def test_a_provider_without_an_op_is_absent_from_that_op_alone(tiny, monkeypatch, capsys):
    some = Provider("some", lambda op: {"rms_norm": EAGER}.get(op.name), on_cpu=True)
    broken = Provider("broken", lambda op: 1 / 0, on_cpu=True)
    named = {provider.name: provider for provider in (some, broken)}
    for module in ("bench.__main__", "bench.run"):
        monkeypatch.setattr(f"{module}.PROVIDERS", named)
    main(["--suite", "full", "--dtype", "bfloat16", "--hidden", "512"])
    out = capsys.readouterr().out
    lacks = ("layer_norm", "add_rms_norm", "add_layer_norm", "head_rms_norm")
    assert f"absent: some ({'; '.join(f'has no {op}' for op in lacks)})" in out
    assert "absent: broken (ZeroDivisionError: division by zero)" in out
    assert "rms_norm forward, bfloat16" in out
    assert "layer_norm forward" not in out


def test_records_made_op_by_op_are_printed_as_one(tiny, tmp_path, capsys):
    paths = [str(tmp_path / f"{op}.jsonl") for op in ("add_layer_norm", "gated_rms_norm")]
    for path in paths:
        main(["--op", path.rsplit("/", 1)[1].removesuffix(".jsonl"), "--out", path])
    capsys.readouterr()
    main(["--from", *paths])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("tilenorm 0.0 ") for line in lines) == 2
    assert "add_layer_norm forward, bfloat16: GB/s (% of a copy)" in lines
    assert "gated_rms_norm backward, bfloat16: GB/s (% of a copy)" in lines
    assert sum(line.startswith("Bytes: ") for line in lines) == 1


def test_a_record_is_narrowed_as_a_run_is(tiny, tmp_path, capsys):
    path = str(tmp_path / "run.jsonl")
    main([*RMS_NORM, "--hidden", "1024", "4096", "--out", path])
    capsys.readouterr()
    main(["--from", path, "--hidden", "4096", "--direction", "forward", "--provider", "torch"])
    out = capsys.readouterr().out
    assert "backward, bfloat16" not in out
    assert "\n1024" not in out.replace(" ", "")
    assert "tilenorm" not in [line.split()[0] for line in out.splitlines()[2:] if line.strip()]


def test_a_size_outside_the_suite_is_refused_with_those_inside(tiny):
    with pytest.raises(SystemExit, match=r"rms_norm \[1024, 4096, 16384\]; "):
        main(["--hidden", "1024", "77"])
