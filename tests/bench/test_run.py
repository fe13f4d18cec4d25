"""The run on the CPU, with stand-ins for the providers."""

import pytest
import torch

from bench import providers
from bench.cases import OPS
from bench.command import Run
from bench.op import DIRECTIONS, Case
from bench.providers import Provider
from bench.record import Record
from bench.run import run
from tests.support.calls import slow
from tests.support.pretended import pretended_gpu

EAGER, ADD = OPS["rms_norm"].eager, OPS["add_rms_norm"].eager
CASE = Case("rms_norm", "float32", 64, 128)


def _in_place(x, weight):
    """RMSNorm whose backward overwrites the gradient that it is given, like Liger's."""
    x, given = x * 1, []
    y = EAGER(x, weight)
    y.register_hook(given.append)
    x.register_hook(lambda dx: given.pop().copy_(dx))
    return y


def _refuses(x, weight):
    raise ValueError("at most 64 columns")


def _fails(x, weight):
    raise OSError("no compiler")


def ran(case, names, directions) -> list:
    """The lines of a run of one case."""
    course = Run("cpu", {case.op: names}, found := Record(), found.add, lambda: False)
    run([case], course, directions)
    return found.lines


def measured(monkeypatch, loads, case=CASE, directions=("host", "forward", "backward")):
    """The results of one case for the given functions, by provider and direction."""
    named = {name: Provider(name, lambda op, f=f: f, on_cpu=True) for name, f in loads.items()}
    monkeypatch.setattr(providers, "PROVIDERS", named)
    monkeypatch.setattr("bench.run.PROVIDERS", named)
    monkeypatch.setattr("bench.host.PROVIDERS", named)
    return {
        (line.provider, getattr(line, "direction", "host")): line
        for line in ran(case, [*named], directions)
        if hasattr(line, "provider")
    }


def _loses_a_gradient(x, residual, weight):  # the sum is right, but its gradient is lost
    y, total = ADD(x, residual, weight)
    return y, total.detach() + 0 * total


@pytest.mark.parametrize(
    ("op", "function", "forward", "backward"),
    [
        ("rms_norm", lambda x, w: EAGER(x, w) * 1.0001, "y is off by", "dx is off by"),
        ("rms_norm", lambda x, w: EAGER(x, w + w.detach() - w), "", "dweight is off by"),
        ("add_rms_norm", _loses_a_gradient, "", "dresidual is off by"),
        ("add_rms_norm", lambda *inputs: ADD(*inputs)[::-1], "sum is off by", "dx is off by"),
        ("rms_norm", lambda x, w: EAGER(x.detach(), w.detach()), "", "has a forward only"),
    ],
)
def test_wrong_output_or_gradient_is_not_timed(monkeypatch, op, function, forward, backward):
    found = measured(monkeypatch, {"some": function}, Case(op, "float32", 64, 128))
    for direction, message in (("forward", forward), ("backward", backward)):
        cell = found["some", direction]
        assert message in cell.error
        assert (cell.status == "ok") == (cell.median_us is not None) == (not message)
    if backward == "has a forward only":
        assert found["some", "host"].forward_us > 0
        assert found["some", "host"].forward_backward_us is None


def test_refusals_and_failures_are_recorded_and_the_run_goes_on(monkeypatch):
    found = measured(monkeypatch, {"small": _refuses, "broken": _fails, "torch": EAGER})
    assert found["small", "forward"].status == "refused"
    assert found["small", "forward"].error == "ValueError: at most 64 columns"
    assert found["broken", "backward"].status == "failed"
    assert found["small", "host"].error == "ValueError: at most 64 columns"
    assert found["torch", "backward"].status == "ok"
    assert found["torch", "host"].forward_us > 0


def test_backward_in_place_spoils_neither_its_check_nor_the_next_provider(monkeypatch):
    found = measured(monkeypatch, {"in-place": _in_place, "torch": EAGER})
    assert found["in-place", "backward"].status == "ok"
    assert found["torch", "backward"].status == "ok"


def test_inference_runs_without_grad(monkeypatch):
    grads = []

    def seen(*inputs):
        grads.append(torch.is_grad_enabled())
        return EAGER(*inputs)

    measured(monkeypatch, {"torch": seen}, directions=("inference",))
    assert grads and not any(grads)


QUICK = ("modulated_layer_norm gated", "rms_norm_rope 16/8")  # other ropes have more heads alone
OTHERS = [name for name in OPS if name not in QUICK and "rope" not in name]


@pytest.mark.parametrize("name", [*QUICK, *slow(*OTHERS[::3])])
def test_the_kernels_serve_each_op_as_the_bench_calls_it(name):
    """By the interpreter of the kernels, with the right results in both directions."""
    op = OPS[name]
    groups = 2 if op.axis else 1
    case = Case(name, "bfloat16", max(2, op.unit) * groups, 128, groups)
    with pretended_gpu():
        _, *cells = ran(case, ["tilenorm"], DIRECTIONS)
    assert [(c.direction, c.status, c.error) for c in cells] == [
        (way, "ok", "") for way in DIRECTIONS if way in op.directions
    ]
