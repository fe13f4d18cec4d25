"""assert_close: the error budget that every test of results uses.

The budget of an element is twice PyTorch's own error or "a few units", whichever is larger.

A kernel computes in float32 and rounds once at the end. "A few units" are therefore the sum of two
terms:

- One unit in the last place of the output's dtype. Rounding makes an error of half a unit, and up
  to a whole unit where the result crosses a power of two.
- FLOAT32_UNITS float32 units of the scale, or float64 units of a float64 result. The scale is the
  sum of the absolute values of the terms that add up to the result (see oracle.py).

The second term gives dW and dB a budget that grows with the row count M, as their error does. Let
the M products have random signs and the size s. After k additions the sum is about s √k, and the
next addition makes an error of half a float32 unit of it. The errors of all additions add up in
quadrature to about s M / √2 units, which is about one unit of the scale M s. The result itself is
only about s √M, so the error in units of the result grows as √M. Products of one sign stay within
the budget because of the kernels' order of addition: M / blocks products one after the other, and
then the blocks' sums as a tree.
"""

import torch
from torch import Tensor

from .oracle import Truth

FLOAT32_UNITS = 4
TIMES_TORCH = 2


def unit(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The unit in the last place of a dtype at each value, as float64."""
    info = torch.finfo(dtype)
    magnitude = value.abs().double().clamp(info.tiny, info.max)
    return torch.exp2(torch.floor(torch.log2(magnitude))) * info.eps


def assert_close(name: str, actual: Tensor, truth: Truth, own: Tensor) -> None:
    """Assert that each element of `actual` is within its budget; `own` is PyTorch's own result.

    NaN and infinities must be where they are in the truth rounded to the dtype, with equal signs.
    """
    dtype = actual.dtype
    assert actual.shape == truth.value.shape, f"{name}: {actual.shape}, not {truth.value.shape}"
    assert own.dtype == dtype, f"{name}: {dtype}, PyTorch gives {own.dtype}"
    rounded = truth.value.to(dtype)
    finite = rounded.isfinite()
    special = torch.where(finite, 0.0, rounded)
    actual_special = torch.where(actual.isfinite(), 0.0, actual)
    torch.testing.assert_close(
        actual_special,
        special,
        rtol=0,
        atol=0,
        equal_nan=True,
        msg=lambda m: f"{name}: NaN or inf: {m}",
    )
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    few = unit(truth.value, dtype) + FLOAT32_UNITS * unit(truth.scale, compute)
    # PyTorch's largest error is measured in units of the scale. In units of the result it would be
    # large at elements whose terms cancel, and would widen the budget of all other elements.
    scale_unit = unit(truth.scale, dtype)
    own_error = torch.where(finite & own.isfinite(), (own.double() - truth.value).abs(), 0.0)
    own_units = (own_error / scale_unit).max().item() if own_error.numel() else 0.0
    budget = few.maximum(TIMES_TORCH * own_units * scale_unit)
    excess = torch.where(finite, (actual.double() - truth.value).abs() / budget, 0.0)
    if excess.numel() and excess.max() > 1:
        worst = int(excess.argmax())
        at = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), excess.shape))
        raise AssertionError(
            f"{name} {dtype}: {int((excess > 1).sum())} of {excess.numel()} elements are outside"
            f" the budget; the worst, at {at}, is {actual.flatten()[worst].item():.9g}; the truth"
            f" is {truth.value.flatten()[worst].item():.9g}, the budget"
            f" {budget.flatten()[worst].item():.3g}, PyTorch's result"
            f" {own.flatten()[worst].item():.9g}"
        )
