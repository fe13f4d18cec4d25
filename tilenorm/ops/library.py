"""The torch.library ops: functional, with fakes and autograd, for graphs and for every mode.

One pair serves every normalisation; what it is travels as arguments. Eager calls on plain CUDA
tensors take the shorter way of dispatch.py to the same kernels.
"""

import torch
from torch import Tensor
from torch.autograd import Function

from . import reference
from .implementation import bind_norm, bind_norm_backward, norm_backward, norm_forward, stat_dtype
from .inductor import call_directly
from .plain import is_plain, needs_grad
from .plans import computed, merged_needs, spec_of_tensors, spread

LIBRARY = torch.library.Library("tilenorm", "DEF")
_HOW = (
    "str norm, SymInt hidden, float eps, float offset, bool gate_first, str rounding,"
    " {}, str? backend=None"
)
LIBRARY.define(
    "norm(Tensor input, Tensor? residual, Tensor? gate, Tensor? weight, Tensor? bias,"
    f" {_HOW.format('bool save')}) -> (Tensor output, Tensor sum, Tensor mean, Tensor rstd)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define(
    "norm_backward(Tensor grad_output, Tensor? grad_sum, Tensor input, Tensor? gate,"
    " Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, bool added,"
    f" {_HOW.format('bool[5] output_mask')}) -> (Tensor grad_input, Tensor grad_residual,"
    " Tensor grad_gate, Tensor grad_weight, Tensor grad_bias)",
    tags=(torch.Tag.pt2_compliant_tag,),
)

# Norms that PyTorch's autocast computes in float32 on CUDA, RMSNorm from 2.12 on; none on the CPU.
AUTOCAST_NORMS = tuple(
    norm
    for norm in ("rms", "layer")
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{norm}_norm", "AutocastCUDA")
)


def norm_forward_fake(
    x, residual, gate, weight, bias,
    norm, hidden, eps, offset, gate_first, rounding, save, backend=None,
):  # fmt: skip
    call_directly("norm", bind_norm, 5)
    rows = x.numel() // hidden if save and hidden else 0
    dtype = stat_dtype(x, residual)
    total = x.new_empty(0) if residual is None else x.new_empty(x.shape, dtype=residual.dtype)
    mean = x.new_empty(rows if norm == "layer" else 0, dtype=dtype)
    return x.new_empty(x.shape), total, mean, x.new_empty(rows, dtype=dtype)


def norm_backward_fake(
    dy, dsum, x, gate, weight, bias, mean, rstd, added,
    norm, hidden, eps, offset, gate_first, rounding, output_mask, backend=None,
):  # fmt: skip
    call_directly("norm_backward", bind_norm_backward, 8)
    residual = x.dtype if added else None
    needs = merged_needs(dy.dtype, residual, gate, weight, bias, dsum, output_mask)
    return tuple(
        like.new_empty(like.shape) if need else x.new_empty(0)
        for need, like in zip(computed(needs), (dy, x, gate, weight, bias), strict=True)
    )


def norm_autocast(x, residual, gate, weight, bias, norm, *how):
    with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
        x = autocast_input(x, norm)
        return torch.ops.tilenorm.norm(x, residual, gate, weight, bias, norm, *how)


def autocast_input(x: Tensor, norm: str) -> Tensor:
    """x as PyTorch's own norm gets it under autocast: in float32, and then so is the output.

    The others stay: a sum keeps the residual's dtype, and the kernels take parameters of any.
    """
    return x.float() if norm in AUTOCAST_NORMS and x.dtype != torch.float64 else x


class _Norm(Function):
    @staticmethod
    def forward(ctx, *inputs):
        x, residual, gate, weight, bias, *ctx.how, save, ctx.backend = inputs
        found = _below_autograd(*inputs)
        _, total, mean, rstd = found
        ctx.added = None if residual is None else residual.dtype
        ctx.dtype = x.dtype
        saved = total if residual is not None else x
        ctx.save_for_backward(saved, gate, weight, bias, *((mean, rstd) if save else (None, None)))
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(ctx, dy, dsum, *_):
        mask = ctx.needs_input_grad[:5]
        how = (ctx.added, ctx.dtype, ctx.how, mask, ctx.backend)
        return *gradients(dy, dsum, ctx.saved_tensors, *how), *(None,) * 8


def norm_autograd(
    x, residual, gate, weight, bias,
    norm, hidden, eps, offset, gate_first, rounding, save, backend=None,
):  # fmt: skip
    """As torch.library.register_autograd makes it, which takes 8 µs where no gradient is asked for,
    in every call of compiled code."""
    tensors = (x, residual, gate, weight, bias)
    inputs = (*tensors, norm, hidden, eps, offset, gate_first, rounding, save, backend)
    if needs_grad(*tensors):
        return _Norm.apply(*inputs)
    if is_plain(*tensors):
        return norm_forward(*inputs)
    return _below_autograd(*inputs)


def _below_autograd(*inputs):
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.tilenorm.norm(*inputs)


def gradients(dy, dsum, saved, added, dtype, how, mask, backend) -> tuple[Tensor | None, ...]:
    """Gradients of input, residual, gate, weight and bias, None where the mask is false.

    Differentiable again under create_graph. saved: x, or the sum, gate, weight, bias, mean, rstd.
    added: the residual's dtype. how: what the op takes between its tensors and `save`.
    """
    x, gate, weight, bias, mean, rstd = saved
    dsum = dsum if added is not None else None
    if dy is None:
        return through_sum(dsum, added, dtype, mask)
    if needs_grad(dy, dsum, x, gate, weight, bias):
        needs = merged_needs(dtype, added, gate, weight, bias, dsum, mask)
        spec = spec_of_tensors(dy, None if added is None else x, gate, weight, bias, *how)
        eps = how[2]
        grads = reference.backward(spec, needs, dy, dsum, x, gate, weight, bias, None, None, eps)
    else:
        if rstd is None:
            raise RuntimeError("tilenorm::norm: save was False, its backward needs it; pass True")
        grads = torch.ops.tilenorm.norm_backward(
            dy, dsum, x, gate, weight, bias, mean, rstd, added is not None, *how, mask, backend
        )
    return spread(grads, added, dtype, mask)


def through_sum(dsum, added, dtype, mask) -> tuple[Tensor | None, ...]:
    """The gradients where only the sum was used: copies, for dsum is the caller's."""
    if dsum is None:
        return (None,) * 5
    dtypes = (dtype, added)
    both = (dsum.to(d, copy=True) if m else None for d, m in zip(dtypes, mask[:2], strict=True))
    return *both, None, None, None


for key in ("CPU", "CUDA"):
    LIBRARY.impl("norm", norm_forward, key)
    LIBRARY.impl("norm_backward", norm_backward, key)
AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
LIBRARY.impl("norm", norm_autocast, "AutocastCUDA")
torch.library.register_fake("tilenorm::norm", norm_forward_fake, lib=LIBRARY)
torch.library.register_fake("tilenorm::norm_backward", norm_backward_fake, lib=LIBRARY)
LIBRARY.impl("norm", norm_autograd, "Autograd")
