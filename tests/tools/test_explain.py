"""explain prints and returns what would serve a call, how, and why the others do not."""

from random import Random

import pytest
import torch

import tilenorm
from tests.support.calls import (
    EACH_FORM,
    FAMILY,
    NEEDS_GPU,
    arguments_of,
    random,
    spec_of,
    tensors_of,
)
from tests.support.drawn import heads_of
from tests.support.quantized import arguments
from tests.support.wrong_calls import right_of
from tilenorm.launch.target import MULTIPROCESSORS
from tilenorm.ops.passes import cutile, reference
from tilenorm.spec import NormSpec, Quantization
from tilenorm.table import MODULATED_NORMS, OPS
from tilenorm.tools.explain import explain_spec, planned_device

pytestmark = pytest.mark.usefixtures("no_memory")

X = torch.ones(6, 4096, dtype=torch.bfloat16)
BLOCK = Quantization("block", layout="column")
WITH_Y, SWIZZLED = BLOCK._replace(output=True), Quantization("mx", layout="swizzled")


def planned(hidden=4096, rows=8192, arch="sm_90", backend=None, terms=1, op="rms_norm", **fields):
    spec = NormSpec.of(op, hidden, "bfloat16", **fields)
    return explain_spec(spec, rows, planned_device(arch), backend, terms)


# What is told of an op beside the dtypes of its rows and parameters, and the kernels that differ.
TOLD = {
    "gated_rms_norm": "gate float32 after the norm, activation silu)",
    "layer_norm_add": "residual float32 after the norm)",
    "rms_norm_quantized": "row scales float8_e4m3fn layout row)",
    "modulated_rms_norm": "modulation scale float32 shift float32 gate float32)",
    "rms_norm_rope": "8 of 8 elements rotated by halves, tables float32 of 8, key weight float32)",
}
BACKWARD = {op: ["group_backward", "column_sum", "group_sum"] for op in MODULATED_NORMS}
BACKWARD |= {"rms_norm_rope": ["rope_backward", "column_sum"]}


@pytest.mark.parametrize("op", OPS)
def test_every_op(op, capsys, monkeypatch):
    """On a CPU the reference serves and nothing runs; on a GPU, every launch is told."""
    with monkeypatch.context() as patched:
        for module in (cutile, reference):
            patched.setattr(module, "bind_forward", None)
        found = tilenorm.explain(op, **right_of(op))
    printed = capsys.readouterr().out
    if OPS[op].calls:
        assert (found.before.spec.skip, found.after.spec.weight) == ("float32", "float32")
        assert f"in two calls: {found.refused}" in printed
        return
    assert printed == f"{found}\n"
    assert (found.chosen, found.rows) == ("reference", 48 if OPS[op].rotated else 12)
    assert found.refused == {"cutile": "the input is on cpu; cuTile runs on NVIDIA GPUs"}
    assert found.forward == found.backward == () and found.spec.op == op
    assert f"{op} of {found.rows} rows of 8 float32 on cpu (weight float32, b" in str(found)
    assert "served by reference\n  refused by cutile: the input is on cpu" in str(found)
    assert TOLD.get(op, "") in str(found)
    on_a_gpu = explain_spec(found.spec, found.rows, planned_device("sm_90"))
    kernels = [] if OPS[op].quantized else BACKWARD.get(op, ["norm_backward", "column_sum"])
    assert [step.kernel for step in on_a_gpu.backward] == kernels


def test_the_options_of_a_call():
    form = FAMILY["gated_rms_norm, gate first"]
    tensors = tensors_of(form, 2, 6, 8, other=torch.float16, parameter_shape=(6, 8))
    options = {"offset": 0.5, "rounding": "early"}
    given = {**arguments_of(tensors), **form.options, **options}
    found = tilenorm.explain(form.op, **given, normalized_shape=(8,))
    assert found.spec == spec_of(form, tensors, **options)


@pytest.mark.parametrize("output", [False, True])
def test_a_quantised_norm(output):
    how = BLOCK._replace(output=output)
    found = tilenorm.explain("add_rms_norm_quantized", X, X, (4096,), X[0], **arguments(how))
    fields = {"weight": "bfloat16", "quantized": how}
    assert found.spec == NormSpec.of("add_rms_norm_quantized", 4096, "bfloat16", **fields)
    assert (found.chosen, found.forward) == ("reference", ())
    found = planned(op="add_rms_norm_quantized", **fields)
    assert [step.kernel for step in found.forward] == ["row_forward"]
    assert bool(found.backward) == output == (found.backward_source is not None)


@EACH_FORM
@pytest.mark.parametrize("hidden", [64, 4096, 131072])
def test_every_launch_is_told(form, hidden):
    arch = Random(f"{form} {hidden}").choice([*MULTIPROCESSORS])
    fields = {"gate_first": "norm_before_gate" in form.options}
    found = planned(hidden, arch=arch, op=form.op, weight="float32", bias="bfloat16", **fields)
    assert (found.chosen, found.refused) == ("cutile", {})
    assert [s.kernel for s in found.backward][-1] == "column_sum"
    text = str(found)
    for step in found.forward + found.backward:
        shares = step.constants.get("CHUNKS", 1) > 1
        assert bool(step.constants.get("POLLS")) == shares
        assert f"{step.kernel} grid {step.grid}" in text
        assert all(f"{k}={v}" in text for k, v in (step.hints | step.constants).items())
    last = found.forward[-1].constants
    assert (last["N"], last["LAYER"]) == (hidden, "layer" in form.op)
    assert (last["CHUNKS"] > 1) == (hidden == 131072) == (found.forward[0].kernel == "clear_slots")


