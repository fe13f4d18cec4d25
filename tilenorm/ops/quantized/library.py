"""The torch.library op of quantised norms: its schema, fake and autograd.

Only the forward pass has q. The gradient comes in through `output`, the normalised rows, as if they
had not been quantised, and the backward pass is that of the norm.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...launch.scales import Scales
from ...spec import PLAIN, NormSpec, Options, Quantization
from .. import reference
from ..autograd import ByDispatcher, gradients
from ..inductor import tell_inductor
from ..layout import rows_shape
from ..plans import Runner, runner_of, spec_of_tensors
from ..registry import on_device_of
from ..schemas import LIBRARY
from ..tensors import SKIP, Tensors, dtype_of, statistics_dtype, trimmed
from ..torch_private import asked_of, in_forward_mode
from .reference import quantize
from .tensors import SCALE_DTYPES

LIBRARY.define(
    "norm_quantized(Tensor input, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? addend,"
    " Tensor? given_scale, SymInt hidden, str norm, float offset, str rounding, float eps,"
    " str scaling, ScalarType dtype, bool power_of_2, str layout, bool return_output,"
    " bool return_amax, bool save, str? backend=None) -> (Tensor q, Tensor scale, Tensor amax,"
    " Tensor output, Tensor sum, Tensor mean, Tensor rstd)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
TAKEN = ("input", "residual", "weight", "bias", "addend")  # of Tensors, in the op's order


class Call(NamedTuple):
    """The arguments of the op. tensors: as Tensors. given: the caller's scale, or None."""

    tensors: Tensors
    given: Tensor | None
    options: Options
    eps: float
    how: Quantization
    save: bool
    backend: str | None = None

    @classmethod
    def of(cls, arguments: tuple) -> "Call":
        x, residual, weight, bias, addend, given, hidden, norm, offset, rounding = arguments[:10]
        eps, scaling, dtype, *rest, save = arguments[10:18]
        how = Quantization(scaling, str(dtype).removeprefix("torch."), *rest)
        options = Options(hidden, norm, offset, False, rounding)
        tensors = Tensors(x, residual, None, weight, bias, addend)
        return cls(tensors, given, options, eps, how, save, *arguments[18:])

    @property
    def spec(self) -> NormSpec:
        return replace(spec_of_tensors(self.tensors, self.options), quantized=self.how)

    @property
    def runner(self) -> Runner:
        """It raises and warns as registry.select does."""
        return runner_of(self.tensors, self.options, self.backend, self.how)


def arguments_of(call: Call) -> tuple:
    """What the op takes for a call. No method: PyTorch 2.9 compiles none of a NamedTuple."""
    x, residual, _, *others = call.tensors[:SKIP]
    hidden, norm, offset, _, rounding, *_ = call.options
    scaling, dtype, *rest = call.how
    asked = (hidden, norm, offset, rounding, call.eps, scaling, getattr(torch, dtype), *rest)
    return x, residual, *others, call.given, *asked, call.save, call.backend


def norm_quantized(*arguments) -> tuple[Tensor, ...]:
    """The op, for real tensors. Results that are absent are empty tensors."""
    call = Call.of(arguments)
    x = call.tensors.input
    if in_forward_mode(call.tensors):
        raise NotImplementedError(
            "torch.ops.tilenorm.norm_quantized has no forward-mode derivative"
        )
    runner = call.runner
    with on_device_of(x):
        run = runner.training if call.save else runner.inference
        return _with_absent(call, run((*call.tensors, call.given), call.eps))


def norm_quantized_decomposed(*arguments) -> tuple[Tensor, ...]:
    """The op in PyTorch's own operators, for tensors on any device."""
    call = Call.of(arguments)
    spec = call.spec
    results = reference.formula(spec.unquantized, call.tensors, call.eps)
    y, *others = reference.with_rows(results)
    output = y if call.how.output else None
    return _with_absent(call, (*quantize(spec, y, call.given), output, *others))


def _with_absent(call: Call, results: tuple) -> tuple[Tensor, ...]:
    """What the op returns. results: as Results, with mean and rstd (rows,)."""
    x, (*found, mean, rstd) = call.tensors.input, results
    rows = rows_shape(x.shape, call.options.hidden)
    found += [t.view(rows) if call.save and t is not None else None for t in (mean, rstd)]
    return tuple(
        x.new_empty(0, dtype=dtype) if t is None else t
        for t, dtype in zip(found, _dtypes(call), strict=True)
    )


def _dtypes(call: Call) -> tuple[torch.dtype, ...]:
    x, residual = call.tensors[:2]
    scale = SCALE_DTYPES["uint8" if call.how.scaling == "mx" else "float32"]
    statistic = statistics_dtype(x, residual)
    total = x.dtype if residual is None else residual.dtype
    q = getattr(torch, call.how.dtype)
    return q, scale, torch.float32, x.dtype, total, statistic, statistic


def norm_quantized_fake(*arguments) -> tuple[Tensor, ...]:
    tell_inductor("norm_quantized")
    call = Call.of(arguments)
    how, hidden = call.how, call.options.hidden
    x, residual = call.tensors[:2]
    scales = Scales.of(how, hidden, x.numel() // hidden)
    rows = rows_shape(x.shape, hidden) if call.save else (0,)
    shapes = (
        x.shape,
        scales.shape if call.given is None else (0,),
        (1,) if how.amax else (0,),
        x.shape if how.output else (0,),
        (0,) if residual is None else x.shape,
        rows if call.options.norm == "layer" else (0,),
        rows,
    )
    made = [x.new_empty(s, dtype=d) for s, d in zip(shapes, _dtypes(call), strict=True)]
    if call.given is None:
        made[1] = x.new_empty_strided(scales.shape, scales.strides, dtype=made[1].dtype)
    return tuple(made)


def _setup_context(ctx, inputs: tuple, output: tuple) -> None:
    call = Call.of(inputs)
    x, residual, *others = call.tensors[:PLAIN]
    q, scale, amax, _, total, mean, rstd = output
    ctx.mark_non_differentiable(q, scale, amax, mean, rstd)
    dtypes = tuple(map(dtype_of, trimmed(call.tensors)))
    ctx.runner, ctx.eps = ByDispatcher(call.options, call.backend, dtypes, call.save), call.eps
    ctx.save_for_backward(x if residual is None else total, *others, *ctx.runner.saved(mean, rstd))
    ctx.set_materialize_grads(False)


def _backward(ctx, dq, dscale, damax, dy, dsum, *_) -> tuple:
    """As torch.library.register_autograd takes it: a gradient, or None, for each argument."""
    asked = asked_of(ctx)
    by_name = dict(zip(TAKEN, asked, strict=False))
    mask = tuple(by_name.get(name, False) for name in Tensors._fields)
    found = Tensors(*gradients(ctx, dy, dsum, mask[: len(ctx.runner.dtypes)]))
    return *(getattr(found, name) for name in TAKEN), *[None] * (len(asked) - len(TAKEN))


for key in ("CPU", "CUDA"):
    LIBRARY.impl("norm_quantized", norm_quantized, key)
torch.library.register_fake("tilenorm::norm_quantized", norm_quantized_fake, lib=LIBRARY)
torch.library.register_autograd(
    "tilenorm::norm_quantized", _backward, setup_context=_setup_context, lib=LIBRARY
)
