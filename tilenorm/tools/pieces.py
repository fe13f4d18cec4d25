"""The calls of the kernels that take pieces of rows, with descriptions of arrays for tensors."""

import torch
from torch import Tensor

from ..launch.calls import Call, bound, every_gradient
from ..launch.target import Target
from ..ops.cutile import Run
from ..ops.split import cutile
from ..ops.tensors import Saved, Tensors
from ..spec import NormSpec
from .signature import ArrayLike


def piece_calls(spec: NormSpec, target: Target, rows: int) -> list[Call]:
    """Every call of inference and of a training step with contiguous tensors of `rows` rows.

    spec.hidden: what a piece has of a row. Operations of their own do what only whole rows have.
    """
    spec = spec.plain
    found: list[Call] = []

    def run(launches, arrays, index) -> None:
        found.extend(bound(launches, type(arrays)(*_described(arrays))))

    with torch.device("meta"):  # so that nothing is allocated
        _step(spec, target, rows, run)
    return found


def _step(spec: NormSpec, target: Target, rows: int, run: Run) -> None:
    """The five functions, one after the other."""
    lead = (rows // spec.heads, spec.heads) if spec.heads else (rows,)

    def rows_of(dtype: str | None) -> Tensor | None:
        return dtype and torch.empty((*lead, spec.hidden), dtype=getattr(torch, dtype))

    def parameter_of(dtype: str | None) -> Tensor | None:
        return dtype and torch.empty((*lead[1:], spec.hidden), dtype=getattr(torch, dtype))

    x, residual, gate = map(rows_of, (spec.dtype, spec.residual, spec.gate))
    weight, bias = map(parameter_of, (spec.weight, spec.bias))
    layer, whole = spec.norm == "layer", 2 * spec.hidden
    before = gate if spec.gate_first else None
    sums, applied = spec.summed, spec.applied
    numbers = cutile.row_sums(sums, target, Tensors(x, residual, before), rows, whole, run)
    number, own, total = numbers
    centered = cutile.row_center(sums, target, number, own, whole, run) if layer else None
    read = Tensors(x if total is None else total, None, gate, weight, bias)
    given = (applied, target, read, number, centered, 1e-6)
    cutile.row_apply(*given, False, run)
    _, mean, rstd = cutile.row_apply(*given, True, run)
    saved = Saved(read.input, gate, weight, bias, mean, rstd)
    dots = cutile.grad_sums(spec, target, x, saved, whole, run)
    dsum = rows_of(spec.residual)
    cutile.grad_apply(spec, target, every_gradient(spec), x, dsum, saved, dots, run)


def _described(array):
    if isinstance(array, tuple):
        return tuple(map(_described, array))
    if not isinstance(array, Tensor):
        return array
    dtype = str(array.dtype).removeprefix("torch.")
    return ArrayLike(dtype, tuple(array.shape), array.stride(), True)
