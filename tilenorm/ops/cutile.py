"""The cuTile implementation: allocate, plan, launch."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..launch.plan import (
    ABSENT,
    Call,
    RowBackward,
    RowForward,
    WideBackward,
    WideForward,
    launch,
)
from .layout import flat, matrix_of, rows_of, vector_of

# Inductor's allocator, on the current device. It takes 0.8 µs where torch.empty takes 2.2, and in
# autograd's thread 4 where that takes 9, for it does not let go of the interpreter's lock.
_empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda

Run = Callable[[list[Call], int], None]


def on_device(calls: list[Call], index: int) -> None:
    """Launch on the current stream of the current CUDA device, which is `index`."""
    launch(torch._C._cuda_getCurrentRawStream(index), calls)


def forward(
    plan: RowForward | WideForward,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    run: Run = on_device,
) -> tuple[Tensor, Tensor | None]:
    """y, contiguous, in x's shape and dtype; rstd (rows,) float32 if the plan saves it."""
    hidden, aligned = plan.spec.hidden, plan.spec.aligned
    rows = x.numel() // hidden
    y = _like(x)
    rstd = _float32((rows,), x) if plan.save else None
    if rows:
        calls = plan.calls(
            rows_of(x, hidden, aligned, plan.leading),
            ABSENT if weight is None else vector_of(weight, aligned),
            ABSENT if bias is None else vector_of(bias, aligned),
            matrix_of(y, hidden),
            ABSENT if rstd is None else rstd,
            _float32(plan.workspace(rows), x),
            rows,
            eps,
        )
        run(calls, x.get_device())
    return y, rstd


def backward(
    plan: RowBackward | WideBackward,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rstd: Tensor,
    run: Run = on_device,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Those of dx, dW and dB that the plan needs, contiguous, each in its input's dtype."""
    hidden, aligned = plan.spec.hidden, plan.spec.aligned
    need_dx, need_dw, need_db = plan.needs
    rows = x.numel() // hidden
    dx = _like(x) if need_dx else None
    dw = _like(weight) if need_dw else None
    db = _like(bias) if need_db else None
    if rows:
        calls = plan.calls(
            rows_of(x, hidden, aligned, plan.leading),
            rows_of(dy, hidden, aligned, plan.leading),
            ABSENT if weight is None else vector_of(weight, aligned),
            rstd,
            ABSENT if dx is None else matrix_of(dx, hidden),
            _float32(plan.partials(rows), x),
            _float32(plan.workspace(rows), x),
            ABSENT if dw is None else flat(dw),
            ABSENT if db is None else flat(db),
            rows,
        )
        run(calls, x.get_device())
    else:
        for sums in (dw, db):
            if sums is not None:
                sums.zero_()
    return dx, dw, db


def _like(x: Tensor) -> Tensor:
    """An unwritten contiguous tensor of x's shape."""
    if not x.is_contiguous():
        return x.new_empty(x.shape)
    if x.is_cuda:
        return _empty_strided_cuda(tuple(x.shape), x.stride(), x.dtype)
    return torch.empty(x.shape, dtype=x.dtype)


def _float32(shape: tuple[int, ...] | None, x: Tensor) -> Tensor | int:
    """Scratch that kernels fill before they read it."""
    if shape is None:
        return ABSENT
    if x.is_cuda:
        return _empty_strided_cuda(shape, (*shape[1:], 1), torch.float32)
    return torch.empty(shape, dtype=torch.float32)
