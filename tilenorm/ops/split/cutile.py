"""The five functions of a piece by the kernels. What they take and return: see reference.py.

Each takes a target after the spec, and `run`, what launches: the tests interpret instead.
"""

from typing import Any

import torch
from torch import Tensor

from ...launch.calls import Needs
from ...launch.split import (
    SplitBackwardArrays,
    SplitForwardArrays,
    center_launches,
    plan_grad_apply,
    plan_grad_sums,
    plan_row_apply,
    plan_row_sums,
)
from ...launch.target import Target
from ...spec import NormSpec
from ..cutile import Run, fresh, on_device
from ..layout import Views, as_read, rows_of
from ..reference import Given

# The arrays of the columns of what has several numbers a row.
OWN = ("own_mean", "own_correction", "own_squares")
CENTERED = ("correction", "square")
DOTS = ("dot", "total")


def row_sums(
    spec: NormSpec, target: Target, given: Given, rows: int, whole: int, run: Run = on_device
):
    x, residual = given["x"], given["residual"]
    part = fresh(x, (rows,), torch.float32)
    own = fresh(x, (rows, 3), torch.float32) if spec.norm == "layer" else None
    total = None if residual is None else fresh(x, x.shape, residual.dtype)
    if rows:
        arrays = _read(spec, given, rows) | _columns(OWN, own)
        arrays |= {"part": part, "sum": _rows(total, rows)}
        launches = plan_row_sums(spec, target).launches(rows, 1 / whole)
        run(launches, SplitForwardArrays(**_there(arrays)), part.get_device())
    return part, own, total


def row_center(
    spec: NormSpec, target: Target, mean: Tensor, own: Tensor, whole: int, run: Run = on_device
) -> Tensor:
    rows = mean.numel()
    centered = fresh(mean, (rows, 2), torch.float32)
    if rows:
        arrays = {"whole": mean} | _columns(OWN, own) | _columns(CENTERED, centered)
        launches = center_launches(rows, spec.hidden, 1 / whole)
        run(launches, SplitForwardArrays(**arrays), mean.get_device())
    return centered


def row_apply(
    spec: NormSpec,
    target: Target,
    given: Given,
    whole: Tensor,
    centered: Tensor | None,
    eps: float,
    save: bool,
    run: Run = on_device,
):
    x = given["x"]
    rows = whole.numel()
    y = fresh(x, x.shape, getattr(torch, spec.dtype))
    rstd = fresh(x, (rows,), torch.float32) if save else None
    mean = fresh(x, (rows,), torch.float32) if save and spec.norm == "layer" else None
    if rows:
        arrays = _read(spec, given, rows) | _columns(CENTERED, centered)
        arrays |= {"y": _rows(y, rows), "whole": whole, "mean": mean, "rstd": rstd}
        launches = plan_row_apply(spec, target, save).launches(rows, eps)
        run(launches, SplitForwardArrays(**_there(arrays)), x.get_device())
    return y, mean, rstd


def grad_sums(
    spec: NormSpec, target: Target, dy: Tensor, saved: Given, whole: int, run: Run = on_device
) -> Tensor:
    rows = saved["rstd"].numel()
    sums = fresh(dy, (rows, 2 if spec.norm == "layer" else 1), torch.float32)
    if rows:
        arrays = _read_backward(spec, dy, saved) | _columns(DOTS, sums)
        launches = plan_grad_sums(spec, target).launches(rows, 1 / whole)
        run(launches, SplitBackwardArrays(**_there(arrays)), dy.get_device())
    return sums


def grad_apply(
    spec: NormSpec,
    target: Target,
    needs: Needs,
    dy: Tensor,
    dsum: Tensor | None,
    saved: Given,
    dots: Tensor | None,
    run: Run = on_device,
) -> tuple[Tensor | None, ...]:
    x, gate, weight, bias = (saved[role] for role in ("x", "gate", "weight", "bias"))
    plan, rows = plan_grad_apply(spec, target, needs), saved["rstd"].numel()
    shapes = (*[x.shape] * 3, *(w if w is None else w.shape for w in (weight, bias)))
    kinds = zip(needs.gradients, shapes, (dy, x, gate, weight, bias), strict=True)
    grads = tuple([fresh(x, shape, t.dtype) if need else None for need, shape, t in kinds])
    if not rows:
        return tuple(g if g is None else g.zero_() for g in grads)
    partials = plan.partials(rows)
    arrays = _read_backward(spec, dy, saved) | _columns(DOTS, dots)
    arrays["dsum"] = rows_of(dsum, spec) if needs.dsum else None
    arrays["partials"] = None if partials is None else fresh(dy, partials, torch.float32)
    for name, grad in zip(("dx", "dresidual", "dgate"), grads, strict=False):
        arrays[name] = _rows(grad, rows)
    for name, grad in zip(("dw", "db"), grads[3:], strict=True):
        arrays[name] = grad if grad is None else grad.view(-1)
    run(plan.launches(rows), SplitBackwardArrays(**_there(arrays)), dy.get_device())
    return grads


# How the tensors that are read lie, by their roles.
LIES = {"x": "rows", "residual": "rows", "gate": "rows", "weight": "affine", "bias": "affine"}


def _read(spec: NormSpec, given: Given, rows: int) -> dict[str, Tensor | None]:
    """The tensors of these roles as the kernels read them, by the names of the arrays."""
    there = {role: lies for role, lies in LIES.items() if role in given}
    tensors = [given[role] for role in there]
    present = [tensor is not None for tensor in tensors]
    views = Views.of(spec, rows, given["x"].shape, tuple(there.values()), present)
    return dict(zip(there, as_read(tensors, spec, views), strict=True))


def _read_backward(spec: NormSpec, dy: Tensor, saved: Given) -> dict[str, Any]:
    """What a backward kernel reads of a piece."""
    arrays = _read(spec, saved, saved["rstd"].numel())
    return arrays | {"dy": (rows_of(dy, spec),), "mean": saved["mean"], "rstd": saved["rstd"]}


def _columns(names: tuple[str, ...], numbers: Tensor | None) -> dict[str, Tensor]:
    """The columns of a matrix by name: RMSNorm has the first of DOTS alone."""
    return {} if numbers is None else dict(zip(names, numbers.unbind(1), strict=False))


def _rows(made: Tensor | None, rows: int) -> Tensor | None:
    return made if made is None else made.view(rows, -1)


def _there(arrays: dict) -> dict:
    """Without the arrays that are absent."""
    return {name: array for name, array in arrays.items() if array is not None}
