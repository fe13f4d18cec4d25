"""The five functions of a piece in plain PyTorch, for any device and dtype.

x and the tensors like it hold `hidden` columns of each row, which is the spec's. `whole` is the
length of a whole row. What has a number a row is (rows,), or (rows, n) for n numbers.
"""

import torch
from torch import Tensor

from ...launch.calls import Needs
from ...spec import NormSpec
from .. import reference
from ..reference import Given, statistics_dtype


def row_sums(
    spec: NormSpec, given: Given, count: int, whole: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(part, own, sum) of input, residual and gate. count: how many rows there are.

    part (rows,): the piece's part of the mean of squares, or, for LayerNorm, of the mean. own
    (rows, 3), for LayerNorm: the piece's mean as the sum of two numbers, and Σ (x − mean)² of it.
    """
    x, residual, gate = given["x"], given["residual"], given["gate"]
    dtype, total = statistics_dtype(x, residual), reference.sum_of(x, residual)
    rows = _gated(spec, x if total is None else total, gate, dtype, count)
    if spec.norm != "layer":
        return rows.square().sum(1) / whole, None, total
    columns = spec.hidden or 1  # of nothing, the moments are zeros
    mean = rows.sum(1) / columns
    rows = rows - mean[:, None]
    rest = rows.sum(1) / columns  # rounding left this much of the mean in the rows
    squares = (rows - rest[:, None]).square().sum(1)
    part = (mean + rest) * (spec.hidden / whole)
    return part, torch.stack((mean, rest, squares), 1), total


def row_center(spec: NormSpec, mean: Tensor, own: Tensor, whole: int) -> Tensor:
    """(rows, 2): the piece's parts of the means of x − mean and of (x − mean)².

    mean: of whole rows. own: what row_sums returned.
    """
    apart = (own[:, 0] - mean) + own[:, 1]
    total = apart * spec.hidden
    return torch.stack((total, own[:, 2] + total * apart), 1) / whole


def row_apply(
    spec: NormSpec, given: Given, whole: Tensor, centered: Tensor | None, eps: float, save: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(y, mean, rstd) of input, gate, weight and bias; input is the sum if there is one.

    whole, centered: what row_sums and row_center returned, added up over the pieces. y has the
    spec's dtype.
    """
    x, gate, weight, bias = (given[role] for role in ("x", "gate", "weight", "bias"))
    dtype, count = whole.dtype, whole.numel()
    rows = _gated(spec, x, gate if spec.gate_first else None, dtype, count)
    mean = None
    if spec.norm == "layer":
        correction, square = centered.unbind(1)
        rows = (rows - whole[:, None]) - correction[:, None]
        mean, variance = whole + correction, square - correction.square()
    else:
        variance = whole
    rstd = torch.rsqrt(variance + eps)
    to = getattr(torch, spec.dtype)
    y = reference.affine(spec, rows * rstd[:, None], weight, bias, to)
    if gate is not None and not spec.gate_first:
        y = y * reference.act(spec, _rows(spec, gate, dtype, count))
    return y.to(to).reshape(x.shape), mean, rstd


def grad_sums(spec: NormSpec, dy: Tensor, saved: Given, whole: int) -> Tensor:
    """The piece's parts of the means of g · x̂ and, for LayerNorm, of g: (rows, 1) or (rows, 2)."""
    x, gate, weight = (saved[role] for role in ("x", "gate", "weight"))
    mean, rstd = saved["mean"], saved["rstd"]
    dtype, count = statistics_dtype(dy, x), rstd.numel()
    rows = _gated(spec, x, gate if spec.gate_first else None, dtype, count)
    x_hat = (rows if mean is None else rows - mean[:, None]) * rstd[:, None]
    g = _rows(spec, dy, dtype, count)
    if gate is not None and not spec.gate_first:
        g = g * reference.act(spec, _rows(spec, gate, dtype, count))
    g = reference.weigh(spec, g, weight)
    sums = [(g * x_hat).sum(1)] + ([] if mean is None else [g.sum(1)])
    return torch.stack(sums, 1) / whole


def grad_apply(
    spec: NormSpec, needs: Needs, dy: Tensor, dsum: Tensor | None, saved: Given, dots: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients that are needed, in the order of Needs.gradients. dots: what grad_sums
    returned, added up.
    """
    if not spec.hidden:
        likes = dy, *(saved[role] for role in ("x", "gate", "weight", "bias"))
        grads = zip(needs.gradients, likes, strict=True)
        return tuple(torch.zeros_like(like) if need else None for need, like in grads)
    return reference.backward(spec, needs, dy, dsum, saved, dots=dots)


def _gated(
    spec: NormSpec, x: Tensor, gate: Tensor | None, dtype: torch.dtype, count: int
) -> Tensor:
    """The rows that are normalised: x, times the gate's activation if there is a gate."""
    rows = _rows(spec, x, dtype, count)
    return rows if gate is None else rows * reference.act(spec, _rows(spec, gate, dtype, count))


def _rows(spec: NormSpec, x: Tensor, dtype: torch.dtype, count: int) -> Tensor:
    """x as a matrix of `count` rows, which may have no columns."""
    return x.reshape(count, spec.hidden).contiguous().to(dtype)
