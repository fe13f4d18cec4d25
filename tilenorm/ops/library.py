"""The torch.library ops: functional, with fakes and autograd, for graphs and for every mode.

Eager calls on plain tensors go past the ops, from dispatch.py to the same implementations.
"""

import torch
from torch import Tensor

from ..launch.calls import Needs
from ..spec import PLAIN, Options
from . import reference
from .autograd import ByDispatcher, Norm, gradients, needs_grad
from .inductor import tell_inductor
from .layout import rows_shape, vector_of
from .plans import Runner, refuse_output, runner_of, spec_of_tensors
from .registry import on_device_of
from .schemas import LIBRARY, Backward, Forward
from .sharding import STRATEGIES, register_where_loaded
from .tensors import (
    SKIP,
    Branch,
    Saved,
    Tensors,
    branch_of,
    dtype_of,
    dtype_of_y,
    merged_needs,
    statistics_dtype,
)
from .torch_private import BelowAutograd, asked_of, autocast_casts, in_forward_mode

# Norms that PyTorch's autocast computes in float32 on CUDA, RMSNorm from 2.12 on; none on the CPU.
AUTOCAST_NORMS = tuple(filter(autocast_casts, ("rms", "layer")))


def _by_rows(statistic: Tensor | None, x: Tensor, hidden: int) -> Tensor | None:
    """A mean or rstd (rows,), which nothing else holds, in the shape of x's rows."""
    if statistic is None or x.shape == (statistic.numel(), hidden):
        return statistic
    return statistic.view(rows_shape(x.shape, hidden))


def _backward_of(arguments: tuple) -> tuple:
    """A backward function, and what it takes."""
    call = Backward.of(arguments)
    dy, dsum, saved, options, eps, added, mask, backend, *_ = call
    x, gate, weight, bias, mean, rstd = saved
    mean = vector_of(mean) if options.norm == "layer" else None
    saved = Saved(x, gate, weight, bias, mean, vector_of(rstd))
    # As call.tensors, which takes longer, for all calls but the two kinds below.
    tensors, branch = (dy, x if added else None, gate, weight, bias), None
    if any(t is not None for t in call.branch):
        tensors, branch = call.tensors, Branch(*call.branch)
    elif not added and dy.dtype != x.dtype:
        tensors = call.tensors
    runner = runner_of(tensors, options, backend)
    more = call.more
    asked = (tuple(mask), dsum is not None, 1 + len(more), call.output)
    return runner.gradients(*asked)[0], dy, dsum, saved, eps, more, branch


def norm(*arguments) -> tuple[Tensor, ...]:
    """The op, for real tensors. Results that are absent are empty tensors."""
    tensors, options, eps, save, backend = Forward.of(arguments)
    _refuse_forward_mode(tensors)
    return _norm_by(runner_of(tensors, options, backend), tensors, eps, save)


def _norm_by(runner: Runner, tensors: Tensors, eps: float, save: bool) -> tuple[Tensor, ...]:
    with on_device_of(tensors[0]):
        found = (runner.training if save else runner.inference)(tensors, eps)
    return _with_absent(found, tensors, runner.spec.hidden, save)


def _with_absent(found: tuple, tensors: Tensors, hidden: int, save: bool) -> tuple[Tensor, ...]:
    """What the op returns. found: Results, with mean and rstd (rows,)."""
    x, residual = tensors[:2]
    y, total, *statistics = found
    if total is None:
        total = x.new_empty(0)
    dtype = statistics_dtype(x, residual)
    there = [_by_rows(t, x, hidden) if save else None for t in statistics]
    return y, total, *(x.new_empty(0, dtype=dtype) if t is None else t for t in there)


def norm_decomposed(*arguments, **by_name) -> tuple[Tensor, ...]:
    """The op in PyTorch's own operators, for tensors on any device."""
    tensors, options, eps, save, _ = Forward.of(arguments, **by_name)
    found = reference.formula(spec_of_tensors(tensors, options), tensors, eps)
    return _with_absent(reference.with_rows(found), tensors, options.hidden, save)


def norm_backward(*arguments) -> tuple[Tensor, ...]:
    """The op, for real tensors. Results that are not asked for are empty tensors."""
    run, dy, dsum, saved, eps, more, branch = _backward_of(arguments)
    _refuse_forward_mode((dy, dsum, *saved, *more, *(branch or ())))
    with on_device_of(dy):
        found = (*run(dy, dsum, saved, eps, more, branch), None)[:6]
    return tuple([dy.new_empty(0) if t is None else t for t in found])


