"""column_sum, which adds up the partial sums of dW and dB."""

import pytest
import torch

from tests.oracle import Truth
from tests.tolerance import assert_close
from tilenorm.kernels.column_sum import column_sum
from tilenorm.launch.calls import Launch

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


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 131, 264])
@pytest.mark.parametrize("hidden", [1, 16, 37])
@pytest.mark.parametrize("dtypes", [(F,), (B,), (torch.float16,), (B, F)], ids=str)
def test_one_sum_and_two_sums(executor, hidden, count, dtypes):
    generator = torch.Generator().manual_seed(count)
    partials = torch.randn(count * len(dtypes), hidden, generator=generator).to(executor.device)
    outs = summed(executor, partials, count, dtypes)
    for out, part in zip(outs, partials.split(count), strict=True):
        truth = Truth(part.double().sum(0), part.double().abs().sum(0))
        assert_close("sum", out, truth, part.sum(0).to(out.dtype))
