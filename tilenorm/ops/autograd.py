"""The derivative of a norm: one autograd Function, for eager calls and for the op."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ..spec import PLAIN, NormSpec, Options, Quantization
from . import reference
from .branch import branched, layer_scale_gradient
from .plans import heads_of, spec_of
from .tensors import (
    LAYER_SCALE,
    SAVED,
    Branch,
    Saved,
    Tensors,
    asked_of_plain,
    branch_of,
    distributed,
    merged_needs,
)
from .torch_private import asked_of, fast_apply

# Of Tensors, those that are added up.
SUMMED = tuple(map(Tensors._fields.index, ("input", "residual", "addend")))


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd is to record an operation on these tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


class ByDispatcher(NamedTuple):
    """Stands for a Runner where PyTorch's dispatcher finds the implementation, call by call."""

    options: Options
    backend: str | None
    dtypes: tuple[torch.dtype | None, ...]
    save: bool
    gradients: None = None

    @property
    def added(self) -> torch.dtype | None:
        """The residual's dtype."""
        return self.dtypes[1]

    def saved(self, mean: Tensor, rstd: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The op's statistics, or None for each that is an empty tensor by definition."""
        layer = self.options.norm == "layer"
        return (mean if self.save and layer else None), (rstd if self.save else None)


class Norm(Function):
    """Of (eps, laid_out, a runner, the runner's function to call), and Tensors.

    Its results are y and the sum; by the dispatcher, all that torch.ops.tilenorm.norm returns.
    """

    @staticmethod
    def forward(ctx, how, *tensors):
        eps, laid_out, runner, run = how
        found = run(tensors, eps, laid_out)
        y, total, mean, rstd = found
        if runner.gradients is None:
            mean, rstd = runner.saved(mean, rstd)
        else:
            found = y, total
        x = tensors[0] if runner.added is None else total
        branch = (branch_of(tensors) or ()) if len(tensors) > PLAIN else ()
        ctx.save_for_backward(x, tensors[2], tensors[3], tensors[4], mean, rstd, *branch)
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.runner = eps, runner
        return found

    @staticmethod
    def backward(ctx, dy, dsum, *_):
        return _backward(ctx, dy, dsum, asked_of(ctx))


def _backward(ctx, dy: Tensor | None, dsum: Tensor | None, mask: tuple) -> tuple:
    """The gradients of a Function's inputs. mask: which are asked for, the first for no tensor."""
    runner = ctx.runner
    if dy is None or runner.gradients is None or torch.is_grad_enabled():
        return None, *gradients(ctx, dy, dsum, mask[1:])
    run, ordered, plain = runner.gradients(mask, dsum is not None)
    saved = ctx.saved_tensors
    if not plain.takes((dy, dsum, *saved)):  # a hook of saved tensors may return any tensor
        return None, *gradients(ctx, dy, dsum, mask[1:], saved)
    return ordered((*run(dy, dsum, saved, ctx.eps), None))


class QuantizedNorm(Function):
    """The same of a quantised norm: its last input is the caller's scale, or None, and its results
    are Results. The gradient comes in through y.
    """

    @staticmethod
    def forward(ctx, how, *tensors):
        eps, laid_out, runner, run = how
        refuse_gradient(runner.spec.op, runner.spec.quantized)
        found = run(tensors, eps, laid_out)
        q, scale, amax, _, total, mean, rstd = found
        fixed = [t for t in (q, scale, amax, mean, rstd) if t is not None]
        ctx.mark_non_differentiable(*fixed)
        x = tensors[0] if runner.added is None else total
        ctx.save_for_backward(x, None, tensors[3], tensors[4], mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.runner = eps, runner
        return found

    @staticmethod
    def backward(ctx, _q, _scale, _amax, dy, dsum, *_):
        return *_backward(ctx, dy, dsum, asked_of(ctx)[:-1]), None


def refuse_gradient(op: str, how: Quantization) -> None:
    """Raise RuntimeError where a quantised norm has no output that a gradient could come in by."""
    if not how.output:
        raise RuntimeError(
            f"{op}: an argument requires a gradient, which comes in through the normalised rows:"
            " pass return_output=True, or call it under torch.no_grad()"
        )


def gradients(
    ctx, dy: Tensor | None, dsum: Tensor | None, mask: tuple[bool, ...], saved: tuple | None = None
) -> tuple[Tensor | None, ...]:
    """The gradients of Tensors, by single operations under create_graph, else by the op.

    mask: whether each of Tensors needs its gradient. saved: what ctx saved, if it was asked for
    before: asking calls the hooks of saved tensors.
    """
    runner = ctx.runner
    added, dtypes, options = runner.added, runner.dtypes, runner.options
    dsum = dsum if added is not None else None
    saved = ctx.saved_tensors if saved is None else saved
    saved, branch = Saved(*saved[:SAVED]), Branch(*saved[SAVED:]) if saved[SAVED:] else None
    spec = spec_of(options, dtypes, heads_of(saved.weight, saved.bias, options.hidden))
    if dy is None:
        return through_sum(dsum, dtypes, mask, spec, branch)
    asked, factors = asked_of_plain(dtypes, mask), (branch or ())[:2]
    if not any(asked):  # a skip's gradient is dy
        grads = (None,) * PLAIN
    elif needs_grad(dy, dsum, *saved[:4], *(branch or ())):
        needs = merged_needs(dtypes, dsum is not None, asked)
        again = saved._replace(mean=None, rstd=None)
        grads = reference.backward(spec, needs, dy, dsum, again, ctx.eps, branch=branch)
    else:
        if saved.rstd is None:
            raise RuntimeError("tilenorm::norm: save was False, its backward needs it; pass True")
        by_name = dict(zip(("dropout_mask", "layer_scale"), factors, strict=False))
        grads = torch.ops.tilenorm.norm_backward(
            dy, dsum, *saved, *options, ctx.eps, added is not None, asked, runner.backend, **by_name
        )[:PLAIN]
    layer_scale = layer_scale_gradient(spec, grads[1], mask, branch)
    return distributed(grads, dtypes, mask, dy, layer_scale)


def through_sum(
    dsum: Tensor | None,
    dtypes: tuple,
    mask,
    spec: NormSpec | None = None,
    branch: Branch | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradients where only the sum was used: copies, because dsum is the caller's.

    spec: is read where there is a branch.
    """
    if dsum is None:
        return (None,) * len(mask)
    found: list[Tensor | None] = [None] * len(mask)
    if branch is not None:
        found[LAYER_SCALE] = layer_scale_gradient(spec, dsum, mask, branch)
    for place in SUMMED:
        if place < len(mask) and mask[place]:
            found[place] = dsum.to(dtypes[place], copy=True)
    if branch is not None and mask[0]:
        found[0] = branched(spec, found[0], branch.layer_scale, branch.dropout_mask)
    return tuple(found)


# For eager calls, which no transform sees. The op takes Norm.apply.
apply: Callable = fast_apply(Norm)
apply_quantized: Callable = fast_apply(QuantizedNorm)
