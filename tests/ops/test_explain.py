"""explain prints and returns what would serve a call, how, and why the others do not."""

import pytest
import torch

import tilenorm
from tilenorm.launch.target import MULTIPROCESSORS
from tilenorm.ops import cutile, reference
from tilenorm.ops.explain import OPS, explain_spec, planned_device
from tilenorm.spec import NormSpec

from .helpers import NEEDS_GPU, random

pytestmark = pytest.mark.usefixtures("no_memory")

X, W = torch.ones(6, 4096, dtype=torch.bfloat16), torch.ones(4096, dtype=torch.bfloat16)


def planned(hidden=4096, rows=8192, arch="sm_90", backend=None, **parameters):
    spec = NormSpec("rms", hidden, "bfloat16", **parameters)
    return explain_spec("rms_norm", spec, rows, planned_device(arch), backend)


@pytest.mark.parametrize("op", OPS)
def test_on_a_cpu_the_reference_serves(op, capsys, monkeypatch):
    for module, name in ((cutile, "forward"), (reference, "rms_norm")):
        monkeypatch.setattr(module, name, None)  # explaining runs nothing
    found = tilenorm.explain(op, X, (4096,), W)
    assert found.chosen == "reference"
    assert found.refused == {"cutile": "the input is on cpu; cuTile runs on NVIDIA GPUs"}
    assert found.forward == found.backward == ()
    assert capsys.readouterr().out == f"{found}\n"
    assert f"{op} of 6 rows of 4096 bfloat16 on cpu (weight bfloat16, bias None" in str(found)
    assert "served by reference\n  refused by cutile: the input is on cpu" in str(found)


@pytest.mark.parametrize("arch", MULTIPROCESSORS)
@pytest.mark.parametrize("hidden", [64, 4096, 16384, 131072])
def test_every_launch_is_told(arch, hidden):
    found = planned(hidden, arch=arch, weight="float32", bias="bfloat16")
    assert (found.chosen, found.refused) == ("cutile", {})
    assert [s.kernel for s in found.backward][-1] == "column_sum"
    text = str(found)
    for step in found.forward + found.backward:
        assert f"{step.kernel} grid {step.grid}" in text
        assert all(f"{k}={v}" in text for k, v in (step.hints | step.constants).items())
    for step in found.forward:
        assert step.constants["N"] == hidden
    assert found.forward[-1].constants["WEIGHT"] is found.forward[-1].constants["BIAS"] is True


def test_bytes_are_what_the_mathematics_moves():
    matrix, vector = 10 * 64 * 2, 64
    found = planned(64, 10, weight="float32", bias="bfloat16")
    assert found.forward_bytes == 2 * matrix + 4 * vector + 2 * vector
    assert found.backward_bytes == 3 * matrix + 4 * vector + 4 * vector + 2 * vector
    assert planned(64, 10).backward_bytes == 3 * matrix
    assert f"forward: {found.forward_bytes:,} bytes" in str(found)


def test_no_parameters_no_column_sum():
    assert [s.kernel for s in planned().backward] == ["norm_backward"]


def test_no_rows_no_launch():
    found = planned(rows=0)
    assert (found.chosen, found.forward, found.backward) == ("cutile", (), ())


def test_a_backend_asked_for():
    found = planned(backend="reference")
    assert (found.chosen, found.forward) == ("reference", ())
    assert found.refused == {"cutile": "backend 'reference' was asked for"}


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_a_backend_that_would_raise(how, monkeypatch):
    if how == "environment":
        monkeypatch.setenv("TILENORM_BACKEND", "cutile")
    found = tilenorm.explain(
        "rms_norm", X, (4096,), backend="cutile" if how == "argument" else None
    )
    assert found.chosen is None
    assert found.refused["cutile"].startswith("asked for, but the input is on cpu")
    assert "served by nothing: the call raises" in str(found)


def test_a_backend_that_does_not_exist():
    found = planned(backend="triton")
    assert found.chosen is None
    assert found.refused == {"triton": "asked for, but there is no such backend"}


def test_an_op_that_does_not_exist():
    with pytest.raises(ValueError, match="op: got 'softmax', takes one of rms_norm"):
        tilenorm.explain("softmax", X, (4096,))


@NEEDS_GPU
def test_a_tensor_on_a_gpu():
    x = random(5, 100, device="cuda")
    found = tilenorm.explain("rms_norm", x, (100,), offset=1.0)
    properties = torch.cuda.get_device_properties(0)
    assert found.device.target.arch == f"sm_{properties.major}{properties.minor}"
    assert found.device.target.multiprocessors == properties.multi_processor_count
    assert (found.chosen, found.rows, found.spec.offset) == ("cutile", 5, 1.0)
    assert found.forward and found.backward
