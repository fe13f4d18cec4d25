"""The cuTile implementation: allocate, plan, launch."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..launch.plan import (
    Call,
    RowBackward,
    RowForward,
    WideBackward,
    WideForward,
    launch,
)
from .layout import rows_of, vector_of

Run = Callable[[list[Call], int], None]


def on_device(calls: list[Call], index: int) -> None:
    """Launch on the current stream of the CUDA device `index`, whatever the current device."""
    if index == torch._C._cuda_getDevice():
        launch(torch._C._cuda_getCurrentRawStream(index), calls)
    else:
        with torch.cuda.device(index):
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
    spec = plan.spec
    rows = x.numel() // spec.hidden
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = x.new_empty(rows, dtype=torch.float32) if plan.save else None
    if rows:
        x = rows_of(x, spec.hidden, spec.aligned)
        weight = x if weight is None else vector_of(weight, spec.aligned)
        bias = x if bias is None else vector_of(bias, spec.aligned)
        workspace = _float32(plan.workspace(rows), x)
        out = y if y.dim() == 2 and y.shape[1] == spec.hidden else y.view(rows, spec.hidden)
        saved = x if rstd is None else rstd
        calls = plan.calls(x, weight, bias, out, saved, workspace, rows, eps)
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
    spec, needs = plan.spec, plan.needs
    rows = x.numel() // spec.hidden
    make = torch.empty if rows else torch.zeros
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs.dx else None
    dw = make(weight.shape, dtype=weight.dtype, device=x.device) if needs.dw else None
    db = make(bias.shape, dtype=bias.dtype, device=x.device) if needs.db else None
    if rows:
        x = rows_of(x, spec.hidden, spec.aligned)
        calls = plan.calls(
            x,
            rows_of(dy, spec.hidden, spec.aligned),
            x if weight is None else vector_of(weight, spec.aligned),
            rstd,
            x if dx is None else dx.view(rows, spec.hidden),
            _float32(plan.partials(rows), x),
            _float32(plan.workspace(rows), x),
            x if dw is None else dw.view(-1),
            x if db is None else db.view(-1),
            rows,
        )
        run(calls, x.get_device())
    return dx, dw, db


def _float32(shape: tuple[int, int] | None, absent: Tensor) -> Tensor:
    """Scratch that kernels fill before they read it."""
    if shape is None:
        return absent
    return torch.empty(shape, dtype=torch.float32, device=absent.device)
