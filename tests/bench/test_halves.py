"""The backward in two halves: what is counted is what runs."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from bench import check
from bench.__main__ import main
from bench.cases import HALVES, OPS, Case
from bench.halves import launches
from bench.providers import PROVIDERS
from bench.run import repeatable_call
from tests.cases import target
from tests.ops.pretended import pretended_gpu
from tilenorm.launch.calls import BackwardArrays
from tilenorm.ops import cutile

RECORD = Path(__file__).parents[2] / "bench" / "results" / "half-passes.md"
ROWS = ("x", "dy", "gate", "dsum", "dx", "dresidual", "dgate")


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("direction", ["backward", *HALVES])
def test_launches_and_tensors_are_those_that_are_counted(op, direction):
    case = Case(op.name, "bfloat16", 2 * (op.heads or 4), 16)
    shape = case.m, case.n, torch.bfloat16, "cpu"
    inputs, grads = op.inputs(*shape), op.output_grads(*shape)
    with pretended_gpu():
        provider = PROVIDERS["tilenorm"].load(op)
        call = repeatable_call(provider, inputs, grads, direction, op.gradients(direction))
        made, launch = [], cutile.launch
        with patch.object(cutile, "launch", lambda *given: (made.append(given), launch(*given))):
            found = call()
    ((_, launched, arrays),) = made
    assert len(launched) == launches(case, direction, target("sm_90"))
    named = BackwardArrays(*arrays)._asdict()
    named["dy"] = named["dy"][0]
    rows = sum(isinstance(named[name], torch.Tensor) for name in ROWS)
    whole = (op.backward, *op.halves)[["backward", *HALVES].index(direction)]
    assert rows == whole.rows
    expected = check.oracle(op, inputs, grads)[direction]
    assert len(found) == len(expected) == len(check.names(op, direction))
    assert [g.shape for g in found] == [g.shape for g in expected]


@pytest.mark.parametrize(
    ("name", "inputs", "parameters"),
    [
        ("rms_norm", (3, 1), (2, 1)),  # x, dy, weight -> dx; x, dy -> dweight
        ("layer_norm", (3, 1), (2, 2)),
        ("add_rms_norm", (4, 1), (2, 1)),  # sum, dy, dsum, weight -> dx; sum, dy -> dweight
        ("add_layer_norm", (4, 1), (2, 2)),
        ("rms_norm_add", (3, 1), (2, 1)),
        ("layer_norm_add", (3, 1), (2, 2)),
        ("gated_rms_norm", (5, 1), (3, 1)),
        ("gated_layer_norm", (5, 2), (3, 2)),
        ("head_rms_norm", (3, 1), (2, 1)),
    ],
)
def test_bytes_of_halves_are_what_the_mathematics_needs(name, inputs, parameters):
    assert OPS[name].halves == (inputs, parameters)


def test_the_record_is_what_the_command_prints(capsys):
    assert main(["halves", "--markdown"]) == 0
    assert RECORD.read_text().endswith(capsys.readouterr().out)


def test_halves_are_checked_and_shown_in_gbps(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked = ["--op", "layer_norm", "--provider", "torch", "tilenorm", "--direction", *HALVES]
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert [shown.count(f"layer_norm {half}, float16: GB/s") for half in HALVES] == [1, 1]
    assert "wrong" not in shown
