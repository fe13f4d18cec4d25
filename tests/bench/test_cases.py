import pytest
import torch

from bench.cases import DTYPES, OPS, SUITES, Case, select


def test_bytes_of_rms_norm_count_each_tensor_once():
    op = OPS["rms_norm"]
    x, w = 16 * 1024 * 2, 1024 * 2
    assert op.bytes("forward", 16, 1024, 2) == x + w + x
    assert op.bytes("backward", 16, 1024, 2) == x + x + w + x + w


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_traffic_is_no_less_than_inputs_and_outputs(op):
    assert op.forward.rows == len(op.rows) + len(op.outputs)
    assert op.forward.columns == len(op.columns)
    assert op.backward.rows >= 2 * len(op.outputs) + len(op.rows) - 1
    assert op.backward.columns >= len(op.columns)


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_inputs_are_the_same_at_every_call_and_differ_from_the_gradients(op):
    args = (8, 32, torch.bfloat16, "cpu")
    first, again, grads = op.inputs(*args), op.inputs(*args), op.output_grads(*args)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert [t.shape for t in first] == [(8, 32)] * len(op.rows) + [(32,)] * len(op.columns)
    assert not torch.equal(first[0], grads[0])


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_reference_agrees_with_eager(op):
    inputs = op.inputs(8, 32, torch.float64, "cpu")
    torch.testing.assert_close(op.reference(*inputs), op.eager(*inputs))


def test_suite_full_has_64_mi_elements_and_the_sizes_that_are_no_powers_of_two():
    assert all(64 * 2**20 - case.n < case.m * case.n <= 64 * 2**20 for case in SUITES["full"])
    sizes = {case.n for case in SUITES["full"]}
    assert {256, 1536, 3072, 5120, 7168, 12288, 131072} <= sizes


def test_suite_seeds_is_the_published_sweep():
    assert {case.m for case in SUITES["seeds"]} == {4096}
    assert {case.n for case in SUITES["seeds"]} == {1024, 2048, 4096, 8192, 16384}


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_shows_every_dtype_once(name):
    assert {case.dtype for case in SUITES[name]} == set(DTYPES)
    assert len(set(SUITES[name])) == len(SUITES[name])


def test_select_narrows():
    cases = select("full", dtypes=["float16"], hidden=[1024, 7168])
    assert [(case.dtype, case.n) for case in cases] == [("float16", 1024), ("float16", 7168)]
    assert select("seeds", hidden=[7]) == []


def test_shrunk_takes_fewer_rows_and_never_none():
    assert Case("rms_norm", "float32", 4096, 1024).shrunk(1 << 18).m == 256
    assert Case("rms_norm", "float32", 512, 131072).shrunk(1024).m == 1
    assert Case("rms_norm", "float32", 2, 64).shrunk(1024).m == 2
