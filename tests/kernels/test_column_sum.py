"""column_sum, which adds up the partial sums of dW and dB."""

import pytest
import torch

from tests.executors import Inputs
from tests.oracle import Truth
from tests.tolerance import assert_close
from tilenorm.kernels.column_sum import column_sum
from tilenorm.launch.calls import Launch, Needs, bound
from tilenorm.launch.plan import plan_backward
from tilenorm.ops import cutile
from tilenorm.spec import NormSpec

B, F = torch.bfloat16, torch.float32


def summed(executor, partials, count, dtypes, tile_rows=32, tile=16):
    """The kernel's outputs, one for each dtype. Unwritten elements are NaN."""
    hidden = partials.shape[1]
    make = {"device": executor.device}
    outs = [torch.full((hidden,), torch.nan, dtype=dtype, **make) for dtype in dtypes]
    grid = (-(-hidden // tile), len(outs))
    launch = Launch(column_sum, grid, (), tuple, (count, tile_rows, tile, False))
    executor.run()([launch], (partials, *outs), partials.get_device())
    return outs


def check(outs, partials) -> None:
    for out, part in zip(outs, partials.split(len(partials) // len(outs)), strict=True):
        truth = Truth(part.double().sum(0), part.double().abs().sum(0))
        assert_close("sum", out, truth, part.sum(0).to(out.dtype))


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 131, 264])
@pytest.mark.parametrize("hidden", [1, 16, 37])
@pytest.mark.parametrize("dtypes", [(F,), (B,), (torch.float16,), (B, F)], ids=str)
def test_one_sum_and_two_sums(executor, hidden, count, dtypes):
    generator = torch.Generator().manual_seed(count)
    partials = torch.randn(count * len(dtypes), hidden, generator=generator).to(executor.device)
    check(summed(executor, partials, count, dtypes), partials)


def test_sums_of_powers_of_two_are_exact(executor):
    # A row that is left out or added twice changes the sum of distinct powers of two.
    count = 20
    partials = torch.exp2(torch.arange(count))[:, None].expand(count, 37).contiguous()
    [out] = summed(executor, partials.to(executor.device), count, [torch.float32])
    assert (out == 2**count - 1).all()


@pytest.mark.parametrize("hidden", [24, 37, 4104])
@pytest.mark.parametrize("rows", [1, 29])
def test_sums_the_partial_sums_of_the_backward_pass(executor, hidden, rows):
    spec = NormSpec("rms", hidden, "bfloat16", "float32", "float32")
    inputs = Inputs.random(spec, rows, executor.device)
    launched = []

    def run(launches, arrays, index):
        executor.run()(launches, arrays, index)
        launched.extend(bound(launches, arrays))

    plan = plan_backward(spec, executor.target, Needs(True, True, True))
    saved = (inputs.x, None, inputs.weight, inputs.bias, *inputs.stats(spec))
    *_, dw, db = cutile.backward(plan, inputs.dy, None, saved, run=run)
    partials, *_ = launched[-1].arguments[0]
    count = plan.blocks(rows)
    assert partials.shape == (2 * count, hidden)
    check((dw, db), partials)
