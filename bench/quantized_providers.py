"""The providers of ``python -m bench quantized``.

Each is a function of the scaling, of whether a residual is added and of whether y is returned. It
returns a function of x, the residual if one is added, the weight, and the caller's scale, or None
if the provider has no such norm. That function returns the codes, the decoding scales if it writes
them, the sum if there is one, and y if it was asked for. A peer library is imported when it is
first needed.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.formulas import EPS
from bench.providers import compiled

FP8, MOST = torch.float8_e4m3fn, 448.0
LEAST_PEAK = 1e-12  # a row of zeros has a finite scale, too
SCALINGS = {"row": 0, "block": 128, "tensor": 0}  # elements that share a scale; 0: all of a row


def quantize(y: Tensor, static: Tensor, scaling: str) -> tuple[Tensor, ...]:
    """The codes and the decoding scales of rows, as training code in PyTorch computes them.

    With the caller's scale, ``static``, there are only codes.
    """
    if scaling == "tensor":
        return (saturated(y.float() * static.reciprocal()),)
    groups = y.float().unflatten(-1, (-1, SCALINGS[scaling] or y.shape[-1]))
    factor = MOST / groups.abs().amax(-1, keepdim=True).clamp(min=LEAST_PEAK)
    return saturated(groups * factor).flatten(-2), factor.reciprocal().squeeze(-1)


def saturated(scaled: Tensor) -> Tensor:
    """PyTorch's own cast does not saturate before 2.12."""
    return scaled.clamp(-MOST, MOST).to(FP8)


def norm_of(norm: Callable, add_norm: Callable, added: bool) -> Callable:
    """A function of x, the residual if one is added, and the weight: y and the sum if there is one.

    norm, add_norm: of these tensors, as tilenorm's.
    """

    def plain(x, w):
        return (norm(x, x.shape[-1:], w, EPS),)

    def with_residual(x, r, w):
        return add_norm(x, r, x.shape[-1:], w, EPS)

    return with_residual if added else plain


def pytorch_norm(added: bool) -> Callable:
    def add_norm(x, r, shape, w, eps):
        total = x + r
        return F.rms_norm(total, shape, w, eps), total

    return norm_of(F.rms_norm, add_norm, added)


def composed(norm: Callable, casting: Callable, output: bool) -> Callable:
    def run(*tensors):
        *given, static = tensors
        y, *total = norm(*given)
        return *casting(y, static), *total, *[y] * output

    return run


def _tilenorm(scaling: str, added: bool, output: bool) -> Callable:
    import tilenorm as tn

    function: Callable = tn.add_rms_norm_quantized if added else tn.rms_norm_quantized
    static = scaling == "tensor"

    def run(*tensors):
        *rows, w, scale = tensors
        how = {"scaling": scaling, "return_output": output, "scale": scale if static else None}
        found = function(*rows, w.shape, w, EPS, **how)
        last = (*[found.residual_out] * added, *[found.output] * output)
        return found.q, *[found.scale] * (not static), *last

    return run


def _torch(scaling: str, added: bool, output: bool) -> Callable:
    return composed(pytorch_norm(added), partial(quantize, scaling=scaling), output)


def _compile(scaling: str, added: bool, output: bool) -> Callable:
    return compiled(_torch(scaling, added, output))


def _tilenorm_and_cast(scaling: str, added: bool, output: bool) -> Callable:
    import tilenorm as tn

    norm = norm_of(tn.rms_norm, tn.add_rms_norm, added)
    return composed(norm, compiled(partial(quantize, scaling=scaling)), output)


def _vllm(scaling: str, added: bool, output: bool) -> Callable | None:
    from vllm import _custom_ops

    if scaling != "row" or added or output:  # its residual is overwritten
        return None
    return lambda x, w, scale: _custom_ops.rms_norm_dynamic_per_token_quant(x, w, EPS, FP8)


def _flashinfer(scaling: str, added: bool, output: bool) -> Callable | None:
    from flashinfer import norm

    def by_tensor(*tensors):
        x, *residual, w, scale = tensors
        q = torch.empty_like(x, dtype=FP8)
        function = norm.fused_add_rmsnorm_quant if added else norm.rmsnorm_quant
        function(q, x, *residual, w, scale, EPS)
        return q, *residual

    def by_block(x, residual, w, scale):
        rows, groups = len(x), x.shape[-1] // SCALINGS["block"]
        q, y = torch.empty_like(x, dtype=FP8), torch.empty_like(x)
        scales = x.new_empty(groups, -(-rows // 4) * 4, dtype=torch.float32)
        norm.fused_add_rmsnorm_fp8_block_quant(q, scales, y, x, residual, w, EPS)
        return q, scales.T[:rows], residual, y

    if (scaling, added, output) == ("block", True, True):  # y and the sum are always written
        return by_block
    return by_tensor if (scaling, output) == ("tensor", False) else None


PROVIDERS = {
    "tilenorm": _tilenorm,
    "torch": _torch,
    "compile": _compile,
    "tilenorm+cast": _tilenorm_and_cast,
    "vllm": _vllm,
    "flashinfer": _flashinfer,
}
