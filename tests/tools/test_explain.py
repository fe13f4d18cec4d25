"""explain prints and returns what would serve a call, how, and why the others do not."""

import pytest
import torch

import tilenorm
from tests.ops.helpers import EACH_FORM, NEEDS_GPU, arguments_of, random, tensors_of
from tilenorm.launch import plan, user_table
from tilenorm.launch.config import RowForward
from tilenorm.launch.target import MULTIPROCESSORS
from tilenorm.launch.tuned.rules import POLLS
from tilenorm.ops import cutile, functional, reference
from tilenorm.spec import NormSpec
from tilenorm.tools.explain import explain_spec, planned_device

pytestmark = pytest.mark.usefixtures("no_memory")

X = torch.ones(6, 4096, dtype=torch.bfloat16)


def planned(hidden=4096, rows=8192, arch="sm_90", backend=None, op="rms_norm", **fields):
    spec = NormSpec.of(op, hidden, "bfloat16", **fields)
    return explain_spec(spec, rows, planned_device(arch), backend)


@EACH_FORM
def test_on_a_cpu_the_reference_serves(form, capsys, monkeypatch):
    for module, name in ((cutile, "bind_forward"), (reference, "forward")):
        monkeypatch.setattr(module, name, None)  # explaining runs nothing
    tensors = tensors_of(form, 6, 4096, dtype=torch.bfloat16)
    op = form.op
    found = tilenorm.explain(op, **arguments_of(tensors), normalized_shape=(4096,), **form.options)
    assert found.spec == spec_of_call(monkeypatch, form, tensors)
    assert found.chosen == "reference"
    assert found.refused == {"cutile": "the input is on cpu; cuTile runs on NVIDIA GPUs"}
    assert found.forward == found.backward == ()
    assert capsys.readouterr().out == f"{found}\n"
    assert f"{op} of 6 rows of 4096 bfloat16 on cpu (weight bfloat16, bias bfloat16" in str(found)
    assert "served by reference\n  refused by cutile: the input is on cpu" in str(found)


def spec_of_call(monkeypatch, form, tensors, **options) -> NormSpec:
    """The spec that a call of the function reaches an implementation with."""
    seen = []

    def forward(spec, tensors, *_):
        seen.append(spec)
        return tensors[0].clone(), None, None, None

    monkeypatch.setattr(reference, "forward", forward)
    arguments = {**arguments_of(tensors), "normalized_shape": tensors["input"].shape[-1:]}
    getattr(functional, form.op)(**arguments, **form.options, **options)
    return seen[0]


@EACH_FORM
@pytest.mark.parametrize("heads", [0, 1, 6])
def test_the_spec_is_that_of_a_call(form, heads, monkeypatch, capsys):
    shape = {"parameter_shape": (heads, 8)} if heads else {}
    tensors = tensors_of(form, 2, heads or 3, 8, other=torch.float16, **shape)
    options = {"offset": 0.5, "rounding": "early"}
    given = {**arguments_of(tensors), **form.options, **options}
    found = tilenorm.explain(form.op, **given, normalized_shape=(8,))
    assert found.spec == spec_of_call(monkeypatch, form, tensors, **options)
    assert found.rows == tensors["input"].numel() // 8


@EACH_FORM
@pytest.mark.parametrize("arch", MULTIPROCESSORS)
@pytest.mark.parametrize("hidden", [64, 4096, 131072])
def test_every_launch_is_told(form, arch, hidden):
    fields = {"gate_first": "norm_before_gate" in form.options}
    found = planned(hidden, arch=arch, op=form.op, weight="float32", bias="bfloat16", **fields)
    assert (found.chosen, found.refused) == ("cutile", {})
    assert [s.kernel for s in found.backward][-1] == "column_sum"
    text = str(found)
    for step in found.forward + found.backward:
        assert f"{step.kernel} grid {step.grid}" in text
        assert all(f"{k}={v}" in text for k, v in (step.hints | step.constants).items())
    last = found.forward[-1].constants
    assert last["N"] == hidden
    assert last["LAYER"] is ("layer" in form.op)


@pytest.mark.parametrize("arch, overlap", [("sm_80", False), ("sm_90", True)])
def test_rows_that_blocks_share_have_slots_to_empty(arch, overlap):
    found = planned(131072, arch=arch, weight="bfloat16")
    assert [s.kernel for s in found.forward] == ["clear_slots", "shared_forward"]
    assert [s.kernel for s in found.backward] == ["clear_slots", "norm_backward", "column_sum"]
    for clear, norm in (found.forward, found.backward[:2]):
        chunks, width = norm.constants["CHUNKS"], sum(norm.constants["WIDTHS"])
        assert chunks > 1 and chunks * width >= 131072
        assert norm.constants["POLLS"] == POLLS
        assert norm.grid[0] % chunks == 0
        assert clear.constants["OVERLAP"] is norm.constants["OVERLAP"] is overlap
        assert clear.grid[0] * clear.constants["TILE_ROWS"] >= found.rows
        assert clear.constants["TILE"] >= chunks


