"""The derivative of a norm: one autograd Function, for eager calls and for the op."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ..spec import Options
from . import reference
from .plans import spec_of_tensors
from .tensors import Saved, Tensors, distributed, dtype_of, merged_needs
from .torch_private import asked_of, fast_apply


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd is to record an operation on these tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


class ByDispatcher(NamedTuple):
    """Stands for a Runner where PyTorch's dispatcher finds the implementation, call by call."""

    options: Options
    backend: str | None
    dtype: torch.dtype
    added: torch.dtype | None
    save: bool
    gradients: None = None

    def saved(self, mean: Tensor, rstd: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The op's statistics, or None for each that is an empty tensor by definition."""
        layer = self.options.norm == "layer"
        return (mean if self.save and layer else None), (rstd if self.save else None)


class Norm(Function):
    """Of (eps, rows, a runner, the runner's function to call), and Tensors.

    Its results are y and the sum; by the dispatcher, all that torch.ops.tilenorm.norm returns.
    """

    @staticmethod
    def forward(ctx, how, *tensors):
        eps, rows, runner, run = how
        found = run(tensors, eps, rows) if rows else run(tensors, eps)
        y, total, mean, rstd = found
        if runner.gradients is None:
            mean, rstd = runner.saved(mean, rstd)
        else:
            found = y, total
        x = tensors[0] if runner.added is None else total
        ctx.save_for_backward(x, tensors[2], tensors[3], tensors[4], mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.runner = eps, runner
        return found

    @staticmethod
    def backward(ctx, dy, dsum, *_):
        runner = ctx.runner
        mask = asked_of(ctx)
        if dy is None or runner.gradients is None or torch.is_grad_enabled():
            return None, *gradients(ctx, dy, dsum, mask[1:])
        run, ordered, plain = runner.gradients(mask, dsum is not None)
        saved = ctx.saved_tensors
        if not plain.takes((dy, dsum, *saved)):  # a hook of saved tensors may return any tensor
            return None, *gradients(ctx, dy, dsum, mask[1:], saved)
        return ordered((*run(dy, dsum, saved, ctx.eps), None))


def gradients(
    ctx, dy: Tensor | None, dsum: Tensor | None, mask: tuple[bool, ...], saved: tuple | None = None
) -> tuple[Tensor | None, ...]:
    """The gradients of Tensors, by single operations under create_graph, else by the op.

    mask: whether each of Tensors needs its gradient. saved: what ctx saved, if it was asked for
    before: asking calls the hooks of saved tensors.
    """
    runner = ctx.runner
    added, dtype, options = runner.added, runner.dtype, runner.options
    dsum = dsum if added is not None else None
    if dy is None:
        return through_sum(dsum, added, dtype, mask)
    saved = Saved(*(ctx.saved_tensors if saved is None else saved))
    x, *parameters = saved[:4]
    if needs_grad(dy, dsum, *saved[:4]):
        tensors = Tensors(dy, None if added is None else x, *parameters)
        needs = merged_needs(Tensors(*map(dtype_of, tensors)), dsum is not None, mask)
        spec = spec_of_tensors(tensors, options)
        again = saved._replace(mean=None, rstd=None)
        grads = reference.backward(spec, needs, dy, dsum, again, ctx.eps)
    else:
        if saved.rstd is None:
            raise RuntimeError("tilenorm::norm: save was False, its backward needs it; pass True")
        grads = torch.ops.tilenorm.norm_backward(
            dy, dsum, *saved, *options, ctx.eps, added is not None, mask, runner.backend
        )
    return distributed(grads, added, dtype, mask)


def through_sum(dsum, added, dtype, mask) -> tuple[Tensor | None, ...]:
    """The gradients where only the sum was used: copies, because dsum is the caller's."""
    if dsum is None:
        return (None,) * 5
    dtypes = (dtype, added)
    both = (dsum.to(d, copy=True) if m else None for d, m in zip(dtypes, mask[:2], strict=True))
    return *both, None, None, None


# For eager calls, which no transform sees. The op takes Norm.apply.
apply: Callable = fast_apply(Norm)
