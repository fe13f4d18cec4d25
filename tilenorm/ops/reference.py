"""The reference implementation: the formulas in plain PyTorch, for any device and dtype.

It serves what cuTile does not, is what the tests compare with in float64, and, being made of
differentiable operations, gives derivatives of any order.
"""

import torch
from torch import Tensor


def rms_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, hidden: int, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """y, contiguous, in x's shape and dtype, and rstd (rows,).

    Computed in float32 or, for float64, in that.
    """
    dtype = _compute_dtype(x)
    rows = _rows(x, hidden, dtype)
    rstd = _rstd(rows, eps)
    y = rows * rstd[:, None]
    if weight is not None:
        y = y * (weight.reshape(-1).to(dtype) + offset)
    if bias is not None:
        y = y + bias.reshape(-1).to(dtype)
    return y.to(x.dtype).reshape(x.shape), rstd


def rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rstd: Tensor | None,
    hidden: int,
    eps: float,
    offset: float,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Those of dx, dW, dB that are needed, contiguous.

    Without rstd, as a differentiable function of x too.
    """
    dtype = _compute_dtype(x)
    rows = _rows(x, hidden, dtype)
    g = _rows(dy, hidden, dtype)
    rstd = _rstd(rows, eps) if rstd is None else rstd
    x_hat = rows * rstd[:, None]
    dx = dw = db = None
    if needs[1]:
        dw = (g * x_hat).sum(0).to(weight.dtype).reshape(weight.shape)
    if needs[2]:
        db = g.sum(0).to(bias.dtype).reshape(bias.shape)
    if needs[0]:
        if weight is not None:
            g = g * (weight.reshape(-1).to(dtype) + offset)
        mean = (g * x_hat).mean(1, keepdim=True)
        dx = ((g - x_hat * mean) * rstd[:, None]).to(x.dtype).reshape(x.shape)
    return dx, dw, db


def _rows(x: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
    """x as a contiguous matrix: PyTorch sums in another order along other strides."""
    return x.reshape(x.numel() // hidden if hidden else 0, hidden).contiguous().to(dtype)


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _rstd(rows: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(rows.square().mean(1) + eps)
