"""The derivative of every op: one autograd Function, for eager calls and for the ops."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import Function

from ...row import Op
from ...spec import NormSpec
from ..passes import reference
from ..passes.bound import OpSpecs, refuse_gradient
from ..passes.gradients import Step, named, run_steps
from ..pytorch.torch_private import asked_of, fast_apply


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd is to record an operation on these tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def call_needs_grad(op: Op, tensors: Sequence[Tensor | None]) -> bool:
    """Whether autograd is to record a call of an op: some tensors have no gradient."""
    return needs_grad(*[t for t, port in zip(tensors, op.takes, strict=True) if port.grad])


class Call(Function):
    """Of (eps, a Bound or an OpSpecs, the function to call), and an op's tensors.

    Its results are those that users get; by the dispatcher, which finds the implementation of an
    OpSpecs, all that the op makes.
    """

    @staticmethod
    def forward(ctx, how, *tensors):
        eps, bound, run = how
        if not bound.differentiable:
            refuse_gradient(bound.op, bound.options)
        results = None if bound.gradients is None else run.repeated(tensors, eps)
        if results is None:
            results = run(tensors, eps)
        saved = results if bound.save else bound.unsaved(results)
        ctx.save_for_backward(*bound.autograd_saves((*tensors, *saved)))
        if bound.not_differentiable:
            fixed = [results[i] for i in bound.not_differentiable if results[i] is not None]
            ctx.mark_non_differentiable(*fixed)
        ctx.set_materialize_grads(False)
        ctx.how = how
        return tuple(results[: bound.returned])

    @staticmethod
    def backward(ctx, *grads):
        (eps, bound, _), asked = ctx.how, asked_of(ctx)
        saved = ctx.saved_tensors  # asking calls the hooks of saved tensors
        if bound.gradients is not None and not torch.is_grad_enabled():
            run = bound.gradients(asked, *[g is not None for g in grads])
            if run.plain.takes((*grads, *saved)):  # a hook of saved tensors may return any tensor
                return run(grads, saved, eps)
        return None, *gradients(bound, asked[1:], grads, saved, eps)


def gradients(
    what: OpSpecs, asked: Sequence[bool], grads: Sequence[Tensor | None], saved: Sequence, eps
) -> tuple[Tensor | None, ...]:
    """The gradient of each tensor that an op takes, by single operations under create_graph, else
    by the op norm_backward.

    asked: whether each tensor needs its gradient. grads: of the op's results.
    """
    op = what.op
    steps = what.steps(tuple(asked), *[grad is not None for grad in grads[: op.shown]])

    def run(step: Step, dy: Tensor, dsum: Tensor | None, kept: Sequence, norm_eps: float):
        spec, by_role = step.spec, named(step.spec, kept)
        if needs_grad(dy, dsum, *by_role.values()):
            again = by_role | dict.fromkeys(reference.STATISTICS)
            return reference.backward(spec, step.needs, dy, dsum, again, norm_eps)
        return by_op(what, spec, step, dy, dsum, by_role, norm_eps)

    return run_steps(op, steps, grads, saved, what.eps_of(eps), run)


def by_op(
    what: OpSpecs, spec: NormSpec, step: Step, dy, dsum, by_role: dict, eps: float
) -> list[Tensor | None]:
    """The gradients of one norm by the op of its kind of norm, in the order of Needs.gradients."""
    if by_role["rstd"] is None:
        raise RuntimeError(
            f"tilenorm::{what.op.name}: save was False, its backward needs it; pass True"
        )
    row, asked = spec.backward, step.needs.gradients
    mask = [asked[place] for place in row.gradient_index[: len(row.masked)]]
    arguments = {**spec.options._asdict(), "shift": spec.mod_shift, "eps": eps, "output_mask": mask}
    arguments |= {"added": spec.residual is not None, "backend": what.backend, "output": False}
    arguments["input_dtype"] = getattr(torch, spec.dtype) if spec.residual else None
    if how := spec.rotation:
        arguments |= {"rotary_dim": how.dim, "interleaved": how.interleaved}
        arguments["output_heads_first"] = how.heads_first
    tensors = {**by_role, "dy": dy, "dsum": dsum}
    arguments |= {port.name: tensors.get(port.role) for port in row.tensors}
    op = getattr(torch.ops.tilenorm, row.name)
    results = op(*[arguments[argument] for argument in row.arguments])
    by_index = dict(zip(row.gradient_index, results, strict=True))
    return [by_index.get(place) for place in range(len(asked))]


# For eager calls, which no transform sees. The ops take Call.apply.
apply: Callable = fast_apply(Call)
