"""The cuTile implementation: allocate, plan, launch."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..launch.calls import ABSENT, Launch, launch
from ..launch.plan import BackwardPlan, ForwardPlan
from .layout import parameter_of, reinterpret, rows_of, shaped_as
from .reference import Forward

# Inductor's allocator, on the current device. It takes 0.8 µs where torch.empty takes 2.2, and in
# autograd's thread 4 where that takes 9, for it does not let go of the interpreter's lock.
_empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda
# Absent from a CPU build, where no tensor has a device's number.
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
current_device = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_HERE = nullcontext()

Run = Callable[[Sequence[Launch], tuple, int], None]


def on_device(launches: Sequence[Launch], arrays: tuple, index: int) -> None:
    """Launch on the current stream of the current CUDA device, which is `index`."""
    launch(_current_stream(index), launches, arrays)


def on_device_of(x: Tensor) -> AbstractContextManager:
    """A context in which x's CUDA device is current; nothing is done where it is."""
    index = x.get_device()
    return _HERE if index == current_device() else torch.cuda.device(index)


def forward(
    plan: ForwardPlan,
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    run: Run = on_device,
) -> Forward:
    """y and the sum, contiguous; mean and rstd (rows,) float32 where the plan saves them."""
    spec, leading = plan.spec, plan.leading
    y, total, mean, rstd = forward_matrices(
        plan,
        rows_of(x, spec, leading),
        None if residual is None else rows_of(residual, spec, leading),
        None if gate is None else rows_of(gate, spec, leading),
        None if weight is None else parameter_of(weight, spec),
        None if bias is None else parameter_of(bias, spec),
        eps,
        run,
    )
    if y.shape != x.shape:
        y, total = shaped_as(y, x), None if total is None else shaped_as(total, x)
    return Forward(y, total, mean, rstd)


def forward_contiguous(
    plan: ForwardPlan,
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The same of contiguous tensors and of vectors, all on 16 bytes if that counts."""
    hidden = plan.spec.hidden
    matrix = (x.numel() // hidden, hidden), (hidden, 1)
    y, total, mean, rstd = forward_matrices(
        plan,
        reinterpret(x, *matrix),
        None if residual is None else reinterpret(residual, *matrix),
        None if gate is None else reinterpret(gate, *matrix),
        weight,
        bias,
        eps,
    )
    return shaped_as(y, x), None if total is None else shaped_as(total, x), mean, rstd


def forward_matrices(
    plan: ForwardPlan,
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    run: Run = on_device,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The same of tensors as the kernels take them; y and the sum are (rows, hidden)."""
    spec = plan.spec
    hidden = spec.hidden
    rows = x.numel() // hidden
    shape, strides = (rows, hidden), (hidden, 1)
    empty = _empty_strided_cuda if x.is_cuda else _empty_strided_cpu
    y = empty(shape, strides, x.dtype)
    total = mean = rstd = None
    if residual is not None:
        total = empty(shape, strides, residual.dtype)
    if plan.save:
        rstd = empty((rows,), (1,), torch.float32)
        if spec.norm == "layer":
            mean = empty((rows,), (1,), torch.float32)
    if rows:
        slots = plan.slots(rows)
        arrays = (  # as ForwardArrays, which take longer to make
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
        run(plan.launches(rows, eps), arrays, x.get_device())
    return y, total, mean, rstd


def backward(
    plan: BackwardPlan,
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    run: Run = on_device,
) -> tuple[Tensor | None, ...]:
    """Those of dx, dresidual, dgate, dW and dB that the plan needs, contiguous.

    x is the sum where a residual was added. Each gradient has the dtype of what it is of.
    """
    spec, needs = plan.spec, plan.needs
    hidden = spec.hidden
    rows = x.numel() // hidden
    empty = _empty_strided_cuda if x.is_cuda else _empty_strided_cpu
    shape, strides = (rows, hidden), (hidden, 1)
    dx = empty(shape, strides, dy.dtype) if needs.dx else None
    dresidual = empty(shape, strides, x.dtype) if needs.dresidual else None
    dgate = empty(shape, strides, gate.dtype) if needs.dgate else None
    dw = empty((weight.numel(),), (1,), weight.dtype) if needs.dw else None
    db = empty((bias.numel(),), (1,), bias.dtype) if needs.db else None
    if rows:
        leading, partials, slots = plan.leading, plan.partials(rows), plan.slots(rows)
        arrays = (  # as BackwardArrays
            rows_of(x, spec, leading),
            rows_of(dy, spec, leading),
            ABSENT if gate is None else rows_of(gate, spec, leading),
            ABSENT if dsum is None else rows_of(dsum, spec, leading),
            ABSENT if weight is None else parameter_of(weight, spec),
            ABSENT if bias is None else parameter_of(bias, spec),
            ABSENT if mean is None else mean,
            rstd,
            ABSENT if dx is None else dx,
            ABSENT if dresidual is None else dresidual,
            ABSENT if dgate is None else dgate,
            ABSENT if partials is None else empty(partials, (partials[1], 1), torch.float32),
            ABSENT if slots is None else empty(slots, (slots[1], 1), torch.int32),
            ABSENT if dw is None else dw,
            ABSENT if db is None else db,
        )
        run(plan.launches(rows), arrays, x.get_device())
    else:
        for sums in (dw, db):
            if sums is not None:
                sums.zero_()
    if x.shape != shape:
        dx, dresidual, dgate = (g if g is None else shaped_as(g, x) for g in (dx, dresidual, dgate))
    if dw is not None and weight.dim() > 1:
        dw = shaped_as(dw, weight)
    if db is not None and bias.dim() > 1:
        db = shaped_as(db, bias)
    return dx, dresidual, dgate, dw, db


def _empty_strided_cpu(shape: tuple[int, ...], strides: tuple, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor. Inductor's allocator does not fill it where PyTorch is told to."""
    return torch.empty(shape, dtype=dtype)
