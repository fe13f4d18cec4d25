"""The five functions of a piece in plain PyTorch, for any device and dtype.

Each takes the spec, whose `hidden` is the number of columns of the piece, and the op's arguments by
role: x and the tensors like it hold those columns of each row. `rows` is how many rows there are,
and `hidden` the length of a whole row. What has a number a row is (rows,), or (rows, n) for n
numbers. Each returns the op's results in order, None for one that is absent.
"""

from typing import Any

import torch
from torch import Tensor

from ....spec import NormSpec
from .. import reference
from ..reference import statistics_dtype

Given = dict[str, Any]
Made = tuple[Tensor | None, ...]


def row_sums(spec: NormSpec, given: Given) -> Made:
    """(part, own, sum).

    part (rows,): the piece's part of the mean of squares, or, for LayerNorm, of the mean. own
    (rows, 3), for LayerNorm: the piece's mean as the sum of two numbers, and Σ (x − mean)² of it.
    """
    x, residual = given["x"], given["residual"]
    total, whole = reference.sum_of(x, residual), given["hidden"]
    rows = _rows(spec, given, x if total is None else total, statistics_dtype(x, residual))
    rows = _gated(spec, given, rows)
    if spec.norm != "layer":
        return rows.square().sum(1) / whole, None, total
    columns = spec.hidden or 1  # of nothing, the moments are zeros
    mean = rows.sum(1) / columns
    rows = rows - mean[:, None]
    rest = rows.sum(1) / columns  # rounding left this much of the mean in the rows
    squares = (rows - rest[:, None]).square().sum(1)
    part = (mean + rest) * (spec.hidden / whole)
    return part, torch.stack((mean, rest, squares), 1), total


def row_center(spec: NormSpec, given: Given) -> Made:
    """(rows, 2): the piece's parts of the means of x − mean and of (x − mean)².

    mean: of whole rows. own: what row_sums returned.
    """
    own = given["own"]
    apart = (own[:, 0] - given["mean"]) + own[:, 1]
    total = apart * spec.hidden
    return (torch.stack((total, own[:, 2] + total * apart), 1) / given["hidden"],)


def row_apply(spec: NormSpec, given: Given) -> Made:
    """(y, mean, rstd); x is the sum if there is one.

    whole, centered: what row_sums and row_center returned, added up over the pieces. y has the
    spec's dtype.
    """
    x, whole = given["x"], given["whole"]
    rows, mean, variance = _gated(spec, given, _rows(spec, given, x, whole.dtype)), None, whole
    if spec.norm == "layer":
        correction, square = given["centered"].unbind(1)
        rows = (rows - whole[:, None]) - correction[:, None]
        mean, variance = whole + correction, square - correction.square()
    rstd = torch.rsqrt(variance + given["eps"])
    to = getattr(torch, spec.dtype)
    y = reference.affine(spec, rows * rstd[:, None], given["weight"], given["bias"], to)
    return _gated(spec, given, y, first=False).to(to).reshape(x.shape), mean, rstd


def grad_sums(spec: NormSpec, given: Given) -> Made:
    """The piece's parts of the means of g · x̂ and, for LayerNorm, of g: (rows, 1) or (rows, 2)."""
    x, dy, mean = given["x"], given["dy"], given["mean"]
    rows, g = (_rows(spec, given, t, statistics_dtype(dy, x)) for t in (x, dy))
    rows = _gated(spec, given, rows)
    x_hat = (rows if mean is None else rows - mean[:, None]) * given["rstd"][:, None]
    g = reference.weigh(spec, _gated(spec, given, g, first=False), given["weight"])
    sums = [(g * x_hat).sum(1)] + ([] if mean is None else [g.sum(1)])
    return (torch.stack(sums, 1) / given["hidden"],)


def grad_apply(spec: NormSpec, given: Given) -> Made:
    """The gradients in `needs`, in the order of Needs.gradients. dots: what grad_sums returned,
    added up.
    """
    dy, dots, needs = given["dy"], given["dots"], given["needs"]
    if not spec.hidden:
        likes = dy, *(given[role] for role in ("x", "gate", "weight", "bias"))
        grads = zip(needs.gradients, likes, strict=True)
        return tuple(torch.zeros_like(like) if need else None for need, like in grads)
    if dots is not None:
        dots = dots.view(given["rows"], 1 if given["mean"] is None else 2)
    return reference.backward(spec, needs, dy, given["dsum"], given, dots=dots)


def _gated(spec: NormSpec, given: Given, rows: Tensor, first: bool = True) -> Tensor:
    """Rows, times the activation of a gate that comes before the norm, or else of one after it."""
    gate = given["gate"]
    if gate is None or spec.gate_first != first:
        return rows
    return rows * reference.act(spec, _rows(spec, given, gate, rows.dtype))


def _rows(spec: NormSpec, given: Given, x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as a matrix of rows, which may have no columns."""
    return x.reshape(given["rows"], spec.hidden).contiguous().to(dtype)
