"""The torch.library op of the chain: schema, implementation, fake and autograd.

The backward pass is that of the norm after the addition, then that of the norm before it.
"""

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ...launch.toolchain import CompileError
from ...spec import NormSpec, Options
from .. import reference
from ..autograd import ByDispatcher, gradients
from ..direct import Plain
from ..inductor import tell_inductor
from ..layout import rows_shape
from ..plans import Runner, runner_of, spec_of_tensors
from ..registry import failure, on_device_of, record_failure
from ..schemas import LIBRARY
from ..tensors import Results, Saved, Tensors, dtype_of, statistics_dtype
from ..torch_private import asked_of, fast_apply, in_forward_mode

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


class ChainRunner:
    """Serves the calls of the chain of one spec: in one pass, or by the two calls that it stands
    for, where the kernels do not serve both norms in one.

    inference, training: functions of (tensors, eps, laid_out), with the input, the residual, None,
    the weight, None and the next weight, and with the eps of both norms. They return y, the sum and
    each norm's rstd, as a runner of a plain norm does.
    """

    def __init__(self, before: Runner, after: Runner):
        self.before, self.after = before, after
        self.spec = NormSpec.chained(before.spec, after.spec)
        self.inference, self.training = self._forward(False), self._forward(True)
        self._passes: dict = {}

    def _forward(self, save: bool) -> Callable:
        one_pass = self._bound(save)

        def forward(tensors, eps, _laid_out=False):
            x, residual, _, weight, _, next_weight = tensors
            first, second = eps
            if one_pass is not None and first == second:
                try:
                    return one_pass((x, residual, weight, next_weight), first)
                except CompileError as error:
                    record_failure("cutile", self.spec, self.before.device, error)
                self.inference, self.training = self._forward(False), self._forward(True)
            before, after = self.before, self.after
            run = before.training if save else before.inference
            total, _, _, rstd = run(_before(x, residual, weight), first)
            run = after.training if save else after.inference
            y, _, _, next_rstd = run(_after(total, next_weight), second)
            return y, total, rstd, next_rstd

        return forward

    def _bound(self, save: bool) -> Callable | None:
        """What serves in one pass, or None."""
        implementation, device = self.before.implementation, self.before.device
        names = {implementation.name, self.after.implementation.name}
        if names != {"cutile"} or failure("cutile", self.spec, device):
            return None
        return implementation.forward(self.spec, device, save)

    def passes(self, dsum: bool, mask: tuple[bool, ...], saved: tuple) -> tuple:
        """The backward functions of the norm after the addition and of that before it, and what
        tells whether tensors may be given to them directly.

        dsum: whether the sum's gradient comes in. mask: which gradients of the chain's tensors are
        asked for. saved: what autograd saved.
        """
        known = self._passes.get((dsum, mask))
        if known is None:
            options, total = self.spec.options, saved[3]
            after, before = _masks(mask)
            taken = (total, total if dsum else None, None, saved[2], None)
            run, *_ = runner_of(taken, options, self.after.backend).gradients((False, *after), dsum)
            last, *_ = self.before.gradients((False, *before), False)
            known = self._passes[dsum, mask] = run, last, Plain()
        return known


