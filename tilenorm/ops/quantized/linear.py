"""A norm whose quantised rows a linear multiplies: one autograd Function, which keeps no y.

    y = norm(x)        output = y @ weightᵀ + linear_bias

    forward   q and scale of y, in one pass over x; the weight quantised by rows; their product
    kept      x, rstd (and mean), the parameters
    backward  dy = g @ weight in g's dtype, and from dy the norm's own backward pass
              dweight = gᵀ @ y: gᵀ and yᵀ are quantised along the rows of x, 128 to a scale, yᵀ from
              x and rstd in one pass; their product

Gradients go through the quantisations as if they were not there.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd import Function
from torch.compiler import is_compiling

from ...spec import NormSpec, Options, Quantization
from ..autograd import needs_grad
from ..cutile import on_device_of
from ..direct import in_onnx_export
from ..plans import runner_of, spec_of_tensors
from ..schemas import LIBRARY
from ..tensors import Saved, Tensors
from ..torch_private import asked_of, reshaped
from . import product, transposed
from .library import Call, arguments_of, norm_quantized_decomposed
from .norm import check
from .reference import quantize

SCALINGS = ("row", "block")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
UNIT = 16  # F.scaled_mm takes matrices whose sizes are multiples of it
# Of the spec by which the implementation of transposed.py is selected.
SELECTS = Quantization("row")

LIBRARY.define(
    "norm_linear_weight_gradient(Tensor grad_output, Tensor input, Tensor? weight, Tensor? bias,"
    " Tensor? mean, Tensor rstd, SymInt hidden, str norm, float offset, str rounding, float eps,"
    " ScalarType dtype, str? backend=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def norm_linear(name: str, x, affine: tuple, linear: tuple, asked: tuple, scaling: str) -> Tensor:
    """The linear of the quantised norm of x.

    name: of the caller, for messages; it has "layer" in it for a LayerNorm. affine: the norm's
    weight and bias, or None. linear: its weight (out, in), and its bias or None. asked: eps, offset
    and rounding. scaling: "row" or "block".

    Raises as norm.check does, ValueError for another scaling, RuntimeError for a linear whose
    shapes or device do not fit, and NotImplementedError for dtypes that are not served.
    """
    check_sizes(name, *linear[0].shape, scaling)
    eps, *asked = asked
    how = (scaling, torch.float8_e4m3fn, False, None, False, False)
    shape = tuple(linear[0].shape[-1:])
    with product.without_autocast(x):  # which would have the norm read a copy of x in float32
        call = check(name, (x, None, None, *affine), shape, eps, asked, how, None, None)
    _check_tensors(name, x, affine, linear)
    kind = x.device.type
    cast = kind in product.AUTOCAST and torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if cast else x.dtype
    given = (x, *affine, *linear)
    if not needs_grad(*given) or in_onnx_export():
        return _forward(call._replace(save=False), dtype, *given)[0]
    call = call._replace(save=True, tensors=None)
    return NormLinear.apply(call, dtype, *given)


def check_sizes(name: str, out: int, size: int, scaling: str) -> None:
    """Check what a linear of a quantised norm is made with.

    Raises ValueError for an unknown scaling, and for sizes that products of 8-bit floats or groups
    of 128 elements do not take.
    """
    if not isinstance(scaling, str) or scaling not in SCALINGS:
        takes = " or ".join(map(repr, SCALINGS))
        raise ValueError(f"{name}: argument 'scaling' takes {takes}, got {scaling!r}")
    unit = 128 if scaling == "block" else UNIT
    for argument, given, of in (("in_features", size, unit), ("out_features", out, UNIT)):
        if given <= 0 or given % of:
            raise ValueError(
                f"{name}: argument {argument!r} takes a multiple of {of} with"
                f" scaling={scaling!r}, got {given}"
            )


def _check_tensors(name: str, x: Tensor, affine: tuple, linear: tuple) -> None:
    names = ("input", "norm.weight", "norm.bias", "linear.weight", "linear.bias")
    takes = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
    for argument, tensor in zip(names, (x, *affine, *linear), strict=True):
        if tensor is None:
            continue
        if tensor.dtype not in DTYPES:
            raise NotImplementedError(f"{name}: {argument!r} takes {takes}, got {tensor.dtype}")
        if tensor.device != x.device:
            raise RuntimeError(
                f"{name}: {argument!r} takes the input's device {x.device}, got {tensor.device}"
            )


class NormLinear(Function):
    """Of a Call without tensors, the output's dtype, x, and the parameters of norm and linear."""

    @staticmethod
    def forward(ctx, call, dtype, x, norm_weight, norm_bias, weight, bias):
        y, mean, rstd = _forward(call, dtype, x, norm_weight, norm_bias, weight, bias)
        ctx.save_for_backward(x, norm_weight, norm_bias, mean, rstd, weight)
        ctx.call, ctx.bias_dtype = call, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx, g):
        if torch.is_grad_enabled() and not is_compiling():
            raise RuntimeError(
                "QuantizedNormLinear has no second derivative: it takes no create_graph"
            )
        x, norm_weight, norm_bias, mean, rstd, weight = ctx.saved_tensors
        _, _, *affine, asked_weight, asked_bias = asked_of(ctx)
        call, rows = ctx.call, g.reshape(-1, g.shape[-1])
        saved = (x, None, norm_weight, norm_bias, mean, rstd)
        dx = dw = db = dweight = dbias = None
        if any(affine):
            dy = (rows @ weight.to(g.dtype)).to(x.dtype).view(x.shape)
            mask = [affine[0], False, False, *affine[1:]]
            found = torch.ops.tilenorm.norm_backward(
                dy, None, *saved, *call.options, call.eps, False, mask, call.backend
            )
            found = [t if asked else None for t, asked in zip(found[:5], mask, strict=True)]
            dx, _, _, dw, db = found
        if asked_weight:
            options = (*call.options[:3], call.options.rounding, call.eps)
            dweight = torch.ops.tilenorm.norm_linear_weight_gradient(
                rows, x, *saved[2:], *options, weight.dtype, call.backend
            )
        if asked_bias:
            dbias = rows.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return None, None, dx, dw, db, dweight, dbias


