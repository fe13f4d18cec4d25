"""The torch.library op of the chain: schema, implementation, fake and autograd.

The backward pass is that of the norm after the addition, then that of the norm before it.
"""

from functools import cache
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from ...spec import NormSpec, Options
from .. import reference
from ..autograd import ByDispatcher, gradients
from ..layout import rows_shape
from ..plans import runner_of, spec_of_tensors
from ..registry import on_device_of
from ..schemas import LIBRARY
from ..tensors import Results, Saved, Tensors, dtype_of, statistics_dtype
from ..torch_private import asked_of, in_forward_mode

NAME = "norm_add_norm"
LIBRARY.define(
    f"{NAME}(Tensor input, Tensor residual, Tensor? weight, Tensor? next_weight, SymInt hidden,"
    " float offset, str rounding, float eps, float next_eps, bool save, str? backend=None)"
    " -> (Tensor output, Tensor sum, Tensor rstd, Tensor next_rstd)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


class Call(NamedTuple):
    """The arguments of the op."""

    input: Tensor
    residual: Tensor
    weight: Tensor | None
    next_weight: Tensor | None
    hidden: int
    offset: float
    rounding: str
    eps: float
    next_eps: float
    save: bool
    backend: str | None = None

    @property
    def options(self) -> Options:
        return Options(self.hidden, "rms", self.offset, False, self.rounding)

    @property
    def before(self) -> Tensors:
        """What the norm before the addition takes."""
        return Tensors(self.input, weight=self.weight, skip=self.residual)

    def after(self, total: Tensor) -> Tensors:
        """What the norm after the addition takes."""
        return Tensors(total, weight=self.next_weight)


def norm_add_norm(*arguments) -> tuple[Tensor, ...]:
    """The op, for real tensors. Statistics that are not saved are empty tensors."""
    call = Call(*arguments)
    if in_forward_mode(call[:4]):
        raise NotImplementedError(f"torch.ops.tilenorm.{NAME} has no forward-mode derivative")
    with on_device_of(call.input):
        return _with_absent(call, _in_one_pass(call) or _in_two(call))


def norm_add_norm_decomposed(*arguments) -> tuple[Tensor, ...]:
    """The op in PyTorch's own operators, for tensors on any device."""
    call = Call(*arguments)
    total, _, _, rstd = _formula(call, call.before, call.eps)
    y, _, _, next_rstd = _formula(call, call.after(total)[:5], call.next_eps)
    return _with_absent(call, (y, total, rstd, next_rstd))


def _formula(call: Call, tensors: Tensors, eps: float) -> Results:
    spec = spec_of_tensors(tensors, call.options)
    return reference.with_rows(reference.formula(spec, tensors, eps))


def _with_absent(call: Call, found: tuple) -> tuple[Tensor, ...]:
    """What the op returns. found: y, the sum, and each norm's rstd (rows,)."""
    x, (y, total, *rstds) = call.input, found
    shape = rows_shape(x.shape, call.hidden)
    dtypes = statistics_dtype(x), statistics_dtype(call.residual)
    rstds = [
        t.view(shape) if call.save else x.new_empty(0, dtype=dtype)
        for t, dtype in zip(rstds, dtypes, strict=True)
    ]
    return y, total, *rstds


def _in_one_pass(call: Call) -> tuple[Tensor | None, ...] | None:
    before = runner_of(call.before, call.options, call.backend)
    after = runner_of(call.after(call.residual)[:5], call.options, call.backend)
    if not before.implementation.name == after.implementation.name == "cutile":
        return None
    cutile = _cutile()
    spec = NormSpec.chained(before.spec, after.spec)
    if call.eps != call.next_eps or not cutile.serves(spec, before.device):
        return None
    return cutile.forward(spec, before.device, call[:4], call.eps, call.save)


@cache
def _cutile() -> ModuleType:
    """The module that imports cuda.tile, which is there where cutile serves a norm."""
    from . import cutile

    return cutile


def _in_two(call: Call) -> tuple[Tensor | None, ...]:
    """The same by the two calls that the chain stands for."""
    before = runner_of(call.before, call.options, call.backend)
    total, _, _, rstd = (before.training if call.save else before.inference)(call.before, call.eps)
    tensors = call.after(total)[:5]
    after = runner_of(tensors, call.options, call.backend)
    run = after.training if call.save else after.inference
    y, _, _, next_rstd = run(tensors, call.next_eps)
    return y, total, rstd, next_rstd


def norm_add_norm_fake(*arguments) -> tuple[Tensor, ...]:
    call = Call(*arguments)
    x, residual = call[:2]
    rows = rows_shape(x.shape, call.hidden) if call.save else (0,)
    y, total = (x.new_empty(x.shape, dtype=residual.dtype) for _ in range(2))
    dtypes = statistics_dtype(x), statistics_dtype(residual)
    return y, total, *(x.new_empty(rows, dtype=dtype) for dtype in dtypes)


def _setup_context(ctx, inputs: tuple, output: tuple) -> None:
    call = Call(*inputs)
    _, total, rstd, next_rstd = output
    ctx.mark_non_differentiable(rstd, next_rstd)
    tensors = (call.input, call.weight, call.next_weight, total, rstd, next_rstd)
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)
    ctx.call = Call(*map(dtype_of, inputs[:4]), *inputs[4:])  # holds no tensor


def _backward(ctx, dy: Tensor | None, dsum: Tensor | None, *_) -> tuple:
    """As torch.library.register_autograd takes it: a gradient, or None, for each argument."""
    call, asked = ctx.call, asked_of(ctx)
    input, residual, weight, next_weight = map(bool, asked[:4])
    nothing = [None] * (len(asked) - 4)
    if dy is None and dsum is None:
        return None, None, None, None, *nothing
    x, w, next_w, total, rstd, next_rstd = ctx.saved_tensors
    dtypes = (call.residual, None if dsum is None else call.residual, None, call.next_weight, None)
    saved = Saved(total, None, next_w, None, None, next_rstd if call.save else None)
    mask = (input or residual or weight, False, False, next_weight, False)
    found = gradients(_as_ctx(call, dtypes, call.next_eps), dy, dsum, mask, saved)
    ds, dnext = found[0], found[3]
    if ds is None:
        return None, None, None, dnext, *nothing
    dtypes = Tensors(call.input, weight=call.weight, skip=call.residual)
    saved = Saved(x, None, w, None, None, rstd if call.save else None)
    mask = (input, False, False, weight, False, False, residual, False, False)
    found = Tensors(*gradients(_as_ctx(call, dtypes, call.eps), ds, None, mask, saved))
    return found.input, found.skip, found.weight, dnext, *nothing


def _as_ctx(call: Call, dtypes: tuple, eps: float) -> SimpleNamespace:
    """What autograd.gradients reads of the context of one of the norms."""
    runner = ByDispatcher(call.options, call.backend, dtypes, call.save)
    return SimpleNamespace(runner=runner, eps=eps)


for key in ("CPU", "CUDA"):
    LIBRARY.impl(NAME, norm_add_norm, key)
torch.library.register_fake(f"tilenorm::{NAME}", norm_add_norm_fake, lib=LIBRARY)
torch.library.register_autograd(
    f"tilenorm::{NAME}", _backward, setup_context=_setup_context, lib=LIBRARY
)
