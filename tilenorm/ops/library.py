"""The torch.library ops: functional, with fakes and autograd, for graphs and for every mode.

One pair of ops serves every norm. After its tensors an op takes the fields of Options one by one,
then eps and what is particular to its direction. Eager calls on plain tensors go past the ops, from
dispatch.py to the same implementations.
"""

from collections.abc import Sequence
from typing import NamedTuple, get_type_hints

import torch
from torch import Tensor

from ..spec import Options
from . import cutile
from .autograd import ByDispatcher, Norm, gradients, needs_grad
from .inductor import call_directly
from .layout import rows_shape, vector_of
from .plans import Runner, runner_of
from .sharding import register_where_loaded
from .tensors import Saved, Tensors, computed, dtype_of, merged_needs, statistics_dtype
from .torch_private import BelowAutograd, autocast_casts, in_forward_mode

LIBRARY = torch.library.Library("tilenorm", "DEF")
_TYPES = {int: "SymInt", float: "float", bool: "bool", str: "str"}
_OPTIONS = ", ".join(f"{_TYPES[kind]} {name}" for name, kind in get_type_hints(Options).items())
LIBRARY.define(
    "norm(Tensor input, Tensor? residual, Tensor? gate, Tensor? weight, Tensor? bias,"
    f" {_OPTIONS}, float eps, bool save, str? backend=None)"
    " -> (Tensor output, Tensor sum, Tensor mean, Tensor rstd)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.define(
    "norm_backward(Tensor grad_output, Tensor? grad_sum, Tensor input, Tensor? gate,"
    " Tensor? weight, Tensor? bias, Tensor? mean, Tensor rstd,"
    f" {_OPTIONS}, float eps, bool added, bool[5] output_mask, str? backend=None)"
    " -> (Tensor grad_input, Tensor grad_residual, Tensor grad_gate, Tensor grad_weight,"
    " Tensor grad_bias)",
    tags=(torch.Tag.pt2_compliant_tag,),
)

# Norms that PyTorch's autocast computes in float32 on CUDA, RMSNorm from 2.12 on; none on the CPU.
AUTOCAST_NORMS = tuple(filter(autocast_casts, ("rms", "layer")))


class Forward(NamedTuple):
    """The arguments of the op norm."""

    tensors: Tensors
    options: Options
    eps: float
    save: bool
    backend: str | None = None

    @classmethod
    def of(cls, arguments: tuple, **by_name) -> "Forward":
        end = 5 + len(Options._fields)
        options = Options(*arguments[5:end])
        return cls(Tensors(*arguments[:5]), options, *arguments[end:], **by_name)


class Backward(NamedTuple):
    """The arguments of the op norm_backward. added: whether there was a residual."""

    dy: Tensor
    dsum: Tensor | None
    saved: Saved
    options: Options
    eps: float
    added: bool
    mask: tuple[bool, ...]
    backend: str | None = None

    @classmethod
    def of(cls, arguments: tuple, **by_name) -> "Backward":
        end = 8 + len(Options._fields)
        options = Options(*arguments[8:end])
        return cls(*arguments[:2], Saved(*arguments[2:8]), options, *arguments[end:], **by_name)

    @property
    def tensors(self) -> Tensors:
        """Tensors with the dtypes and the device of those that the forward pass had."""
        x, gate, weight, bias = self.saved[:4]
        return Tensors(self.dy, x if self.added else None, gate, weight, bias)


def run_norm(*arguments, **by_name) -> Sequence[Tensor | None]:
    """The op norm for Inductor's code. Plain tensors go past the op, and None stands for what is
    absent then. Others go to the op, as those of any operator that Inductor's code calls.
    """
    tensors, options, eps, save, backend = Forward.of(arguments, **by_name)
    runner = runner_of(tensors, options, backend)
    if not runner.plain.takes(tensors):
        return torch.ops.tilenorm.norm(*arguments, **by_name)
    x = tensors[0]
    with cutile.on_device_of(x):
        y, total, *statistics = (runner.training if save else runner.inference)(tensors, eps)
    return y, total, *(_by_rows(t, x, options.hidden) for t in statistics)