MATRIX, VECTOR, ROWS = 10 * 1024 * 2, 1024 * 2, 10  # bytes in 16 bits
HEADS = {"weight": "bfloat16", "heads": 5}
BOTH = {"weight": "float32", "bias": "bfloat16"}
# An op with fields, and the bytes of its tensors, which are read and written: forward, backward.
BYTES = [
    ("rms_norm", BOTH, 2 * MATRIX + 3 * VECTOR, 3 * MATRIX + 5 * VECTOR),
    ("rms_norm", HEADS, 2 * MATRIX + 5 * VECTOR, 3 * MATRIX + 10 * VECTOR),
    # x, residual, sum, y; dy, dsum, sum, and one gradient for both
    ("add_rms_norm", {}, 4 * MATRIX, 4 * MATRIX),
    ("add_layer_norm", {"residual": "float32"}, 6 * MATRIX, 8 * MATRIX),
    ("add_rms_norm", {"addend": "bfloat16"}, 5 * MATRIX, 4 * MATRIX),
    # The residual's gradient is that of the output.
    ("rms_norm_add", {}, 3 * MATRIX, 3 * MATRIX),
    ("gated_layer_norm", {}, 3 * MATRIX, 5 * MATRIX),
    ("rms_norm", {"terms": 3}, 2 * MATRIX, 5 * MATRIX),
    ("rms_norm", {"quantized": Quantization("row")}, MATRIX * 3 // 2 + ROWS * 4, 0),
    ("rms_norm", {"quantized": SWIZZLED}, MATRIX * 3 // 2 + ROWS * 32, 0),
    ("rms_norm", {"quantized": WITH_Y}, MATRIX * 5 // 2 + ROWS * 8 * 4, 3 * MATRIX),
]


@pytest.mark.parametrize("op, fields, forward, backward", BYTES, ids=str)
def test_bytes_are_what_the_mathematics_moves(op, fields, forward, backward):
    found = planned(1024, 10, op=op, **fields)
    assert (found.forward_bytes, found.backward_bytes) == (forward, backward)
    assert f"forward: {forward:,} bytes" in str(found)
    assert (", 3 terms of dy)" in str(found)) == ("terms" in fields)


TUNED = "tuned/sm_90"


SOURCES = [
    ({}, TUNED, TUNED),
    ({"arch": "sm_100"}, "heuristic, untimed", "heuristic, untimed"),
    ({"backend": "reference"}, None, None),
    ({"op": "add_rms_norm", "addend": "bfloat16"}, f"{TUNED}, timed with one residual", TUNED),
    ({"op": "rms_norm_add"}, f"{TUNED}, timed as add_rms_norm", TUNED),
    ({"op": "gated_layer_norm"}, *[f"{TUNED}, timed as gated_rms_norm"] * 2),
    (
        {"op": "modulated_rms_norm", "mod_scale": "bfloat16"},
        *(f"{TUNED}, timed without modulation", "heuristic, untimed"),
    ),
]


@pytest.mark.parametrize("fields, forward, backward", SOURCES, ids=str)
def test_where_configurations_come_from(fields, forward, backward, tables):
    found = planned(weight="bfloat16", **fields)
    assert (found.forward_source, found.backward_source) == (forward, backward)
    if backward:
        assert f"backward: {found.backward_bytes:,} bytes, configuration: {backward}" in str(found)


def test_the_bytes_of_rotated_heads():
    """Queries, keys and what they become; weights; tables of 5 rows; positions of 10 tokens."""
    given = heads_of((2, 5), (4, 2), 16, 8, torch.bfloat16) | {"positions": torch.arange(5)}
    found = tilenorm.explain("rms_norm_rope", given.pop("input"), (16,), **given)
    assert found.forward_bytes == 2 * 2 * 60 * 16 + 2 * 2 * 16 + 2 * 2 * 5 * 8 + 10 * 8


def test_no_parameters_no_column_sum_and_no_rows_no_launch():
    assert [s.kernel for s in planned().backward] == ["norm_backward"]
    found = planned(rows=0)
    assert (found.chosen, found.forward, found.backward) == ("cutile", (), ())


def test_a_backend_asked_for():
    found, none = planned(backend="reference"), planned(backend="triton")
    assert (found.chosen, none.chosen) == ("reference", None) and found.forward == ()
    assert found.refused == {"cutile": "backend 'reference' was asked for"}
    assert none.refused == {"triton": "asked for, but there is no such backend"}


@pytest.mark.parametrize("backend", ["cutile", None])
def test_a_backend_that_would_raise(backend, monkeypatch):
    if backend is None:
        monkeypatch.setenv("TILENORM_BACKEND", "cutile")
    found = tilenorm.explain("rms_norm", X, (4096,), backend=backend)
    assert found.chosen is None
    assert found.refused["cutile"].startswith("asked for, but the input is on cpu")
    assert "served by nothing: the call raises" in str(found)


@NEEDS_GPU
def test_a_tensor_on_a_gpu():
    x = random(5, 100, device="cuda")
    found = tilenorm.explain("rms_norm", x, (100,), offset=1.0)
    properties = torch.cuda.get_device_properties(0)
    assert found.device.target.arch == f"sm_{properties.major}{properties.minor}"
    assert found.device.target.multiprocessors == properties.multi_processor_count
    assert (found.chosen, found.rows, found.spec.offset) == ("cutile", 5, 1.0)
    assert found.forward and found.backward