def _masks(mask: tuple[bool, ...]) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Which gradients of Tensors are asked for, of the norm after the addition and of that before
    it. mask: of input, residual, weight and next weight.
    """
    input, residual, weight, next_weight = mask
    after = input or residual or weight, False, False, next_weight, False
    return after, (input, False, False, weight, False, False, residual, False, False)


class Chain(Function):
    """Of (eps of both norms, laid_out, a runner, the runner's function to call), and the tensors of
    the chain as ChainRunner takes them.
    """

    @staticmethod
    def forward(ctx, how, *tensors):
        eps, laid_out, runner, run = how
        found = _, total, *rstds = run(tensors, eps, laid_out)
        ctx.mark_non_differentiable(*rstds)
        x, _, _, weight, _, next_weight = tensors
        ctx.save_for_backward(x, weight, next_weight, total, *rstds)
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.runner = eps, runner
        return found

    @staticmethod
    def backward(ctx, dy, dsum, *_):
        runner, saved, asked = ctx.runner, ctx.saved_tensors, asked_of(ctx)
        mask = asked[1], asked[2], asked[4], asked[6]
        if dy is not None and not torch.is_grad_enabled():
            run, last, plain = runner.passes(dsum is not None, mask, saved)
            if plain.takes((dy, dsum, *saved)):  # a hook of saved tensors may return any tensor
                x, w, next_w, total, rstd, next_rstd = saved
                first, second = ctx.eps
                ds, _, _, dnext, *_ = run(
                    dy, dsum, (total, None, next_w, None, None, next_rstd), second
                )
                dx = dresidual = dw = None
                if ds is not None:
                    found = last(ds, None, (x, None, w, None, None, rstd), first)
                    dx, dw, dresidual = found[0], found[3], found[6]
                return None, dx, dresidual, None, dw, None, dnext
        x, w, next_w, total, *_ = saved
        spec, dtypes = runner.spec, map(dtype_of, (x, total, w, next_w))
        how = spec.hidden, spec.offset, spec.rounding, *ctx.eps, True, runner.before.backend
        dx, dresidual, dw, dnext = _gradients(Call(*dtypes, *how), dy, dsum, mask, saved)
        return None, dx, dresidual, None, dw, None, dnext


apply: Callable = fast_apply(Chain)


def _before(x: Tensor, residual: Tensor, weight: Tensor | None) -> tuple:
    """Tensors of the norm before the addition."""
    return x, None, None, weight, None, None, residual, None, None


def _after(total: Tensor, next_weight: Tensor | None) -> tuple:
    """Tensors of the norm after the addition."""
    return total, None, None, next_weight, None


def chain_runner_of(tensors: tuple, options: Options, backend: str | None) -> ChainRunner:
    """tensors: input, residual, weight and next weight. It raises and warns as registry.select."""
    x, residual, weight, next_weight = tensors
    before = runner_of(_before(x, residual, weight), options, backend)
    return _chain_runner(before, runner_of(_after(residual, next_weight), options, backend))


@cache
def _chain_runner(before: Runner, after: Runner) -> ChainRunner:
    return ChainRunner(before, after)


def norm_add_norm(*arguments) -> tuple[Tensor, ...]:
    """The op, for real tensors. Statistics that are not saved are empty tensors."""
    call = Call(*arguments)
    if in_forward_mode(call[:4]):
        raise NotImplementedError(f"torch.ops.tilenorm.{NAME} has no forward-mode derivative")
    runner = chain_runner_of(call[:4], call.options, call.backend)
    run = runner.training if call.save else runner.inference
    x, residual, weight, next_weight = call[:4]
    with on_device_of(x):
        found = run((x, residual, None, weight, None, next_weight), (call.eps, call.next_eps))
    return _with_absent(call, found)


def norm_add_norm_decomposed(*arguments) -> tuple[Tensor, ...]:
    """The op in PyTorch's own operators, for tensors on any device."""
    call = Call(*arguments)
    total, _, _, rstd = _formula(call, _before(*call[:3]), call.eps)
    y, _, _, next_rstd = _formula(call, _after(total, call.next_weight), call.next_eps)
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


def norm_add_norm_fake(*arguments) -> tuple[Tensor, ...]:
    tell_inductor(NAME)
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
    asked = asked_of(ctx)
    mask = tuple(map(bool, asked[:4]))
    found = _gradients(ctx.call, dy, dsum, mask, ctx.saved_tensors)
    return *found, *[None] * (len(asked) - 4)


def _gradients(call: Call, dy: Tensor | None, dsum: Tensor | None, mask: tuple, saved: tuple):
    """The gradients of input, residual, weight and next weight, by the ops of the two norms.

    call: with dtypes in the place of tensors. mask: which are asked for. saved: by autograd.
    """
    if dy is None and dsum is None:
        return None, None, None, None
    x, w, next_w, total, rstd, next_rstd = saved
    after, before = _masks(mask)
    dtypes = (call.residual, None if dsum is None else call.residual, None, call.next_weight, None)
    kept = Saved(total, None, next_w, None, None, next_rstd if call.save else None)
    found = gradients(_as_ctx(call, dtypes, call.next_eps), dy, dsum, after, kept)
    ds, dnext = found[0], found[3]
    if ds is None:
        return None, None, None, dnext
    dtypes = Tensors(call.input, weight=call.weight, skip=call.residual)
    kept = Saved(x, None, w, None, None, rstd if call.save else None)
    found = Tensors(*gradients(_as_ctx(call, dtypes, call.eps), ds, None, before, kept))
    return found.input, found.skip, found.weight, dnext


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