def norm_backward_decomposed(*arguments, **by_name) -> tuple[Tensor, ...]:
    """The op in PyTorch's own operators, for tensors on any device."""
    call = Backward.of(arguments, **by_name)
    spec, needs = spec_of_tensors(call.tensors, call.options), _needs_of(call)
    saved, found = call.saved, ()
    if spec.norm != "layer":
        saved = saved._replace(mean=None)
    branch = Branch(*call.branch) if any(t is not None for t in call.branch) else None
    if any(needs.gradients) or needs.output:
        incoming = needs, call.dy, call.dsum, saved
        found = reference.backward(spec, *incoming, call.eps, call.more, branch)
    found = (*found, *[None] * 6)[:6]
    return tuple([call.dy.new_empty(0) if t is None else t for t in found])


def _needs_of(call: Backward) -> Needs:
    """Raises NotImplementedError as refuse_output does."""
    if call.output:
        refuse_output(spec_of_tensors(call.tensors, call.options))
    dtypes = tuple(map(dtype_of, call.tensors))
    return merged_needs(dtypes, call.dsum is not None, call.mask, 1 + len(call.more), call.output)


def _tell_others() -> None:
    """Tell Inductor and DTensor, where they are loaded, how to run the ops.

    Both ask an op's fake first, whatever they do with it afterwards.
    """
    tell_inductor("norm")
    tell_inductor("norm_backward")
    register_where_loaded(STRATEGIES)


def norm_fake(*arguments) -> tuple[Tensor, ...]:
    _tell_others()
    tensors, options, _, save, _ = Forward.of(arguments)
    x, residual = tensors[:2]
    rows = rows_shape(x.shape, options.hidden) if save else 0
    dtype = statistics_dtype(x, residual)
    total = x.new_empty(0) if residual is None else x.new_empty(x.shape, dtype=residual.dtype)
    mean = x.new_empty(rows if options.norm == "layer" else 0, dtype=dtype)
    y = x.new_empty(x.shape, dtype=dtype_of_y(tensors))
    return y, total, mean, x.new_empty(rows, dtype=dtype)


def norm_backward_fake(*arguments) -> tuple[Tensor, ...]:
    _tell_others()
    call = Backward.of(arguments)
    needs = _needs_of(call)
    likes = (call.tensors[0], *call.saved[:4], call.dy)
    return tuple(
        like.new_empty(like.shape) if need else call.dy.new_empty(0)
        for need, like in zip((*needs.gradients, needs.output), likes, strict=True)
    )


def norm_autograd(*arguments) -> tuple[Tensor, ...]:
    """What torch.library.register_autograd would make, which takes 8 µs more in every call that
    needs no gradient.
    """
    tensors, options, eps, save, backend = Forward.of(arguments)
    if needs_grad(*tensors):
        by_dispatcher = _by_dispatcher(tensors, options, save, backend)
        last = (*options, eps, save, backend)

        def run(given, *_):
            return _below_autograd(*given[:PLAIN], *last, *given[PLAIN:])

        return Norm.apply((eps, False, by_dispatcher, run), *tensors)
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
    return ByDispatcher(options, backend, tuple(map(dtype_of, tensors)), save)


def _setup_context(ctx, inputs: tuple, output: tuple) -> None:
    tensors, options, eps, save, backend = Forward.of(inputs)
    x, residual, *others = tensors[:PLAIN]
    _, total, mean, rstd = output
    ctx.runner, ctx.eps = _by_dispatcher(tensors, options, save, backend), eps
    saved, branch = ctx.runner.saved(mean, rstd), branch_of(tensors) or ()
    ctx.save_for_backward(x if residual is None else total, *others, *saved, *branch)
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, dsum, *_) -> tuple:
    """As torch.library.register_autograd takes it: a gradient, or None, for each argument."""
    asked = asked_of(ctx)  # arguments at the end that have their defaults are not among them
    more = PLAIN + len(Options._fields) + len(("eps", "save", "backend"))
    mask = [*asked[:PLAIN], *asked[more:], *[False] * len(Tensors._fields)]
    found = gradients(ctx, dy, dsum, tuple(mask[: len(ctx.runner.dtypes)]))
    return (*found[:PLAIN], *[None] * (more - PLAIN), *found[PLAIN:])[: len(asked)]


def norm_autocast(*arguments) -> tuple[Tensor, ...]:
    tensors, options, *last = Forward.of(arguments)
    with torch.autocast(tensors[0].device.type, enabled=False):
        cast = autocast_tensors(tensors, options.norm)
        return torch.ops.tilenorm.norm(*cast[:PLAIN], *options, *last, *cast[PLAIN:])


def autocast_tensors(tensors: tuple, norm: str) -> tuple:
    """The tensors with the input as PyTorch's own norm gets it under autocast: in float32, and then
    so is the output. What is added to the normalised rows is promoted as by PyTorch's addition.

    The others stay as they are: a sum keeps the residual's dtype, and the kernels take parameters
    of any dtype.
    """
    if norm not in AUTOCAST_NORMS:
        return tensors
    cast = list(tensors)
    for place, tensor in enumerate(tensors):
        if place in (0, SKIP) and tensor is not None and tensor.dtype != torch.float64:
            cast[place] = tensor.float()
    return tuple(cast)


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
