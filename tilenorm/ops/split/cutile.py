"""The five functions of a piece by the kernels. What they take and return: see reference.py.

Each takes a target after the spec, and `run`, what launches: the tests interpret instead.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...launch.arrays import BackwardArrays, SplitForwardArrays
from ...launch.calls import Launch
from ...launch.split import (
    center_launches,
    plan_grad_apply,
    plan_grad_sums,
    plan_row_apply,
    plan_row_sums,
)
from ...launch.target import Target
from ...spec import NormSpec
from ..cutile import GRADIENTS, Run, fresh, on_device
from ..layout import Views, as_read
from .reference import Given, Made

# How the tensors that the kernels read lie, and those that they write, by their roles.
READ = dict.fromkeys(("x", "residual", "gate", "dy", "dsum"), "rows")
READ |= {"weight": "affine", "bias": "affine"}
WRITTEN = {"sum": "rows", **GRADIENTS}
# The arrays of the columns of what has several numbers a row. RMSNorm has the first of dots alone.
COLUMNS = {
    "own": ("own_mean", "own_correction", "own_squares"),
    "centered": ("correction", "square"),
    "dots": ("dot", "total"),
}


def row_sums(spec: NormSpec, target: Target, given: Given, run: Run = on_device) -> Made:
    x, residual, rows = given["x"], given["residual"], given["rows"]
    made = {
        "part": _numbers(x, rows),
        "own": _numbers(x, rows, 3) if spec.norm == "layer" else None,
        "sum": None if residual is None else fresh(x, x.shape, residual.dtype),
    }
    if rows:
        launches = plan_row_sums(spec, target).launches(rows, 1 / given["hidden"])
        _launch(run, launches, SplitForwardArrays, spec, given, made)
    return tuple(made.values())


def row_center(spec: NormSpec, target: Target, given: Given, run: Run = on_device) -> Made:
    mean, rows = given["mean"], given["rows"]
    centered = _numbers(mean, rows, 2)
    if rows:
        arrays = {"whole": mean} | _columns("own", given["own"]) | _columns("centered", centered)
        launches = center_launches(rows, spec.hidden, 1 / given["hidden"])
        run(launches, SplitForwardArrays(**arrays), mean.get_device())
    return (centered,)


def row_apply(spec: NormSpec, target: Target, given: Given, run: Run = on_device) -> Made:
    x, rows, save = given["x"], given["rows"], given["save"]
    made = {
        "y": fresh(x, x.shape, getattr(torch, spec.dtype)),
        "mean": _numbers(x, rows) if save and spec.norm == "layer" else None,
        "rstd": _numbers(x, rows) if save else None,
    }
    if rows:
        launches = plan_row_apply(spec, target, save).launches(rows, given["eps"])
        _launch(run, launches, SplitForwardArrays, spec, given, made)
    return tuple(made.values())


def grad_sums(spec: NormSpec, target: Target, given: Given, run: Run = on_device) -> Made:
    rows = given["rows"]
    dots = _numbers(given["dy"], rows, 2 if spec.norm == "layer" else 1)
    if rows:
        launches = plan_grad_sums(spec, target).launches(rows, 1 / given["hidden"])
        _launch(run, launches, BackwardArrays, spec, given, {"dots": dots})
    return (dots,)


def grad_apply(spec: NormSpec, target: Target, given: Given, run: Run = on_device) -> Made:
    needs, rows, x = given["needs"], given["rows"], given["x"]
    likes = [given[role] for role in ("dy", "x", "gate", "weight", "bias")]
    shapes = [x.shape] * 3 + [t if t is None else t.shape for t in likes[3:]]
    each = zip(GRADIENTS, needs.gradients, shapes, likes, strict=False)
    made = {name: fresh(x, shape, t.dtype) if need else None for name, need, shape, t in each}
    if not rows:
        return tuple([grad if grad is None else grad.zero_() for grad in made.values()])
    plan = plan_grad_apply(spec, target, needs)
    partials = plan.partials(rows)
    scratch = {"partials": None if partials is None else fresh(x, partials, torch.float32)}
    given = given if needs.dsum else given | {"dsum": None}
    _launch(run, plan.launches(rows), BackwardArrays, spec, given, made | scratch)
    return tuple(made.values())


def _launch(
    run: Run, launches: Sequence[Launch], arrays: Any, spec: NormSpec, given: Given, made: Given
) -> None:
    """Launch with these arrays, which have the names of what a kernel reads and writes."""
    rows, x = given["rows"], given["x"]
    read = {role: given[role] for role in READ if given.get(role) is not None}
    views = Views.of(spec, rows, x.shape, [(READ[role], True) for role in read])
    found = dict(zip(read, as_read([*read.values()], spec, views), strict=True))
    for name, t in (given | made).items():
        if name in COLUMNS and t is not None:
            found |= _columns(name, t)
        elif name in arrays._fields and name not in READ and t is not None:
            shape = {"rows": (rows, -1), "affine": (-1,)}.get(WRITTEN.get(name), t.shape)
            found[name] = t.view(shape)
    if "dy" in found:
        found["dy"] = (found["dy"],)
    run(launches, arrays(**found), x.get_device())


def _numbers(like: Tensor, rows: int, *columns: int) -> Tensor:
    return fresh(like, (rows, *columns), torch.float32)


def _columns(name: str, numbers: Tensor) -> dict[str, Tensor]:
    """The arrays of the columns of a matrix, or of the only column."""
    columns = numbers.view(len(numbers), -1).unbind(1)
    return dict(zip(COLUMNS[name], columns, strict=False))