def _by_rows(statistic: Tensor | None, x: Tensor, hidden: int) -> Tensor | None:
    """A mean or rstd (rows,), which nothing else holds, in the shape of x's rows."""
    if statistic is None or x.shape == (statistic.numel(), hidden):
        return statistic
    return statistic.view(rows_shape(x.shape, hidden))


def run_norm_backward(*arguments, **by_name) -> Sequence[Tensor | None]:
    """The op norm_backward for Inductor's code, as run_norm."""
    run, plain, dy, dsum, saved, eps = _backward_of(arguments, by_name)
    if not plain.takes((dy, dsum, *saved)):
        return torch.ops.tilenorm.norm_backward(*arguments, **by_name)
    with cutile.on_device_of(dy):
        return run(dy, dsum, saved, eps)


def _backward_of(arguments: tuple, by_name: dict) -> tuple:
    """A backward function, what tells whether tensors may be given to it directly, and what else
    it takes.
    """
    dy, dsum, saved, options, eps, added, mask, backend = Backward.of(arguments, **by_name)
    x, gate, weight, bias, mean, rstd = saved
    mean = vector_of(mean) if options.norm == "layer" else None
    saved = Saved(x, gate, weight, bias, mean, vector_of(rstd))
    tensors = (dy, x if added else None, gate, weight, bias)
    runner = runner_of(tensors, options, backend)
    run, _, plain = runner.gradients(tuple(mask), dsum is not None)
    return run, plain, dy, dsum, saved, eps


def norm(*arguments) -> tuple[Tensor, ...]:
    """The op, for real tensors. Results that are absent are empty tensors."""
    tensors, options, eps, save, backend = Forward.of(arguments)
    _refuse_forward_mode(tensors)
    return _norm_by(runner_of(tensors, options, backend), tensors, eps, save)


def _norm_by(runner: Runner, tensors: Tensors, eps: float, save: bool) -> tuple[Tensor, ...]:
    x, residual = tensors[:2]
    with cutile.on_device_of(x):
        found = (runner.training if save else runner.inference)(tensors, eps)
    y, total, *statistics = found
    if total is None:
        total = x.new_empty(0)
    dtype = statistics_dtype(x, residual)
    there = [_by_rows(t, x, runner.spec.hidden) if save else None for t in statistics]
    return y, total, *(x.new_empty(0, dtype=dtype) if t is None else t for t in there)


def norm_backward(*arguments) -> tuple[Tensor, ...]:
    """The op, for real tensors. Gradients that are not asked for are empty tensors."""
    run, _, dy, dsum, saved, eps = _backward_of(arguments, {})
    _refuse_forward_mode((dy, dsum, *saved))
    with cutile.on_device_of(dy):
        grads = run(dy, dsum, saved, eps)
    return tuple([dy.new_empty(0) if g is None else g for g in grads])


def _tell_others() -> None:
    """Tell Inductor and DTensor, where they are loaded, how to run the ops.

    Both ask an op's fake first, whatever they do with it afterwards.
    """
    call_directly("norm", run_norm)
    call_directly("norm_backward", run_norm_backward)
    register_where_loaded(Forward.of, Backward.of)


def norm_fake(*arguments) -> tuple[Tensor, ...]:
    _tell_others()
    (x, residual, *_), options, _, save, _ = Forward.of(arguments)
    rows = rows_shape(x.shape, options.hidden) if save else 0
    dtype = statistics_dtype(x, residual)
    total = x.new_empty(0) if residual is None else x.new_empty(x.shape, dtype=residual.dtype)
    mean = x.new_empty(rows if options.norm == "layer" else 0, dtype=dtype)
    return x.new_empty(x.shape), total, mean, x.new_empty(rows, dtype=dtype)


