"""What is behind the torch.library ops: the kernels or the reference, and for compiled code a way
that finds once what stays the same from call to call.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..spec import NormSpec
from . import cutile, reference
from .layout import all_aligned, all_contiguous
from .plans import Plans, computed, merged_needs, plans_of, spec_of_tensors
from .registry import MAX_ROWS, device_of, select

ELSEWHERE = -2  # no device's number, nor what PyTorch says of a CPU's


def norm_forward(
    x, residual, gate, weight, bias,
    norm, hidden, eps, offset, gate_first, rounding, save, backend=None, wanted=(True,) * 4,
):  # fmt: skip
    """wanted: which results are used. Of the others, those that do not exist are None."""
    _refuse_forward_mode()
    tensors = (x, residual, gate, weight, bias)
    how = (norm, hidden, eps, offset, gate_first, rounding)
    spec, plans = _served(tensors, how, backend)
    if plans is not None:
        with cutile.on_device_of(x):
            found = cutile.forward(plans.training if save else plans.inference, *tensors, eps)
    else:
        found = reference.forward(spec, *tensors, eps)
    y, total, mean, rstd = found if save else (*found[:2], None, None)
    if total is None and wanted[1]:
        total = x.new_empty(0)
    if mean is None and wanted[2]:
        mean = x.new_empty(0, dtype=stat_dtype(x, residual))
    if rstd is None and wanted[3]:
        rstd = x.new_empty(0, dtype=stat_dtype(x, residual))
    return y, total, mean, rstd


def bind_norm(
    norm, hidden, eps, offset, gate_first, rounding, save, backend=None, *, wanted
) -> Callable:  # fmt: skip
    """norm_forward with these, of tensors of one description in every call: which there are, and
    their dtypes, devices and numbers of dimensions."""
    how = (norm, hidden, eps, offset, gate_first, rounding)
    plan, index = None, None

    def bound(x, residual, gate, weight, bias):
        nonlocal plan, index
        tensors = (x, residual, gate, weight, bias)
        if index is None:
            index = ELSEWHERE
            _, plans = _served(tensors, how, backend)
            made = (True, residual is not None, save and norm == "layer", save)
            vectors = hidden > 1 and all(w is None or w.dim() == 1 for w in (weight, bias))
            if vectors and _binds(plans, made, wanted):
                plan, index = plans.training if save else plans.inference, x.get_device()
        if _is_here(x, weight, bias, index, hidden):
            given = [t for t in tensors if t is not None]
            if all_contiguous(given) and (not plan.spec.aligned or all_aligned(given)):
                # A single row may have any stride.
                if x.dim() == 2 and x.size(0) > 1:
                    return cutile.forward_matrices(plan, x, residual, gate, weight, bias, eps)
                return cutile.forward_contiguous(plan, x, residual, gate, weight, bias, eps)
        return norm_forward(*tensors, *how, save, backend, wanted)

    return bound


def norm_backward(
    dy, dsum, x, gate, weight, bias, mean, rstd, added,
    norm, hidden, eps, offset, gate_first, rounding, output_mask, backend=None, wanted=(True,) * 5,
):  # fmt: skip
    """wanted: as for norm_forward."""
    _refuse_forward_mode()
    residual = x if added else None
    tensors = (dy, residual, gate, weight, bias)
    how = (norm, hidden, eps, offset, gate_first, rounding)
    mean = mean if norm == "layer" else None
    saved = (dsum, x, gate, weight, bias, mean, rstd)
    spec, plans = _served(tensors, how, backend)
    if plans is not None:
        plan, _ = plans.gradients(tuple(output_mask), dsum is not None)
        with cutile.on_device_of(x):
            grads = cutile.backward(plan, dy, *saved)
    else:
        added = x.dtype if added else None
        needs = merged_needs(dy.dtype, added, gate, weight, bias, dsum, output_mask)
        grads = reference.backward(spec, needs, dy, *saved, eps)
    pairs = zip(grads, wanted, strict=True)
    return tuple([x.new_empty(0) if g is None and used else g for g, used in pairs])


def bind_norm_backward(
    added, norm, hidden, eps, offset, gate_first, rounding, output_mask, backend=None, *, wanted
) -> Callable:  # fmt: skip
    """norm_backward with these, of tensors of one description in every call."""
    how = (norm, hidden, eps, offset, gate_first, rounding)
    plan, index = None, None

    def bound(dy, dsum, x, gate, weight, bias, mean, rstd):
        nonlocal plan, index
        if index is None:
            index = ELSEWHERE
            _, plans = _served((dy, x if added else None, gate, weight, bias), how, backend)
            if plans is not None:
                found, _ = plans.gradients(tuple(output_mask), dsum is not None)
                if _binds(plans, computed(found.needs), wanted):
                    plan, index = found, x.get_device()
        if _is_here(x, weight, bias, index, hidden):
            saved = (x, gate, weight, bias, mean if norm == "layer" else None, rstd)
            return cutile.backward(plan, dy, dsum, *saved)
        tensors = (dy, dsum, x, gate, weight, bias, mean, rstd)
        return norm_backward(*tensors, added, *how, output_mask, backend, wanted)

    return bound


def _binds(plans: Plans | None, made: Sequence[bool], wanted: Sequence[bool]) -> bool:
    """Whether the kernels serve, without heads, of which there may be others in another call; and
    make all that is wanted."""
    there = all(m or not used for m, used in zip(made, wanted, strict=True))
    return there and plans is not None and not plans.spec.heads


def _is_here(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, index: int, hidden: int
) -> bool:
    """Whether x is on the current CUDA device, which is `index`, and has what the kernels take."""
    return (
        index == x.get_device() == cutile.current_device()
        and (weight is None or weight.numel() == hidden)
        and (bias is None or bias.numel() == hidden)
        and x.numel() <= MAX_ROWS * hidden
        and forward_ad._current_level < 0
    )


def _served(tensors: tuple, how: tuple, backend: str | None) -> tuple[NormSpec, Plans | None]:
    """What is asked for; and plans if the kernels are to serve, None if the reference.

    Raises and warns as select does.
    """
    x, hidden = tensors[0], how[1]
    rows = x.numel() // hidden if hidden else 0
    if x.is_cuda and rows <= MAX_ROWS:
        plans = plans_of(*tensors, *how, backend)
        if plans is not None:
            return plans.spec, plans
    spec = spec_of_tensors(*tensors, *how)
    select(spec, rows, device_of(x.device.type, x.device.index), backend)
    return spec, None


def _refuse_forward_mode() -> None:
    """For PyTorch would take the tangents of an op without such derivatives for zeros."""
    if forward_ad._current_level >= 0:
        what = "torch.ops.tilenorm.norm has no forward-mode derivative; tilenorm's functions have"
        raise NotImplementedError(what)


def stat_dtype(x: Tensor, residual: Tensor | None) -> torch.dtype:
    double = x.dtype == torch.float64 or (residual is not None and residual.dtype == torch.float64)
    return torch.float64 if double else torch.float32
