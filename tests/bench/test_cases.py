import pytest
import torch

from bench.cases import DTYPES, OPS, SUITE_DIRECTIONS, SUITES, Case, select

every_op = pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)


def test_bytes_of_rms_norm_count_each_tensor_once():
    op = OPS["rms_norm"]
    x, w = 16 * 1024 * 2, 1024 * 2
    assert op.bytes("forward", 16, 1024, 2) == x + w + x
    assert op.bytes("backward", 16, 1024, 2) == x + x + w + x + w
    assert op.bytes("inference", 16, 1024, 2) == op.bytes("forward", 16, 1024, 2)


def test_bytes_of_per_head_weights_count_every_head():
    op = OPS["head_rms_norm"]
    x, w = 64 * 128 * 2, 32 * 128 * 2
    assert op.bytes("forward", 64, 128, 2) == x + w + x
    assert op.bytes("backward", 64, 128, 2) == x + x + w + x + w


@pytest.mark.parametrize(
    ("name", "backward"),
    [
        ("rms_norm", (3, 2)),
        ("layer_norm", (3, 3)),
        ("add_rms_norm", (4, 2)),  # the gradients of x and residual are one tensor
        ("add_layer_norm", (4, 3)),
        ("rms_norm_add", (3, 2)),  # the gradient of what is added is dy
        ("layer_norm_add", (3, 3)),
        ("gated_rms_norm", (5, 2)),
        ("gated_layer_norm", (5, 4)),
        ("head_rms_norm", (3, 2)),
    ],
)
def test_bytes_of_a_backward_are_what_the_mathematics_needs(name, backward):
    assert OPS[name].backward == backward


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
    op = OPS["head_rms_norm"]
    x, weight = op.inputs(96, 16, torch.float32, "cpu")
    assert (x.shape, weight.shape) == ((3, 32, 16), (32, 16))
    assert x.stride() == (3 * 32 * 16, 16, 1)


@every_op
def test_reference_agrees_with_eager(op):
    inputs = op.inputs(64, 32, torch.float64, "cpu")
    torch.testing.assert_close(op.reference(*inputs), op.eager(*inputs))


def test_suite_full_has_64_mi_elements_at_every_n():
    assert all(64 * 2**20 - case.n < case.m * case.n <= 64 * 2**20 for case in SUITES["full"])
    sizes = {op: {case.n for case in select("full", [op])} for op in OPS}
    powers = {2**k for k in range(8, 19)}
    assert sizes["rms_norm"] == powers | {1536, 3072, 5120, 7168, 12288, 20480, 49152}
    assert sizes["rms_norm"] == sizes["layer_norm"] == sizes["add_rms_norm"]
    assert sizes["gated_rms_norm"] == sizes["rms_norm_add"] == {128, 1024, 4096, 8192}
    assert sizes["head_rms_norm"] == {32, 64, 128, 256, 512}


def test_suite_latency_has_few_rows_at_the_widths_of_models():
    for op in ("rms_norm", "layer_norm", "add_rms_norm"):
        shapes = {(case.m, case.n) for case in select("latency", [op])}
        rows = {2**k for k in range(10)}
        assert shapes == {(m, n) for m in rows for n in (2048, 4096, 8192, 16384)}
    assert SUITE_DIRECTIONS["latency"] == ("inference",)


def test_suite_seeds_has_the_published_sweeps():
    assert {case.m for case in SUITES["seeds"]} == {4096}
    assert {case.n for case in select("seeds", ["rms_norm"])} == {1024, 2048, 4096, 8192, 16384}
    tutorial = select("seeds", ["layer_norm"])
    assert {case.dtype for case in tutorial} == {"float16"}
    assert [case.n for case in tutorial] == [512 * i for i in range(2, 32)]


@every_op
def test_suites_quick_and_full_have_every_op_with_whole_tokens(op):
    for suite in ("quick", "full"):
        cases = select(suite, [op.name])
        assert cases
        assert all(case.m % (op.heads or 1) == 0 for case in cases)


@pytest.mark.parametrize("name", SUITES)
def test_suites_have_no_case_twice_and_bandwidth_suites_have_every_dtype(name):
    assert len(set(SUITES[name])) == len(SUITES[name])
    if name not in SUITE_DIRECTIONS:
        assert {case.dtype for case in SUITES[name]} == set(DTYPES)


def test_select_keeps_only_the_given_names_and_sizes():
    cases = select("full", ["layer_norm"], ["float16"], [1024, 7168])
    assert [(case.dtype, case.n) for case in cases] == [("float16", 1024), ("float16", 7168)]
    assert {case.op for case in cases} == {"layer_norm"}
    assert select("seeds", hidden=[7]) == []


def test_shrunk_takes_fewer_rows_but_at_least_one():
    assert Case("rms_norm", "float32", 4096, 1024).shrunk(1 << 18).m == 256
    assert Case("rms_norm", "float32", 512, 131072).shrunk(1024).m == 1
    assert Case("rms_norm", "float32", 2, 64).shrunk(1024).m == 2
    assert Case("head_rms_norm", "float32", 4096, 64).shrunk(100 * 64).m == 96
    assert Case("head_rms_norm", "float32", 4096, 64).shrunk(64).m == 32
