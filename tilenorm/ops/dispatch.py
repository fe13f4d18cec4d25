"""From a function's arguments to an implementation; and the short way of eager CUDA tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from ..spec import norm_of
from . import arguments, cutile, library, reference
from .layout import all_aligned, all_contiguous
from .plain import is_plain, is_transformed, modes, needs_grad
from .plans import plans_of, spec_of_tensors
from .prepared import prepare, prepared
from .registry import MAX_ROWS, device_of, refuse_transformed, select_transformed


def normalize(
    op: str,
    input: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    offset: float,
    gate_first: bool,
    rounding: str,
    backend: str | None,
) -> tuple[Tensor, Tensor | None]:
    """The norm, and the sum with the residual if there is one, by whatever serves the call.

    op: the function's name, which says what it computes and takes.
    """
    known, tensors = [], [input]
    if not torch.compiler.is_compiling():
        for other in (residual, gate, weight, bias):
            if other is not None:
                tensors.append(other)
        try:
            known = prepared(
                op, eps, offset, gate_first, rounding, backend,
                residual is None, gate is None, weight is None, bias is None,
                type(normalized_shape), *normalized_shape,
            )  # fmt: skip
        except TypeError:  # of what, the checks say
            known = []
        for check, plans, index, hidden, value, differentiable, simple in known:
            if (
                check(*tensors)
                and index == _current_device()
                and input.numel() <= MAX_ROWS * hidden
                and (residual is None or residual.shape == input.shape)
                and (gate is None or gate.shape == input.shape)
                and not modes()
                and forward_ad._current_level < 0
            ):
                forward = cutile.forward
                if simple and (not plans.aligned or all_aligned(tensors)):
                    if input.dim() == 2:
                        forward = cutile.forward_matrices
                    elif all_contiguous(tensors):
                        forward = cutile.forward_contiguous
                if differentiable and torch.is_grad_enabled():
                    return _apply(input, residual, gate, weight, bias, value, plans, forward)
                return forward(plans.inference, input, residual, gate, weight, bias, value)[:2]
    return _checked(
        op, input, residual, gate, normalized_shape, weight, bias, eps, offset, gate_first,
        rounding, backend, known, tensors,
    )  # fmt: skip


def _checked(
    op, input, residual, gate, normalized_shape, weight, bias, eps, offset, gate_first, rounding,
    backend, known, tensors,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The same after checks, and remembered where the kernels serve plain tensors."""
    norm = norm_of(op)
    others = {}
    if op.startswith("add"):
        others["residual"] = residual
    elif op.startswith("gated"):
        others["gate"] = gate
    hidden, _ = arguments.check(
        op, input, normalized_shape, weight, bias, eps, offset, rounding, backend, **others
    )
    x = input
    if _autocast() and input.is_cuda:
        x = library.autocast_input(input, norm)
    eps = arguments.default_eps(x, residual) if eps is None else float(eps)
    how = (norm, hidden, eps, float(offset), gate_first, rounding)
    recorded = needs_grad(x, residual, gate, weight, bias)
    if _is_served(x, residual, gate, weight, bias):
        plans = plans_of(x, residual, gate, weight, bias, *how, backend)
        if plans is not None and x.numel() <= MAX_ROWS * hidden:
            if recorded:
                found = _apply(x, residual, gate, weight, bias, eps, plans, cutile.forward)
            else:
                found = cutile.forward(plans.inference, x, residual, gate, weight, bias, eps)
            if x is input:
                parameters = [t.dim() for t in (weight, bias) if t is not None]
                fixed = max([len(normalized_shape), *parameters])
                prepare(known, tensors, fixed, hidden, eps, plans)
            return found[:2]
    if is_transformed():
        spec = spec_of_tensors(x, residual, gate, weight, bias, *how)
        if torch.compiler.is_compiling():
            refuse_transformed(op, backend)  # a graph has no place for a warning
        else:
            select_transformed(spec, device_of(x.device.type, x.get_device()), backend)
        return reference.forward(spec, x, residual, gate, weight, bias, eps)[:2]
    return torch.ops.tilenorm.norm(x, residual, gate, weight, bias, *how, recorded, backend)[:2]


_autocast = torch.is_autocast_enabled  # for CUDA; given a device's name it takes twice as long
_current_device = cutile.current_device


def _is_current(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.get_device() == _current_device()


def _is_served(tensor: Tensor, *others: Tensor | None) -> bool:
    """Eager tensors on the current CUDA device that nothing else wants to see."""
    if torch.compiler.is_compiling() or not _is_current(tensor):
        return False
    return is_plain(tensor, *others)


class _Norm(Function):
    @staticmethod
    def forward(ctx, x, residual, gate, weight, bias, eps, plans, forward):
        y, total, mean, rstd = forward(plans.training, x, residual, gate, weight, bias, eps)
        ctx.save_for_backward(x if total is None else total, gate, weight, bias, mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.plans = eps, plans
        return y, total

    @staticmethod
    def backward(ctx, dy, dsum):
        mask, plans, saved = ctx.needs_input_grad, ctx.plans, ctx.saved_tensors
        if dy is None or torch.is_grad_enabled() or not _is_served(dy, dsum):
            spec, of = plans.spec, (plans.added, plans.dtype)
            how = (spec.norm, spec.hidden, ctx.eps, spec.offset, spec.gate_first, spec.rounding)
            grads = library.gradients(dy, dsum, saved, *of, how, mask[:5], plans.backend)
            return *grads, None, None, None
        plan, sort = plans.gradients(mask, dsum is not None)
        return sort((*cutile.backward(plan, dy, dsum, *saved), None))


# Past the Python half of Function.apply, which looks for the transforms that is_plain excludes.
_apply = super(Function, _Norm).apply
# And past the Python half of the backward pass, which finds this function by its name.
_Norm._backward_cls.apply = _Norm.backward
