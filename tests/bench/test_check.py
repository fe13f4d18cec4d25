import math

import pytest
import torch

from bench import check
from bench.cases import OPS
from bench.op import Case


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_oracle_equals_float64_autograd_for_any_chunk_size(op, monkeypatch):
    groups = 2 if op.axis else 1
    each = op.unit * groups
    case = Case(op.name, "bfloat16", 7 * each, 128, groups)
    inputs, grads = op.made(case, "cpu"), op.output_grads(case, "cpu")
    leaves = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    outputs = check.as_tuple(op.reference(*leaves))
    # Two rows or tokens in each chunk, and one in the last chunk.
    monkeypatch.setattr(check, "_CHUNK", 2 * 128 * each)
    found = check.oracle(op, case, inputs, grads)
    torch.testing.assert_close(found["forward"], [y.detach() for y in outputs])
    if op.trained:
        leaves, dy = [x for x in leaves if x.requires_grad], [dy.double() for dy in grads]
        expected = torch.autograd.grad(outputs, leaves, dy)
        torch.testing.assert_close(found["backward"], list(expected))


def test_error_is_in_ulps_of_value_plus_rms_and_infinite_where_not_finite(monkeypatch):
    expected = torch.ones(5, dtype=torch.float64)  # rms 1
    monkeypatch.setattr(check, "_CHUNK", 2)
    actual = torch.ones(5)
    actual[2] += 6 * torch.finfo(torch.float32).eps
    assert check.error(actual, expected) == pytest.approx(3.0)
    for bad in (math.nan, math.inf, -math.inf):
        actual[4] = bad
        assert check.error(actual, expected) == math.inf
    assert check.error(torch.ones(5, 1), expected) == math.inf


@pytest.mark.parametrize(("dtype", "sums"), [("bfloat16", 12.0), ("float32", 512.0)])
def test_budget_is_a_floor_a_multiple_of_eager_or_grows_with_rows(dtype, sums):
    case = Case("rms_norm", dtype, 1 << 18, 8)
    found = check.budgets(OPS["rms_norm"], case, "backward", [0.5, 3.0])
    assert found == [check.FLOOR_ULPS, sums]
    case, op = Case("", "float32", 1 << 19, 8, 2), OPS["modulated_rms_norm"]
    assert check.budgets(op, case, "backward", [0.5, 0.5, 3.0]) == [check.FLOOR_ULPS, 512.0, 512.0]
