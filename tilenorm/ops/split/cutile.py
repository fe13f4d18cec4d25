"""The five functions of a piece by the kernels. What they take and return: see reference.py.

Each takes a target after the spec, and `run`, what launches: the tests interpret instead.
"""

import torch
from torch import Tensor

from ...launch.calls import ABSENT, Needs
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
from ...spec import PLAIN, NormSpec
from ..cutile import Run, fresh, on_device
from ..layout import parameter_of, rows_of
from ..tensors import Saved, Tensors


def row_sums(
    spec: NormSpec, target: Target, tensors: Tensors, rows: int, whole: int, run: Run = on_device
):
    x, residual, gate = tensors[:3]
    plan = plan_row_sums(spec, target)
    part = fresh(x, (rows,), torch.float32)
    own = fresh(x, (rows, 3), torch.float32) if spec.norm == "layer" else None
    total = None if residual is None else fresh(x, x.shape, residual.dtype)
    means, corrections, squares = (ABSENT,) * 3 if own is None else own.unbind(1)
    if rows:
        read = [t if t is None else rows_of(t, spec) for t in (x, residual, gate)]
        x, residual, gate = (ABSENT if t is None else t for t in read)
        arrays = SplitForwardArrays(
            x=x,
            residual=residual,
            gate=gate,
            sum=ABSENT if total is None else total.view(rows, spec.hidden),
            part=part,
            own_mean=means,
            own_correction=corrections,
            own_squares=squares,
        )
        run(plan.launches(rows, 1 / whole), arrays, part.get_device())
    return part, own, total


def row_center(
    spec: NormSpec, target: Target, mean: Tensor, own: Tensor, whole: int, run: Run = on_device
) -> Tensor:
    rows = mean.numel()
    centered = fresh(mean, (rows, 2), torch.float32)
    if rows:
        names = ("own_mean", "own_correction", "own_squares", "correction", "square")
        numbers = dict(zip(names, (*own.unbind(1), *centered.unbind(1)), strict=True))
        arrays = SplitForwardArrays(whole=mean, **numbers)
        run(center_launches(rows, spec.hidden, 1 / whole), arrays, mean.get_device())
    return centered


def row_apply(
    spec: NormSpec,
    target: Target,
    tensors: Tensors,
    whole: Tensor,
    centered: Tensor | None,
    eps: float,
    save: bool,
    run: Run = on_device,
):
    x, _, gate, weight, bias = tensors[:PLAIN]
    plan, rows = plan_row_apply(spec, target, save), whole.numel()
    y = fresh(x, x.shape, getattr(torch, spec.dtype))
    rstd = fresh(x, (rows,), torch.float32) if save else None
    mean = fresh(x, (rows,), torch.float32) if save and spec.norm == "layer" else None
    correction, square = (ABSENT, ABSENT) if centered is None else centered.unbind(1)
    if rows:
        arrays = SplitForwardArrays(
            x=rows_of(x, spec),
            gate=ABSENT if gate is None else rows_of(gate, spec),
            weight=ABSENT if weight is None else parameter_of(weight, spec),
            bias=ABSENT if bias is None else parameter_of(bias, spec),
            y=y.view(rows, spec.hidden),
            whole=whole,
            correction=correction,
            square=square,
            mean=ABSENT if mean is None else mean,
            rstd=ABSENT if rstd is None else rstd,
        )
        run(plan.launches(rows, eps), arrays, x.get_device())
    return y, mean, rstd


def grad_sums(
    spec: NormSpec, target: Target, dy: Tensor, saved: Saved, whole: int, run: Run = on_device
) -> Tensor:
    rows, plan = saved.rstd.numel(), plan_grad_sums(spec, target)
    sums = fresh(dy, (rows, 2 if spec.norm == "layer" else 1), torch.float32)
    if rows:
        arrays = _read(spec, dy, saved)._replace(**_columns(sums))
        run(plan.launches(rows, 1 / whole), arrays, dy.get_device())
    return sums


def grad_apply(
    spec: NormSpec,
    target: Target,
    needs: Needs,
    dy: Tensor,
    dsum: Tensor | None,
    saved: Saved,
    dots: Tensor | None,
    run: Run = on_device,
) -> Tensors:
    x, gate, weight, bias = saved[:4]
    plan, rows = plan_grad_apply(spec, target, needs), saved.rstd.numel()
    dx = fresh(x, x.shape, dy.dtype) if needs.dx else None
    dresidual = fresh(x, x.shape, x.dtype) if needs.dresidual else None
    dgate = fresh(x, x.shape, gate.dtype) if needs.dgate else None
    dw = fresh(weight, weight.shape, weight.dtype) if needs.dw else None
    db = fresh(bias, bias.shape, bias.dtype) if needs.db else None
    grads = (dx, dresidual, dgate, dw, db)
    if not rows:
        return tuple(g if g is None else g.zero_() for g in grads)
    partials, shape = plan.partials(rows), (rows, spec.hidden)
    written = dict(zip(("dx", "dresidual", "dgate"), grads, strict=False))
    arrays = _read(spec, dy, saved)._replace(
        dsum=rows_of(dsum, spec) if needs.dsum else ABSENT,
        **{name: ABSENT if g is None else g.view(shape) for name, g in written.items()},
        **_columns(dots),
        partials=ABSENT if partials is None else fresh(dy, partials, torch.float32),
        dw=ABSENT if dw is None else dw.view(-1),
        db=ABSENT if db is None else db.view(-1),
    )
    run(plan.launches(rows), arrays, dy.get_device())
    return grads


def _read(spec: NormSpec, dy: Tensor, saved: Saved) -> SplitBackwardArrays:
    """What a backward kernel reads of a piece."""
    x, gate, weight, bias, mean, rstd = saved
    return SplitBackwardArrays(
        x=rows_of(x, spec),
        dy=(rows_of(dy, spec),),
        gate=ABSENT if gate is None else rows_of(gate, spec),
        weight=ABSENT if weight is None else parameter_of(weight, spec),
        bias=ABSENT if bias is None else parameter_of(bias, spec),
        mean=ABSENT if mean is None else mean,
        rstd=rstd,
    )


def _columns(dots: Tensor | None) -> dict[str, Tensor]:
    """The arrays dot and total of the columns of a matrix."""
    columns = () if dots is None else dots.unbind(1)
    return dict(zip(("dot", "total"), columns, strict=False))