def test_whole_rows_do_not_poll():
    forward, backward = planned().forward, planned().backward
    assert [s.kernel for s in forward] == ["row_forward"]
    for step in (*forward, *backward):
        assert step.constants["CHUNKS"] == 1 and step.constants.get("POLLS", 0) == 0


MATRIX = 10 * 64 * 2  # a matrix of ten rows in 16 bits
VECTOR = 64 * 2
# Bytes of whole matrices and of parameters, which are read and written: forward, backward.
BYTES = {
    "rms_norm": ({}, 2 * MATRIX, 3 * MATRIX),
    "rms_norm, parameters": (
        {"weight": "float32", "bias": "bfloat16"},
        *(2 * MATRIX + 2 * VECTOR + VECTOR, 3 * MATRIX + 2 * VECTOR + 2 * VECTOR + VECTOR),
    ),
    "rms_norm, heads": (
        {"weight": "bfloat16", "heads": 5},
        *(2 * MATRIX + 5 * VECTOR, 3 * MATRIX + 2 * 5 * VECTOR),
    ),
    "layer_norm": ({}, 2 * MATRIX, 3 * MATRIX),
    # x, residual, sum, y; dy, dsum, sum, and one gradient for both
    "add_rms_norm": ({}, 4 * MATRIX, 4 * MATRIX),
    "add_layer_norm": ({"residual": "float32"}, (2 + 4) * MATRIX, (2 + 4 + 2) * MATRIX),
    "gated_rms_norm": ({}, 3 * MATRIX, 5 * MATRIX),
    "add_rms_norm, two residuals": ({"addend": "bfloat16"}, 5 * MATRIX, 4 * MATRIX),
    # The residual's gradient is that of the output.
    "rms_norm_add": ({}, 3 * MATRIX, 3 * MATRIX),
    "layer_norm_add": ({"skip": "float32"}, (1 + 2 + 2) * MATRIX, (1 + 2 + 1) * MATRIX),
    "gated_layer_norm": ({}, 3 * MATRIX, 5 * MATRIX),
}


@pytest.mark.parametrize("op", BYTES)
def test_bytes_are_what_the_mathematics_moves(op):
    fields, forward, backward = BYTES[op]
    found = planned(64, 10, op=op.partition(",")[0], **fields)
    assert (found.forward_bytes, found.backward_bytes) == (forward, backward)
    assert f"forward: {forward:,} bytes" in str(found)


def test_several_terms_of_dy():
    found = explain_spec(NormSpec("rms", 64, "bfloat16"), 10, planned_device("sm_90"), terms=3)
    assert found.backward_bytes == 5 * MATRIX and found.forward_bytes == 2 * MATRIX
    assert "offset 0, 3 terms of dy)" in str(found)
    assert found.backward_source.startswith("tuned/sm_90, ")


TUNED = "tuned/sm_90"


@pytest.mark.parametrize(
    "fields, forward, backward",
    [
        ({}, TUNED, TUNED),
        ({"arch": "sm_100"}, "heuristic, untimed", "heuristic, untimed"),
        ({"backend": "reference"}, None, None),
        (
            {"op": "add_rms_norm", "addend": "bfloat16"},
            *(f"{TUNED}, timed with one residual", TUNED),
        ),
        ({"op": "rms_norm_add"}, f"{TUNED}, timed as add_rms_norm", TUNED),
        ({"op": "gated_layer_norm"}, *[f"{TUNED}, timed with RMSNorm"] * 2),
    ],
    ids=str,
)
def test_where_configurations_come_from(fields, forward, backward, tables):
    found = planned(weight="bfloat16", **fields)
    assert (found.forward_source, found.backward_source) == (forward, backward)
    if backward:
        assert f"backward: {found.backward_bytes:,} bytes, configuration: {backward}" in str(found)


def test_a_configuration_comes_from_a_users_table(tables):
    key = user_table.Key("forward", "rms_norm", 2, 4096, True, False)
    measured = user_table.Entry(key, RowForward(4), 1.0, 0.0, 1, 1.0, 16, "", {}, {}, "", "", "")
    path = user_table.path_of("sm_90")
    user_table.write(path, "sm_90", [measured])
    plan.plan_forward.cache_clear()
    found = planned(weight="bfloat16")
    assert found.forward_source == f"user table {path}"
    assert found.forward[0].constants["ROWS"] == 4
    assert found.backward_source == TUNED


def test_no_parameters_no_column_sum_and_no_rows_no_launch():
    assert [s.kernel for s in planned().backward] == ["norm_backward"]
    found = planned(rows=0)
    assert (found.chosen, found.forward, found.backward) == ("cutile", (), ())


@pytest.mark.parametrize(
    "backend, chosen, refused",
    [
        ("reference", "reference", {"cutile": "backend 'reference' was asked for"}),
        ("triton", None, {"triton": "asked for, but there is no such backend"}),
    ],
)
def test_a_backend_asked_for(backend, chosen, refused):
    found = planned(backend=backend)
    assert (found.chosen, found.forward, found.refused) == (chosen, (), refused)


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


def test_an_op_that_does_not_exist():
    with pytest.raises(ValueError, match=r"'op' takes one of rms_norm.*, got 'softmax'"):
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