def norm_backward_fake(*arguments) -> tuple[Tensor, ...]:
    _tell_others()
    call = Backward.of(arguments)
    dtypes = Tensors(*map(dtype_of, call.tensors))
    needs = merged_needs(dtypes, call.dsum is not None, call.mask)
    likes = (call.dy, *call.saved[:4])
    return tuple(
        like.new_empty(like.shape) if need else call.dy.new_empty(0)
        for need, like in zip(computed(needs), likes, strict=True)
    )


def norm_autograd(*arguments) -> tuple[Tensor, ...]:
    """What torch.library.register_autograd would make, which takes 8 µs more in every call that
    needs no gradient.
    """
    tensors, options, eps, save, backend = Forward.of(arguments)
    if needs_grad(*tensors):
        runner = _by_dispatcher(tensors, options, save, backend)
        last = (*options, eps, save, backend)
        return Norm.apply(
            (eps, 0, runner, lambda given, _: _below_autograd(*given, *last)), *tensors
        )
    x = tensors[0]
    if type(x) is Tensor and (x.is_cpu or x.is_cuda):
        runner = runner_of(tensors, options, backend)
        if runner.plain.takes(tensors):
            return _norm_by(runner, tensors, eps, save)
    return _below_autograd(*arguments)


def _below_autograd(*arguments) -> tuple[Tensor, ...]:
    with BelowAutograd():
        return torch.ops.tilenorm.norm(*arguments)


def _by_dispatcher(tensors: Tensors, options: Options, save: bool, backend) -> ByDispatcher:
    return ByDispatcher(options, backend, *map(dtype_of, tensors[:2]), save)


def _setup_context(ctx, inputs: tuple, output: tuple) -> None:
    tensors, options, eps, save, backend = Forward.of(inputs)
    x, residual, *others = tensors
    _, total, mean, rstd = output
    ctx.runner, ctx.eps = _by_dispatcher(tensors, options, save, backend), eps
    ctx.save_for_backward(x if residual is None else total, *others, *ctx.runner.saved(mean, rstd))
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, dsum, *_) -> tuple:
    """As torch.library.register_autograd takes it: a gradient, or None, for each argument."""
    mask = ctx.needs_input_grad
    return *gradients(ctx, dy, dsum, mask[:5]), *[None] * (len(mask) - 5)


def norm_autocast(*arguments) -> tuple[Tensor, ...]:
    x, *others = arguments
    with torch.autocast(x.device.type, enabled=False):
        norm = Forward.of(arguments).options.norm
        return torch.ops.tilenorm.norm(autocast_input(x, norm), *others)


def autocast_input(x: Tensor, norm: str) -> Tensor:
    """x as PyTorch's own norm gets it under autocast: in float32, and then so is the output.

    The other tensors stay as they are: a sum keeps the residual's dtype, and the kernels take
    parameters of any dtype.
    """
    return x.float() if norm in AUTOCAST_NORMS and x.dtype != torch.float64 else x


def _refuse_forward_mode(tensors: tuple) -> None:
    """PyTorch would take the derivatives of an op without a forward mode for zeros."""
    if in_forward_mode(tensors):
        what = "torch.ops.tilenorm.norm has no forward-mode derivative; tilenorm's functions have"
        raise NotImplementedError(what)


for key in ("CPU", "CUDA"):
    LIBRARY.impl("norm", norm, key)
    LIBRARY.impl("norm_backward", norm_backward, key)
LIBRARY.impl("norm", norm_autocast, "AutocastCUDA")
torch.library.register_fake("tilenorm::norm", norm_fake, lib=LIBRARY)
torch.library.register_fake("tilenorm::norm_backward", norm_backward_fake, lib=LIBRARY)
if BelowAutograd is None:
    torch.library.register_autograd(
        "tilenorm::norm", _backward, setup_context=_setup_context, lib=LIBRARY
    )
else:
    LIBRARY.impl("norm", norm_autograd, "Autograd")
