"""The torch.library ops: functional, with fakes and autograd, for graphs and for every mode.

Eager calls on plain CUDA tensors take the shorter way of functional.py to the same kernels.
"""

import torch
from torch import Tensor

from ..launch.plan import Needs, plan_backward, plan_forward
from ..spec import NormSpec
from . import cutile, reference
from .registry import device_of, select

LIBRARY = torch.library.Library("tilenorm", "DEF")
LIBRARY.define(
    "rms_norm(Tensor input, Tensor? weight, Tensor? bias, SymInt hidden, float eps, float offset,"
    " bool save, str? backend=None) -> (Tensor output, Tensor rstd)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define(
    "rms_norm_backward(Tensor grad_output, Tensor input, Tensor? weight, Tensor? bias, Tensor rstd,"
    " SymInt hidden, float eps, float offset, bool[3] output_mask, str? backend=None)"
    " -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def spec_of(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, hidden: int, offset: float
) -> NormSpec:
    """The spec of an RMSNorm over the last `hidden` elements of x."""
    names = [None if t is None else str(t.dtype).removeprefix("torch.") for t in (x, weight, bias)]
    return NormSpec("rms", hidden, *names, offset)


def rms_norm_forward(x, weight, bias, hidden, eps, offset, save, backend=None):
    spec = spec_of(x, weight, bias, hidden, offset)
    device = device_of(x.device.type, x.device.index)
    rows = x.numel() // hidden if hidden else 0
    if select("rms_norm", spec, rows, device, backend) == "cutile":
        plan = plan_forward(spec, device.target, save)
        with torch.cuda.device(x.device):
            y, rstd = cutile.forward(plan, x, weight, bias, eps)
    else:
        y, rstd = reference.rms_norm(x, weight, bias, hidden, eps, offset)
    return y, rstd if save else x.new_empty(0, dtype=_stat_dtype(x))


def rms_norm_backward(dy, x, weight, bias, rstd, hidden, eps, offset, output_mask, backend=None):
    needs = _needs(weight, bias, output_mask)
    spec = spec_of(x, weight, bias, hidden, offset)
    device = device_of(x.device.type, x.device.index)
    rows = x.numel() // hidden if hidden else 0
    if select("rms_norm", spec, rows, device, backend) == "cutile":
        plan = plan_backward(spec, device.target, needs)
        with torch.cuda.device(x.device):
            grads = cutile.backward(plan, dy, x, weight, bias, rstd)
    else:
        grads = reference.rms_norm_backward(dy, x, weight, bias, rstd, hidden, eps, offset, needs)
    return tuple(x.new_empty(0) if g is None else g for g in grads)


def rms_norm_fake(x, weight, bias, hidden, eps, offset, save, backend=None):
    y = x.new_empty(x.shape)
    rows = x.numel() // hidden if save and hidden else 0
    return y, x.new_empty(rows, dtype=_stat_dtype(x))


def rms_norm_backward_fake(
    dy, x, weight, bias, rstd, hidden, eps, offset, output_mask, backend=None
):
    needs = _needs(weight, bias, output_mask)
    inputs = zip(needs, (x, weight, bias), strict=True)
    return tuple(t.new_empty(t.shape) if need else x.new_empty(0) for need, t in inputs)


def setup_context(ctx, inputs, output):
    x, weight, bias, *ctx.rest, save, ctx.backend = inputs
    ctx.save_for_backward(x, weight, bias, output[1] if save else None)
    ctx.set_materialize_grads(False)


def backward(ctx, dy, _):
    x, weight, bias, rstd = ctx.saved_tensors
    no_grads = (None,) * 5
    if dy is None:
        return None, None, None, *no_grads
    mask = [ctx.needs_input_grad[i] for i in range(3)]
    return *gradients(dy, x, weight, bias, rstd, *ctx.rest, mask, ctx.backend), *no_grads


def gradients(dy, x, weight, bias, rstd, hidden, eps, offset, mask, backend):
    """dx, dW and dB, None where the mask is false; differentiable again under create_graph."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (dy, x, weight)):
        needs = _needs(weight, bias, mask)
        return reference.rms_norm_backward(dy, x, weight, bias, None, hidden, eps, offset, needs)
    if rstd is None:
        raise RuntimeError("tilenorm::rms_norm: save was False, its backward needs rstd; pass True")
    grads = torch.ops.tilenorm.rms_norm_backward(
        dy, x, weight, bias, rstd, hidden, eps, offset, mask, backend
    )
    return tuple(g if asked else None for g, asked in zip(grads, mask, strict=True))


def _needs(weight, bias, mask) -> Needs:
    dx, dw, db = mask
    return Needs(bool(dx), bool(dw and weight is not None), bool(db and bias is not None))


def _stat_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


for key in ("CPU", "CUDA"):
    LIBRARY.impl("rms_norm", rms_norm_forward, key)
    LIBRARY.impl("rms_norm_backward", rms_norm_backward, key)
torch.library.register_fake("tilenorm::rms_norm", rms_norm_fake, lib=LIBRARY)
torch.library.register_fake("tilenorm::rms_norm_backward", rms_norm_backward_fake, lib=LIBRARY)
torch.library.register_autograd(
    "tilenorm::rms_norm", backward, setup_context=setup_context, lib=LIBRARY
)
