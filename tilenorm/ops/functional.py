"""tilenorm.rms_norm, and the short way that eager calls on plain CUDA tensors take."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.nn import Parameter

from ..launch.plan import Needs, plan_backward, plan_forward
from . import arguments, cutile, library, reference
from .registry import MAX_ROWS, device_of, select, select_transformed


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    """Root mean square normalisation over the trailing dimensions, as torch.nn.functional.rms_norm.

        y = x / sqrt(mean(x²) + eps) · (weight + offset) + bias

    after Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), computed in float32
    (float64 for a float64 input) and rounded once.

    Args:
        input: (..., *normalized_shape), float16, bfloat16, float32 or float64.
        normalized_shape: the trailing sizes that are normalised together.
        weight: of shape normalized_shape, in the input's dtype or another floating-point dtype.
        eps: added to the mean square; None is the machine epsilon of float32 (of float64 for a
            float64 input), which is what PyTorch takes.
        bias: of shape normalized_shape. PyTorch's function has none.
        offset: added to the weight, 1.0 for weights stored around zero.
        backend: "cutile" or "reference" to insist on one; None chooses (see tilenorm.explain).

    Returns:
        A contiguous tensor of the input's shape and dtype. Differentiable in input, weight and
        bias, to any order. torch.func's transforms and forward-mode derivatives run the reference.

    Raises:
        TypeError, RuntimeError, NotImplementedError: an argument of the wrong type, shape, device
            or dtype; nothing has been launched then.
        RuntimeError: the backend asked for cannot serve, with the reason.
        ValueError: an unknown backend.
    """
    hidden = arguments.check(
        "rms_norm", input, normalized_shape, weight, bias, eps, offset, backend
    )
    eps = arguments.default_eps(input.dtype) if eps is None else float(eps)
    offset = float(offset)
    needs_grad = torch.is_grad_enabled() and (
        input.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    )
    if _is_plain(input, weight, bias):
        plans = _plans(
            hidden,
            input.dtype,
            None if weight is None else weight.dtype,
            None if bias is None else bias.dtype,
            offset,
            input.get_device(),
            backend,
        )
        if plans is not None and input.numel() <= MAX_ROWS * hidden:
            if needs_grad:
                return _apply(input, weight, bias, eps, plans)
            return cutile.forward(plans.inference, input, weight, bias, eps)[0]
    if _is_transformed():
        spec = library.spec_of(input, weight, bias, hidden, offset)
        select_transformed(
            "rms_norm", spec, device_of(input.device.type, input.get_device()), backend
        )
        return reference.rms_norm(input, weight, bias, hidden, eps, offset)[0]
    return torch.ops.tilenorm.rms_norm(
        input, weight, bias, hidden, eps, offset, needs_grad, backend
    )[0]


_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_current_device = getattr(torch._C, "_cuda_getDevice", None)  # absent from a CPU build


class _Plans:
    """What eager calls of one spec on one device need, found once."""

    def __init__(self, spec, target, backend):
        self.spec, self.backend = spec, backend
        self.inference = plan_forward(spec, target, False)
        self.training = plan_forward(spec, target, True)
        self.backward = cache(lambda needs: plan_backward(spec, target, Needs(*needs)))


@cache
def _plans(hidden, dtype, weight, bias, offset, index, backend) -> _Plans | None:
    """Plans if the kernels serve, else None: the op then decides, warns or raises."""
    like = [None if d is None else torch.empty(0, dtype=d) for d in (dtype, weight, bias)]
    spec = library.spec_of(*like, hidden, offset)
    device = device_of("cuda", index)
    if select("rms_norm", spec, 0, device, backend) != "cutile":
        return None
    return _Plans(spec, device.target, backend)


def _is_transformed() -> bool:
    """Whether torch.func or forward-mode derivatives want to see single operations."""
    if torch.compiler.is_compiling():
        return False
    return _transforms() is not None or forward_ad._current_level >= 0


def _is_plain(tensor: Tensor, *parameters: Tensor | None) -> bool:
    """Eager tensors on the current CUDA device that no compiler, mode or subclass wants to see."""
    if torch.compiler.is_compiling() or _modes() or _is_transformed():
        return False
    if not tensor.is_cuda or tensor.get_device() != _current_device():
        return False
    if type(tensor) is not Tensor and type(tensor) is not Parameter:
        return False
    for parameter in parameters:
        if not (parameter is None or type(parameter) is Parameter or type(parameter) is Tensor):
            return False
    return True


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, plans):
        y, rstd = cutile.forward(plans.training, x, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, rstd)
        ctx.eps, ctx.plans = eps, plans
        ctx.plan = plans.backward(ctx.needs_input_grad[:3])
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias, rstd = ctx.saved_tensors
        plan = ctx.plan
        if _is_plain(dy) and not torch.is_grad_enabled():
            dx, dw, db = cutile.backward(plan, dy, x, weight, bias, rstd)
        else:
            affine = (plan.spec.hidden, ctx.eps, plan.spec.offset)
            backend = ctx.plans.backend
            dx, dw, db = library.gradients(
                dy, x, weight, bias, rstd, *affine, list(plan.needs), backend
            )
        return dx, dw, db, None, None


# Past the Python half of Function.apply, which looks for the transforms that _is_plain excludes.
_apply = super(Function, _RMSNorm).apply
