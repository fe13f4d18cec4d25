"""The error budget: twice PyTorch's own error, or a few units in the last place if that is larger.

A kernel computes in float32 and rounds once, so that "a few units" are one unit of the output's
dtype (half of one from rounding; a whole one where the result crosses a power of two) and
FLOAT32_UNITS units of float32 of the scale, the sum of the absolute values of the terms.

The latter is what scales dW and dB by the row count. Their error is that of adding up M products:
each addition errs by half a unit of the sum so far. Terms of random sign of size s leave sums of
s √k after k additions, whose errors add up in quadrature to s M units / √2, about the unit of the
scale M s, while the result is s √M: against the result the budget grows as √M, against the scale
it does not grow. It is the kernels' own order, M / blocks additions one after the other and then a
tree, that keeps terms of one sign within the budget too.
"""

import torch
from torch import Tensor

from .oracle import Truth

FLOAT32_UNITS = 4
TIMES_TORCH = 2


def unit(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between numbers of a dtype around each value, float64."""
    info = torch.finfo(dtype)
    magnitude = value.abs().double().clamp(info.tiny, info.max)
    return torch.exp2(torch.floor(torch.log2(magnitude))) * info.eps


def assert_close(name: str, actual: Tensor, truth: Truth, own: Tensor) -> None:
    """`actual` is within the budget of `truth` everywhere; `own` is what PyTorch computes.

    NaN and infinities must be where rounding the truth to the dtype puts them, with its sign.
    """
    dtype = actual.dtype
    assert actual.shape == truth.value.shape, f"{name}: {actual.shape}, not {truth.value.shape}"
    assert own.dtype == dtype, f"{name}: {dtype}, PyTorch gives {own.dtype}"
    rounded = truth.value.to(dtype)
    finite = rounded.isfinite()
    special = torch.where(finite, 0.0, rounded)
    found = torch.where(actual.isfinite(), 0.0, actual)
    torch.testing.assert_close(
        found, special, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{name}: NaN or inf: {m}"
    )
    few = unit(truth.value, dtype) + FLOAT32_UNITS * unit(truth.scale, torch.float32)
    # Where terms cancel PyTorch's error is many units of the result; taken in units of the scale it
    # does not widen the budget of the elements where they do not.
    scale_unit = unit(truth.scale, dtype)
    torchs = torch.where(finite & own.isfinite(), (own.double() - truth.value).abs(), 0.0)
    torchs = (torchs / scale_unit).max().item() if torchs.numel() else 0.0
    budget = few.maximum(TIMES_TORCH * torchs * scale_unit)
    excess = torch.where(finite, (actual.double() - truth.value).abs() / budget, 0.0)
    if excess.numel() and excess.max() > 1:
        worst = int(excess.argmax())
        at = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), excess.shape))
        raise AssertionError(
            f"{name} {dtype}: {int((excess > 1).sum())} of {excess.numel()} elements are outside"
            f" the budget; the worst, at {at}, is {actual.flatten()[worst].item():.9g}, should be"
            f" {truth.value.flatten()[worst].item():.9g}, may differ by"
            f" {budget.flatten()[worst].item():.3g}; PyTorch has"
            f" {own.flatten()[worst].item():.9g}"
        )
