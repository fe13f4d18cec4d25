import pytest
import torch

from bench.cases import DTYPES, OPS, SUITE_DIRECTIONS, SUITES, Case, select
from tilenorm.spec import NormSpec
from tilenorm.tools.explain import moved_bytes

every_op = pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)


@every_op
def test_bytes_are_what_the_mathematics_needs(op):
    """As tilenorm.explain counts them: tests/tools/test_explain.py has the numbers."""
    name = op.name.removeprefix("head_")
    parameters = dict.fromkeys(op.columns, "bfloat16")
    spec = NormSpec.of(name, 128, "bfloat16", heads=op.heads or 0, **parameters)
    found = tuple(op.bytes(direction, 64, 128, 2) for direction in ("forward", "backward"))
    assert found == moved_bytes(spec, 64)
    assert op.bytes("inference", 64, 128, 2) == found[0]


@every_op
def test_inputs_are_equal_at_every_call_and_differ_from_the_gradients(op):
    args = (64, 32, torch.bfloat16, "cpu")
    first, again, grads = op.inputs(*args), op.inputs(*args), op.output_grads(*args)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    row, column = op.shapes(64, 32)
    assert [t.shape for t in first] == [row] * len(op.rows) + [column] * len(op.columns)
    assert [t.shape for t in grads] == [row] * len(op.outputs)
    assert not torch.equal(first[0], grads[0])


def test_input_with_heads_is_a_slice_of_a_fused_projection():
    x, weight = OPS["head_rms_norm"].inputs(96, 16, torch.float32, "cpu")
    assert (x.shape, weight.shape) == ((3, 32, 16), (32, 16))
    assert x.stride() == (3 * 32 * 16, 16, 1)


@pytest.mark.parametrize("name", SUITES)
def test_suites_have_no_case_twice_whole_tokens_and_every_dtype(name):
    cases = SUITES[name]
    assert len(set(cases)) == len(cases)
    assert all(case.m % (OPS[case.op].heads or 1) == 0 for case in cases)
    if name not in SUITE_DIRECTIONS:
        assert {case.dtype for case in cases} == set(DTYPES)
    if name in ("quick", "full"):
        assert {case.op for case in cases} == set(OPS)
    if name == "full":
        assert all(64 * 2**20 - case.n < case.m * case.n <= 64 * 2**20 for case in cases)


def test_select_keeps_only_the_given_names_and_sizes():
    cases = select("full", ["layer_norm"], ["float16"], [7168, 1024])
    assert [(case.op, case.n) for case in cases] == [("layer_norm", 7168), ("layer_norm", 1024)]
    assert select("seeds", hidden=[7]) == []


@pytest.mark.parametrize(
    ("op", "m", "n", "elements", "rows"),
    [
        ("rms_norm", 4096, 1024, 1 << 18, 256),
        ("rms_norm", 512, 131072, 1024, 1),
        ("rms_norm", 2, 64, 1024, 2),
        ("head_rms_norm", 4096, 64, 100 * 64, 96),
        ("head_rms_norm", 4096, 64, 64, 32),
    ],
)
def test_shrunk_takes_fewer_rows_but_at_least_one(op, m, n, elements, rows):
    assert Case(op, "float32", m, n).shrunk(elements).m == rows
