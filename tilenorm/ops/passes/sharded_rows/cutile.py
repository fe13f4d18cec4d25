"""What the ops of rows in pieces do, by the kernels."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, dtype, float32

from ....launch.arrays import BackwardArrays, SplitForwardArrays, name_of_gradient
from ....launch.calls import Launch
from ....launch.split import (
    center_launches,
    plan_grad_apply,
    plan_grad_sums,
    plan_row_apply,
    plan_row_sums,
)
from ....launch.target import Target
from ....spec import NormSpec
from ....table import BIAS, PIECES, SUM, WEIGHT, X, Y
from ..cutile import Run, fresh, on_device
from ..reading import as_read, contiguous_strides_of, reading
from .reference import Given, Made

# The ports of the tensors that the kernels read, by their roles.
READ = dict.fromkeys(("x", "residual", "gate", "dy", "dsum"), X) | {"weight": WEIGHT, "bias": BIAS}
# The ports of the gradients, and of all that the kernels write, by the names of the arrays.
GRADIENTS = {name_of_gradient(port.role): port for port in PIECES["grad_apply"].makes}
WRITTEN = {"sum": SUM, "y": Y, **GRADIENTS}
# The arrays of the columns of what has several numbers a row. RMSNorm has the first of dots alone.
COLUMNS = {
    "own": ("own_mean", "own_correction", "own_squares"),
    "centered": ("correction", "square"),
    "dots": ("dot", "total"),
}


def piece(name: str, spec: NormSpec, target: Target, given: Given, run: Run = on_device) -> Made:
    """What an op makes of what Piece.read returns; None for what is absent."""
    x, results = given["x"], given["results"]
    made = {
        role: None if of.shape is None else _fresh(x, of.shape, of.dtype)
        for role, of in results.items()
    }
    if name == "grad_apply":
        made = dict(zip(GRADIENTS, made.values(), strict=False))
    if not given["rows"]:  # a sum over no rows is zeros
        return tuple([t if t is None else t.zero_() for t in made.values()])
    launches, read = _launches(name, spec, target, given)
    arrays = SplitForwardArrays if name.startswith("row") else BackwardArrays
    run(launches, arrays(**_arrays(arrays, spec, read, made)), x.get_device())
    return tuple(made.values())


def _fresh(x: Tensor, shape: Sequence[int], dtype: dtype) -> Tensor:
    return fresh(x, tuple(shape), contiguous_strides_of(shape), dtype)


def _launches(
    name: str, spec: NormSpec, target: Target, given: Given
) -> tuple[list[Launch], Given]:
    """The launches of an op, and what its kernels read, with scratch."""
    rows, share = given["rows"], 1 / given["hidden"]
    if name == "row_sums":
        return plan_row_sums(spec, target).launches(rows, share), given
    if name == "row_center":
        read = {"rows": rows, "whole": given["mean"], "own": given["own"]}
        return center_launches(rows, spec.hidden, share), read
    if name == "row_apply":
        return plan_row_apply(spec, target).launches(rows, given["eps"]), given
    if name == "grad_sums":
        return plan_grad_sums(spec, target).launches(rows, share), given
    needs, x = given["needs"], given["x"]
    plan = plan_grad_apply(spec, target, needs)
    partials = plan.partials(rows)
    scratch = {"partials": None if partials is None else _fresh(x, partials, float32)}
    dsum = given["dsum"] if needs.dsum else None
    return plan.launches(rows), given | scratch | {"dsum": dsum}


def _arrays(arrays: Any, spec: NormSpec, given: Given, made: Given) -> dict[str, Any]:
    """The arrays, by their names, of what the kernels read and write."""
    rows, found = given["rows"], {}
    shapes: dict[str, tuple[int, ...]] = {"... n": (rows, -1), "+[h] n": (-1,)}
    read = {role: given[role] for role in READ if given.get(role) is not None}
    if read:
        how = reading(spec, [READ[role] for role in read])
        found = dict(zip(read, as_read([*read.values()], spec, how), strict=True))
    for name, t in (given | made).items():
        if name in COLUMNS and t is not None:
            found |= zip(COLUMNS[name], t.view(rows, -1).unbind(1), strict=False)
        elif name in arrays._fields and name not in READ and t is not None:
            shape = shapes[WRITTEN[name].dims] if name in WRITTEN else (rows,)
            found[name] = t if name == "partials" else t.view(shape)
    if "dy" in found:
        found["dy"] = (found["dy"],)
    return found