def _forward(call: Call, dtype, x, norm_weight, norm_bias, weight, bias) -> tuple:
    """The output, and mean and rstd, or None for each that is not saved."""
    hidden, lead = call.options.hidden, x.shape[:-1]
    norm, multiply = torch.ops.tilenorm.norm_quantized, torch.ops.tilenorm.scaled_product
    if in_onnx_export():  # ONNX Runtime reshapes no 8-bit floats
        norm, multiply = norm_quantized_decomposed, product.scaled_product_decomposed
        x = x.reshape(-1, hidden)
    call = call._replace(tensors=Tensors(x, None, None, norm_weight, norm_bias))
    q, scale, *_, mean, rstd = norm(*arguments_of(call))
    spec = NormSpec("rms", hidden, "float32", quantized=call.how)  # for a dtype of any kind
    codes, scales, _ = quantize(spec, weight)
    q = q if q.dim() == 2 else q.view(-1, hidden)
    y = multiply(q, codes, scale, scales, bias, dtype)
    y = reshaped(y, (*lead, weight.shape[0]))
    return y, mean if call.save and call.options.norm == "layer" else None, rstd


def weight_gradient(
    g, x, weight, bias, mean, rstd, hidden, norm, offset, rounding, eps, dtype, backend=None
) -> Tensor:
    """The op: gᵀ @ y, (out, hidden), for g (M, out) and x, whose normalised rows are y.

    Both are quantised along M. On a GPU without a product of 8-bit floats in blocks, y is computed
    again in x's dtype, and multiplied in g's.
    """
    options = Options(hidden, norm, offset, False, rounding)
    if not g.shape[0]:
        return g.new_zeros((g.shape[1], hidden), dtype=dtype)
    if product.refused(True, x.device):
        tensors = (x, None, None, weight, bias)
        y = torch.ops.tilenorm.norm(*tensors, *options, eps, False, backend)[0]
        return (g.t() @ y.reshape(-1, hidden).to(g.dtype)).to(dtype)
    with on_device_of(x):
        none = (None,) * 5
        outer = _transposed(Saved(g, *none), Options(g.shape[1], "rms"), eps, backend)
        saved = Saved(x, None, weight, bias, mean, rstd)
        inner = _transposed(saved, options, eps, backend)
    (a, scale_a), (b, scale_b) = outer, inner
    return torch.ops.tilenorm.scaled_product(a, b, scale_a, scale_b, None, dtype)


def weight_gradient_decomposed(
    g, x, weight, bias, mean, rstd, hidden, norm, offset, rounding, eps, dtype, backend=None
) -> Tensor:
    """The op in PyTorch's own operators, for tensors on any device."""
    if not g.shape[0]:
        return g.new_zeros((g.shape[1], hidden), dtype=dtype)
    outer = Saved(g, *(None,) * 5), Options(g.shape[1], "rms")
    inner = Saved(x, None, weight, bias, mean, rstd), Options(hidden, norm, offset, False, rounding)
    made = []
    for saved, options in (outer, inner):
        spec = spec_of_tensors(Tensors(saved.x, weight=saved.weight, bias=saved.bias), options)
        made.append(transposed.reference(replace(spec, quantized=SELECTS), saved, eps))
    (a, scale_a), (b, scale_b) = made
    return product.scaled_product_decomposed(a, b, scale_a, scale_b, None, dtype)


def _transposed(saved: Saved, options: Options, eps: float, backend) -> tuple[Tensor, Tensor]:
    """Codes and scales of a matrix or of normalised rows, by whatever serves it."""
    tensors = Tensors(saved.x, None, None, saved.weight, saved.bias)
    return runner_of(tensors, options, backend, SELECTS).transposed(saved, eps)


def weight_gradient_fake(g, x, weight, bias, mean, rstd, hidden, *others) -> Tensor:
    return g.new_empty((g.shape[1], hidden), dtype=others[4])


for key in ("CPU", "CUDA"):
    LIBRARY.impl("norm_linear_weight_gradient", weight_gradient, key)
torch.library.register_fake(
    "tilenorm::norm_linear_weight_gradient", weight_gradient_fake, lib=LIBRARY
)
