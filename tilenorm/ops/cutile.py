"""The cuTile implementation: allocate, plan, launch."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..launch.calls import ABSENT, BackwardArrays, Launch
from ..launch.kernel import launch
from ..launch.plan import BackwardPlan, ForwardPlan
from ..spec import PLAIN, NormSpec
from . import torch_private
from .layout import (
    as_read,
    contiguous_strides_of,
    parameter_of,
    plain,
    rows_of,
    shaped_as,
    start_vectors,
    vector_of,
)
from .tensors import SKIP, Branch, Results, Saved, Tensors

Run = Callable[[Sequence[Launch], tuple, int], None]


def on_device(launches: Sequence[Launch], arrays: tuple, index: int) -> None:
    """Launch on the current stream of the current CUDA device, which is `index`."""
    launch(torch_private.current_stream(index), launches, arrays)


def forward(
    plan: ForwardPlan, tensors: Tensors, eps: float, rows: int = 0, run: Run = on_device
) -> Results:
    """y and the sum, contiguous; mean and rstd (rows,) float32 where the plan saves them.

    rows: how many, if the caller knows that the tensors are contiguous matrices of rows, and
    vectors; else 0.
    What is returned is a plain tuple in the order of Results, which takes longer to make.
    """
    spec, like = plan.spec, tensors[0]
    hidden = spec.hidden
    known = rows > 0
    if not known:
        rows = like.numel() // hidden
    shape, strides = (rows, hidden), (hidden, 1)
    empty = torch_private.empty_strided_cuda if like.is_cuda else _empty_strided_cpu
    y = empty(shape, strides, (tensors[SKIP] if spec.skip else like).dtype)
    total = mean = rstd = None
    if tensors[1] is not None:
        total = empty(shape, strides, tensors[1].dtype)
    if plan.save:
        rstd = empty((rows,), (1,), torch.float32)
        if spec.norm == "layer":
            mean = empty((rows,), (1,), torch.float32)
    matrices = known or (like.dim() == 2 and like.shape == shape)
    if rows:
        slots = plan.slots(rows)
        if known:
            ready = start_vectors(tensors)
        else:
            ready = matrices and rows > 1 and not spec.heads and plain(tensors)
        if not ready:
            tensors = as_read(tensors, spec, shape)
        x, residual, gate, weight, bias = tensors if len(tensors) == PLAIN else tensors[:PLAIN]
        arrays = (  # in the order of ForwardArrays, which takes longer to make
            x,
            y,
            ABSENT if weight is None else weight,
            ABSENT if bias is None else bias,
            ABSENT if residual is None else residual,
            ABSENT if gate is None else gate,
            ABSENT if total is None else total,
            ABSENT if mean is None else mean,
            ABSENT if rstd is None else rstd,
            ABSENT if slots is None else empty(slots, (slots[1], 1), torch.int32),
        )
        if spec.joins:
            arrays += tuple([ABSENT if t is None else bytes_of(t) for t in tensors[PLAIN:]])
        run(plan.launches(rows, eps), arrays, like.get_device())
    if not matrices:
        y = shaped_as(y, like)
        total = None if total is None else shaped_as(total, like)
    return y, total, mean, rstd


def backward(
    plan: BackwardPlan,
    dy: Tensor,
    dsum: Tensor | None,
    saved: Saved,
    eps: float = 0.0,
    more: Sequence[Tensor] = (),
    branch: Branch | None = None,
    run: Run = on_device,
) -> tuple[Tensor | None, ...]:
    """The gradients of Tensors that the plan needs, contiguous, each in its own tensor's dtype, and
    behind them y if the plan needs it.

    dsum: the gradient of the sum, which is read if the plan needs it. eps: is not read, because the
    saved rstd holds it. more: the terms of dy behind the first. branch: what the input was
    multiplied by.
    """
    spec = plan.spec
    # Takes less time than to ask for each by its name.
    need_dx, need_dw, need_db, need_dresidual, need_dgate, need_dsum, _, need_y = plan.needs
    x, gate, weight, bias, mean, rstd = saved
    hidden = spec.hidden
    rows = x.numel() // hidden
    empty = torch_private.empty_strided_cuda if x.is_cuda else _empty_strided_cpu
    shape, strides = (rows, hidden), (hidden, 1)
    dx = empty(shape, strides, (x if spec.skip else dy).dtype) if need_dx else None
    dresidual = empty(shape, strides, x.dtype) if need_dresidual else None
    dgate = empty(shape, strides, gate.dtype) if need_dgate else None
    dw = empty((weight.numel(),), (1,), weight.dtype) if need_dw else None
    db = empty((bias.numel(),), (1,), bias.dtype) if need_db else None
    y = empty(shape, strides, dy.dtype) if need_y else None
    if rows:
        partials, slots = plan.partials(rows), plan.slots(rows)
        terms = (rows_of(dy, spec),)
        if more:
            terms += tuple([rows_of(term, spec) for term in more])
        arrays = (  # in the order of BackwardArrays
            rows_of(x, spec),
            terms,
            ABSENT if gate is None else rows_of(gate, spec),
            rows_of(dsum, spec) if need_dsum else ABSENT,
            ABSENT if weight is None else parameter_of(weight, spec),
            ABSENT if bias is None else parameter_of(bias, spec),
            ABSENT if mean is None else mean,
            rstd,
            ABSENT if dx is None else dx,
            ABSENT if dresidual is None else dresidual,
            ABSENT if dgate is None else dgate,
            ABSENT if y is None else y,
            ABSENT if partials is None else empty(partials, (partials[1], 1), torch.float32),
            ABSENT if slots is None else empty(slots, (slots[1], 1), torch.int32),
            ABSENT if dw is None else dw,
            ABSENT if db is None else db,
        )
        if plan.spec.branches:
            arrays = with_branch(arrays, spec, branch)
        run(plan.launches(rows), arrays, x.get_device())
    else:
        for sums in (dw, db):
            if sums is not None:
                sums.zero_()
    if x.shape != shape:
        dx, dresidual, dgate = (g if g is None else shaped_as(g, x) for g in (dx, dresidual, dgate))
        y = y if y is None else shaped_as(y, x)
    if dw is not None and weight.dim() > 1:
        dw = shaped_as(dw, weight)
    if db is not None and bias.dim() > 1:
        db = shaped_as(db, bias)
    return (dx, dresidual, dgate, dw, db) if y is None else (dx, dresidual, dgate, dw, db, y)


def with_branch(arrays: tuple, spec: NormSpec, branch: Branch) -> BackwardArrays:
    """The arrays of a backward pass, and what the input was multiplied by."""
    mask, layer_scale, _ = branch
    mask = ABSENT if mask is None else bytes_of(rows_of(mask, spec))
    if layer_scale is not None:
        layer_scale = vector_of(layer_scale, spec.aligned)
    arrays += (mask, ABSENT if layer_scale is None else layer_scale)
    return BackwardArrays(*arrays)


def bytes_of(tensor: Tensor) -> Tensor:
    """A tensor as the kernels read it: a mask as bytes, which are 0 or 1."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def fresh(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A contiguous tensor on the device of another, not filled."""
    empty = torch_private.empty_strided_cuda if like.is_cuda else _empty_strided_cpu
    return empty(tuple(shape), contiguous_strides_of(shape), dtype)


def _empty_strided_cpu(shape: tuple[int, ...], strides: tuple, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor. Inductor's allocator does not fill it where PyTorch is told to."""
    return torch.empty(shape, dtype=dtype)
