import math

import pytest
import torch

from bench import accuracy, report
from bench.__main__ import main
from bench.accuracy import INPUTS, difficult_inputs, error_in_ulps
from bench.cases import OPS
from bench.op import DTYPES, Case
from bench.record import Accuracy
from bench.report import worse
from tests.support.calls import slow

EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
BOTH = ["tilenorm", "torch"]


@pytest.mark.filterwarnings("ignore::tilenorm.ReferenceWarning")
def test_command_prints_a_table_and_writes_a_record(without_gpu, again):
    options = ["--op", "rms_norm", "add_layer_norm", "--dtype", "bfloat16", "--provider", *BOTH]
    found, printed, _ = again(["accuracy", *options, "--hidden", "48", "--rows", "8"])
    assert "bfloat16: largest error against float64, in ulps" in printed
    assert "torch's error on the same inputs and 4 ulps: nowhere" in printed
    assert report.CPU_NOTICE in printed
    assert len(found.accuracies) == 2 * len(INPUTS) * len(BOTH)
    assert not [line.error for line in found.accuracies if line.error]
    assert list(found.accuracies[0].ulps) == ["y", "dx", "dweight"]


def ulps(actual, true, dtype, of_rows=True):
    both = torch.tensor(actual, dtype=torch.float64), torch.tensor(true, dtype=torch.float64)
    return error_in_ulps(both[0].to(dtype), both[1], of_rows)


@EACH_DTYPE
def test_error_in_ulps(dtype):
    eps, largest = torch.finfo(dtype).eps, torch.finfo(dtype).max
    assert ulps([[1.0, 1.0], [1.0, 1.0 + eps]], [[1.0, 1.0], [1.0, 1.0]], dtype) == 1.0
    assert ulps([[1.0, 1.0]], [[1.0, 1.0 + eps]], dtype) == 1.0
    assert ulps([math.inf], [1.0], dtype) == ulps([math.nan], [1.0], dtype) == math.inf
    assert ulps([math.inf], [4.0 * largest], dtype) == 0.0  # the true value overflows too
    # Units are those of the largest value of a row, or of all values.
    off, true = [[4.0, 0.5], [0.25, eps / 4]], [[4.0, 0.5], [0.25, 0.0]]
    assert (ulps(off, true, dtype), ulps(off, true, dtype, False)) == (1.0, 1 / 16)
    assert ulps([[0.0, 0.0]], [[0.0, 0.0]], dtype) == 0.0


@EACH_DTYPE
def test_inputs_are_what_their_names_say(dtype):
    m, n, info = 64, 256, torch.finfo(dtype)
    name = str(dtype).removeprefix("torch.")

    def difficult(op: str, kind: str) -> list[torch.Tensor]:
        return [x.detach() for x in difficult_inputs(OPS[op], kind, Case(op, name, m, n), "cpu")]

    made = {kind: difficult("rms_norm", kind)[0] for kind in INPUTS}
    assert all(x.dtype == dtype and x.isfinite().all() for x in made.values())
    deviation = {k: x.double().std(1, correction=0).max() for k, x in made.items()}
    mean = {k: x.double().mean(1).abs().min() for k, x in made.items()}
    assert mean["large mean"] > 20 * deviation["large mean"]
    assert 0.9 < mean["tiny variance"] < 1.1
    assert deviation["tiny variance"] < 0.005
    subnormal = made["subnormal"].abs()
    assert 0 < subnormal.max() < info.tiny
    assert made["near overflow"].float().square().sum(1).isfinite().all()
    assert made["near overflow"].abs().max() > min(info.max / 8, 1e17)
    assert (made["one huge value"].abs() > 1000).sum() == m
    assert made["cancelling"].double().mean(1).abs().max() < 0.01 * deviation["cancelling"]
    assert (made["zero rows"] == 0).all(1).sum() == m // 2
    x, residual, _ = difficult("add_rms_norm", "cancelling")
    assert (x + residual).abs().max() < 0.01 * x.abs().max()
    op = OPS["head_rms_norm"]
    given = op.made(Case(op.name, name, m, n), "cpu")
    assert difficult(op.name, "normal")[0].stride() == given[0].stride()


def lines_of(ours: float, eager: float, inputs="normal") -> list[Accuracy]:
    where = {"op": "rms_norm", "dtype": "bfloat16", "m": 8, "n": 64, "inputs": inputs}
    errors = {"tilenorm": ours, "torch": eager}
    return [Accuracy(**where, provider=name, ulps={"y": e}) for name, e in errors.items()]


@pytest.mark.parametrize(
    "ours, eager, is_worse",
    [(8, 4, False), (8.1, 4, True), *slow((0.5, 0.1, False), (4, 1, False), (math.inf, 4, True))],
)
def test_what_is_worse_than_pytorch(monkeypatch, without_gpu, ours, eager, is_worse):
    lines = [*lines_of(ours, eager), *lines_of(0.5, 1e9, "other")]
    assert bool(worse(lines)) == is_worse
    monkeypatch.setattr(accuracy, "measure", lambda *_: lines)
    command = ["accuracy", "--op", "rms_norm", "--dtype", "bfloat16", "--provider", *BOTH]
    assert main(command) == is_worse  # the exit status
    assert main([*command, "--max-seconds", "-1"]) == 0
