"""The reference implementation: the formulas in plain PyTorch, for any device and dtype.

It serves what cuTile does not, and, being made of differentiable operations, gives derivatives of
any order. Computed in float32 or, where an input is float64, in that.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from ..launch.calls import Needs
from ..spec import NormSpec


class Forward(NamedTuple):
    """y, and the sum with the residual, contiguous in the input's shape; mean, rstd (rows,)."""

    y: Tensor
    sum: Tensor | None
    mean: Tensor | None
    rstd: Tensor


def forward(
    spec: NormSpec,
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Forward:
    dtype = _compute_dtype(x, residual)
    total = None
    if residual is not None:
        total = (x.to(dtype) + residual.to(dtype)).to(residual.dtype).contiguous()
    rows = _rows(x if total is None else total, spec, dtype)
    z = None if gate is None else _rows(gate, spec, dtype)
    x_hat, mean, rstd = _normalize(spec, rows, z, eps)
    y = _affine(spec, x_hat, weight, bias, x.dtype)
    if z is not None and not spec.gate_first:
        y = y * silu(z)
    return Forward(y.to(x.dtype).reshape(x.shape), total, mean, rstd)


def backward(
    spec: NormSpec,
    needs: Needs,
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    eps: float,
) -> tuple[Tensor | None, ...]:
    """Those of dx, dresidual, dgate, dW and dB that are needed, contiguous; x is the sum if any.

    Without rstd, as a differentiable function of x too.
    """
    dtype = _compute_dtype(dy, x)
    rows, g = _rows(x, spec, dtype), _rows(dy, spec, dtype)
    z = None if gate is None else _rows(gate, spec, dtype)
    if rstd is None:
        x_hat, mean, rstd = _normalize(spec, rows, z, eps)
    else:
        u = rows * silu(z) if spec.gate_first and z is not None else rows
        x_hat = (u if mean is None else u - mean[:, None]) * rstd[:, None]
    dx = dgate = dw = db = None
    if z is not None and not spec.gate_first:
        if needs.dgate:
            plain = _affine(spec, x_hat, weight, bias, dtype)
            dgate = (g * plain * _silu_slope(z)).to(gate.dtype).reshape(gate.shape)
        g = g * silu(z)
    if needs.dw:
        dw = _sum_rows(spec, g * x_hat).to(weight.dtype).reshape(weight.shape)
    if needs.db:
        db = _sum_rows(spec, g).to(bias.dtype).reshape(bias.shape)
    dresidual = None
    if needs.dx or needs.dresidual or (needs.dgate and spec.gate_first):
        if weight is not None:
            g = _by_heads(spec, g, weight.to(dtype) + spec.offset, torch.mul)
        dx = g - x_hat * (g * x_hat).mean(1, keepdim=True)
        if mean is not None:
            dx = dx - g.mean(1, keepdim=True)
        dx = dx * rstd[:, None]
        if z is not None and spec.gate_first:
            if needs.dgate:
                dgate = (dx * rows * _silu_slope(z)).to(gate.dtype).reshape(gate.shape)
            dx = dx * silu(z)
        if dsum is not None:
            dx = dx + _rows(dsum, spec, dtype)
        dresidual = dx.to(x.dtype).reshape(x.shape) if needs.dresidual else None
        dx = dx.to(dy.dtype).reshape(x.shape) if needs.dx else None
    return dx, dresidual, dgate, dw, db


def _normalize(
    spec: NormSpec, rows: Tensor, gate: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """x̂, mean and rstd."""
    if gate is not None and spec.gate_first:
        rows = rows * silu(gate)
    mean = None
    if spec.norm == "layer":
        mean = rows.mean(1)
        rows = rows - mean[:, None]
        left = rows.mean(1)  # what rounding left of the mean
        rows, mean = rows - left[:, None], mean + left
    rstd = torch.rsqrt(rows.square().mean(1) + eps)
    return rows * rstd[:, None], mean, rstd


def _affine(
    spec: NormSpec, x_hat: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """x̂ · (w + offset) + b; rounding early, what is of the output's dtype is in between."""
    compute, early = x_hat.dtype, spec.rounding == "early"
    y = x_hat.to(dtype).to(compute) if early else x_hat
    if weight is not None:
        y = _by_heads(spec, y, weight.to(compute) + spec.offset, torch.mul)
        if early and weight.dtype == dtype:
            y = y.to(dtype).to(compute)
    if bias is not None:
        y = _by_heads(spec, y, bias.to(compute), torch.add)
    return y


def _by_heads(spec: NormSpec, rows: Tensor, parameter: Tensor, function) -> Tensor:
    """function(rows, parameter), the rows of the parameter taking turns."""
    if not spec.heads:
        return function(rows, parameter.reshape(-1))
    tokens = rows.reshape(-1, spec.heads, spec.hidden)
    return function(tokens, parameter.reshape(spec.heads, spec.hidden)).reshape(rows.shape)


def _sum_rows(spec: NormSpec, rows: Tensor) -> Tensor:
    return (rows.reshape(-1, spec.heads * spec.hidden) if spec.heads else rows).sum(0)


def _silu_slope(z: Tensor) -> Tensor:
    s = torch.sigmoid(z)
    return s * (1 + z * (1 - s))


def _rows(x: Tensor, spec: NormSpec, dtype: torch.dtype) -> Tensor:
    """x as a contiguous matrix: PyTorch sums in another order along other strides."""
    hidden = spec.hidden
    return x.reshape(x.numel() // hidden if hidden else 0, hidden).contiguous().to(dtype)


def _compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    double = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if double else torch.float32
