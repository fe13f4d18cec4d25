import pytest
import torch

from bench.cases import LATENCY, OPS, RELEASE, ROTATION, SUITE_DIRECTIONS, SUITES
from bench.op import DTYPES, Case
from bench.quantized import SCALINGS, Quantized
from bench.rotated import ROTATED, Rotated
from tilenorm import table

every_op = pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
M, N, GROUPS = 2880, 128, 2  # whole tokens of all ops
# Rows, columns and groups that the passes read and write: forward, backward.
BY_HAND = {
    "rms_norm": ((2, 1, 0), (3, 2, 0)),
    "layer_norm": ((2, 2, 0), (3, 3, 0)),
    "add_rms_norm": ((4, 1, 0), (4, 2, 0)),
    "add_layer_norm": ((4, 2, 0), (4, 3, 0)),
    "rms_norm_add": ((3, 1, 0), (3, 2, 0)),
    "layer_norm_add": ((3, 2, 0), (3, 3, 0)),
    "gated_rms_norm": ((3, 1, 0), (5, 2, 0)),
    "gated_layer_norm": ((3, 2, 0), (5, 4, 0)),
    "head_rms_norm": ((2, 32, 0), (3, 64, 0)),
    "rms_norm_add_rms_norm": ((4, 2, 0), (6, 4, 0)),
    "layer_norm_add_layer_norm": ((4, 4, 0), (6, 6, 0)),
    "modulated_rms_norm": ((2, 0, 2), (3, 0, 3)),
    "modulated_layer_norm": ((2, 0, 2), (3, 0, 3)),
    "modulated_rms_norm gated": ((4, 0, 3), (6, 0, 5)),
    "modulated_layer_norm gated": ((4, 0, 3), (6, 0, 5)),
}


def case_of(op, m=M, n=N) -> Case:
    return Case(op.name, "bfloat16", m, n, GROUPS if op.axis else 1)


def row_of(name: str) -> str:
    """The op of the table that an op of the bench is."""
    return name.split()[0].removeprefix("head_")


def test_every_op_of_the_table_is_measured():
    assert {row_of(name) for name in OPS} == set(table.OPS)


@every_op
def test_bytes_are_what_the_mathematics_needs(op):
    case = case_of(op)
    moved = tuple(op.bytes(direction, case) for direction in ("forward", "backward"))
    assert op.bytes("inference", case) == moved[0]
    if isinstance(op, Rotated):  # the tables are read once, whatever the samples and heads
        tables = 2 * (M // op.unit // GROUPS) + 2
        assert moved == (2 * N * (2 * M + tables), 2 * N * (3 * M + tables + 2))
    elif isinstance(op, Quantized):  # codes have one byte, and scales are float32
        scales = 1 if op.scaling == "tensor" else M * N // (SCALINGS[op.scaling] or N)
        rows = 2 * (len(op.rows) + len(op.outputs) - 1) + 1
        assert moved[0] == M * N * rows + 4 * scales + 2 * N * len(op.columns)
    else:
        counts = BY_HAND[op.name]
        assert moved == tuple(2 * N * (r * M + c + g * GROUPS) for r, c, g in counts)


def test_inputs_of_a_model_are_slices_of_its_projections():
    x, weight = OPS["head_rms_norm"].made(Case("head_rms_norm", "float32", 96, 16), "cpu")
    assert (x.shape, weight.shape) == ((3, 32, 16), (32, 16))
    assert x.stride() == (3 * 32 * 16, 16, 1)
    op = OPS["modulated_layer_norm gated"]
    x, _, *by_group = op.made(case_of(op), "cpu")
    assert torch.equal(x, op.made(case_of(op), "cpu")[0])
    assert x.shape == (GROUPS, M // GROUPS, N)
    assert [p.stride() for p in by_group] == [(6 * N, 1)] * 3


def test_a_release_has_every_op_in_every_dtype_in_whole_tokens():
    cases = SUITES[RELEASE]
    assert {(c.op, c.dtype) for c in cases} == {(op, dtype) for op in OPS for dtype in DTYPES}
    assert len(set(cases)) == len(cases)
    assert all(case.m % (OPS[case.op].unit * case.groups) == 0 for case in cases)
    assert RELEASE not in SUITE_DIRECTIONS


def test_decode_steps_have_the_same_numbers_of_tokens_for_every_op():
    tokens: dict[tuple, set] = {}
    for case in SUITES[LATENCY]:
        count, rest = divmod(case.m, OPS[case.op].unit)
        assert not rest and case.groups == 1
        tokens.setdefault((case.op, case.n), set()).add(count)
    assert len(tokens) == 3 * 4 + 2
    assert all(counts == {1, 8, 32, 128, 512} for counts in tokens.values())


def test_every_number_of_heads_is_rotated_in_every_size():
    cases = SUITES[ROTATION]
    assert {(c.op, c.n) for c in cases} == {(op.name, n) for op in ROTATED for n in (64, 128, 256)}
    assert all(case.m // OPS[case.op].unit == 8192 for case in cases)
