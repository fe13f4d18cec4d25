"""From a function's arguments to an implementation; and the short way of eager CUDA tensors."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.nn import Parameter

from ..launch.plan import plan_backward, plan_forward
from ..spec import norm_of
from . import arguments, cutile, library, reference
from .registry import MAX_ROWS, device_of, refuse_transformed, select, select_transformed


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
    norm = norm_of(op)
    others = {}
    if op.startswith("add"):
        others["residual"] = residual
    elif op.startswith("gated"):
        others["gate"] = gate
    hidden, heads = arguments.check(
        op, input, normalized_shape, weight, bias, eps, offset, rounding, backend, **others
    )
    if _autocast() and input.is_cuda:
        input = library.autocast_input(input, norm)
    eps = arguments.default_eps(input, residual) if eps is None else float(eps)
    offset = float(offset)
    needs_grad = torch.is_grad_enabled() and (
        input.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
        or (gate is not None and gate.requires_grad)
    )
    if _is_plain(input, residual, gate, weight, bias):
        plans = _plans(
            norm,
            hidden,
            input.dtype,
            None if residual is None else residual.dtype,
            None if gate is None else gate.dtype,
            None if weight is None else weight.dtype,
            None if bias is None else bias.dtype,
            offset,
            gate_first,
            heads,
            rounding,
            input.get_device(),
            backend,
        )
        if plans is not None and input.numel() <= MAX_ROWS * hidden:
            if needs_grad:
                return _apply(input, residual, gate, weight, bias, eps, plans)
            return cutile.forward(plans.inference, input, residual, gate, weight, bias, eps)[:2]
    how = (norm, hidden, eps, offset, gate_first, rounding)
    if _is_transformed():
        spec = library.spec_of_tensors(input, residual, gate, weight, bias, *how)
        if torch.compiler.is_compiling():
            refuse_transformed(op, backend)  # a graph has no place for a warning
        else:
            select_transformed(spec, device_of(input.device.type, input.get_device()), backend)
        return reference.forward(spec, input, residual, gate, weight, bias, eps)[:2]
    return torch.ops.tilenorm.norm(input, residual, gate, weight, bias, *how, needs_grad, backend)[
        :2
    ]


_autocast = torch.is_autocast_enabled  # for CUDA; given a device's name it takes twice as long
_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_Transform = torch._C._functorch.CInterpreter
_current_device = getattr(torch._C, "_cuda_getDevice", None)  # absent from a CPU build


class Plans:
    """What eager calls of one spec on one device need, found once."""

    def __init__(self, spec, target, backend):
        self.spec, self.backend = spec, backend
        self.inference = plan_forward(spec, target, False)
        self.training = plan_forward(spec, target, True)
        self.backward = cache(lambda needs: plan_backward(spec, target, needs))


@cache
def _plans(
    norm, hidden, dtype, residual, gate, weight, bias, offset, gate_first, heads, rounding, index,
    backend,
) -> Plans | None:  # fmt: skip
    """Plans if the kernels serve, else None: the op then decides, warns or raises."""
    dtypes = (dtype, residual, gate, weight, bias)
    spec = library.spec_of(norm, hidden, *dtypes, offset, gate_first, heads, rounding)
    device = device_of("cuda", index)
    if select(spec, 0, device, backend) != "cutile":
        return None
    return Plans(spec, device.target, backend)


def _is_transformed() -> bool:
    """Whether torch.func or forward-mode derivatives want to see single operations."""
    # A compiler takes `is not None` for true here.
    return isinstance(_transforms(), _Transform) or forward_ad._current_level >= 0


def _is_plain(tensor: Tensor, *others: Tensor | None) -> bool:
    """Eager tensors on the current CUDA device that no compiler, mode or subclass wants to see."""
    if torch.compiler.is_compiling() or _modes() or _is_transformed():
        return False
    if not tensor.is_cuda or tensor.get_device() != _current_device():
        return False
    if type(tensor) is not Tensor and type(tensor) is not Parameter:
        return False
    for other in others:
        if not (other is None or type(other) is Parameter or type(other) is Tensor):
            return False
    return True


class _Norm(Function):
    @staticmethod
    def forward(ctx, x, residual, gate, weight, bias, eps, plans):
        y, total, mean, rstd = cutile.forward(plans.training, x, residual, gate, weight, bias, eps)
        ctx.save_for_backward(x if total is None else total, gate, weight, bias, mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.plans = eps, plans
        ctx.added = None if total is None else total.dtype
        ctx.dtype = x.dtype
        return y, total

    @staticmethod
    def backward(ctx, dy, dsum):
        mask = ctx.needs_input_grad[:5]
        added, dtype, plans = ctx.added, ctx.dtype, ctx.plans
        if dy is None or torch.is_grad_enabled() or not _is_plain(dy, dsum):
            spec = plans.spec
            how = (spec.norm, spec.hidden, ctx.eps, spec.offset, spec.gate_first, spec.rounding)
            saved = ctx.saved_tensors
            grads = library.gradients(dy, dsum, saved, added, dtype, how, mask, plans.backend)
            return *grads, None, None
        x, gate, weight, bias, mean, rstd = ctx.saved_tensors
        plan = plans.backward(library.merged_needs(dtype, added, gate, weight, bias, dsum, mask))
        grads = cutile.backward(plan, dy, dsum, x, gate, weight, bias, mean, rstd)
        return *library.spread(grads, added, dtype, mask), None, None


# Past the Python half of Function.apply, which looks for the transforms that _is_plain excludes.
_apply = super(Function, _Norm).apply
