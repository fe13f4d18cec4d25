"""The norm of DTensors whose rows are cut: each process computes what its columns add to a row.

DTensor makes the all-reduces, where a Partial result becomes Replicate. RMSNorm takes one of 4
bytes a row each way. LayerNorm takes one of 4 and one of 8 bytes a row forward, and one of 8 back.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ...spec import Options
from ...table import DERIVED, FACTORS, NOT_OF_ROWS, OPS, Op
from .. import reference
from ..autograd import needs_grad
from ..bound import options_of, specs_of_tensors
from ..gradients import Step, named, run_steps
from ..reference import branched
from ..tensor_checks import wrong
from ..torch_private import asked_of
from . import library  # noqa: F401 (defines the ops)


class How(NamedTuple):
    """What a norm is told beside its tensors. asked: `hidden` and the values of the op's options.
    last: the arguments that all ops of pieces take after their tensors.
    """

    asked: tuple
    options: Options
    last: tuple
    eps: float
    backend: str | None


def is_cut(x: Tensor, dims: int) -> bool:
    """Whether x is a DTensor whose last `dims` dimensions, which make up a row, are cut."""
    placements = getattr(x, "placements", ())
    return any(p.is_shard() and p.dim >= x.dim() - dims for p in placements)


def of_op(op: Op, tensors: tuple, options: tuple, dims: int, eps: tuple, backend) -> tuple:
    """What an op makes of DTensors of cut rows, for users, without mean and rstd.

    options: `hidden` and the values of the op's options. eps: of each of its norms.
    """
    if op.name in NOT_OF_ROWS:
        raise NotImplementedError(
            f"{op.name}: argument 'input' takes no DTensor that is cut in a normalised dimension"
        )
    for port, tensor in zip(op.takes, tensors, strict=True):
        if tensor is not None and not hasattr(tensor, "placements"):
            raise wrong(op.name, port.argument, "a DTensor, as the input is one", "a Tensor")
    found = dict(zip([port.name for port in op.takes], tensors, strict=True))
    for stage, own in zip(op.stages, eps, strict=True):
        row = OPS[stage.op]
        given = {role: found.get(stage.ports.get(role, "")) for role in row.roles}
        fields = options_of(row, options)
        how = How(options, fields, (*fields, dims), own, backend)
        y, total = normalize(row, given, how)
        found |= {stage.ports["y"]: y, stage.ports.get("sum", ""): total}
    return tuple([found.get(port.name) for port in op.makes[: op.shown]])


def normalize(op: Op, given: dict[str, Any], how: How) -> tuple[Tensor, Tensor | None]:
    """The norm, and the sum with the residual if there is one, of DTensors of cut rows.

    given: the tensors of the norm by their roles. Tensors that are placed otherwise than x are
    moved to where x is. Operations of their own mask and scale the input, and add an addend and a
    skip.
    """
    x = given["x"]
    at = _rows_placed(x)
    for port in op.takes:
        tensor = given[port.role]
        if tensor is not None:
            along = port.lies in ("affine", "vector")
            given[port.role] = _moved(tensor, _along(tensor, x, at) if along else at)
    given["x"] = branched(how.options, given["x"], *map(given.get, FACTORS))
    if given.get("addend") is not None:
        given["x"] = _plus(op.name, given["x"], given["addend"])
    skip, bare = given.get("skip"), OPS[op.name.removesuffix("_add")]
    placed = [given[role] if role in DERIVED else None for role in bare.roles]
    if needs_grad(*placed):
        y, total = PieceNorm.apply(how, bare, *placed)
    else:
        y, total, *_ = forward(how, given, False).values()
    return (y if skip is None else reference.sum_of(y, skip)), total


def _plus(op: str, x: Tensor, addend: Tensor) -> Tensor:
    """x + addend, rounded to the addend's dtype, in x's. RuntimeError if x's has fewer bits."""
    if addend.dtype.itemsize > x.dtype.itemsize:
        takes = f"the input's dtype {x.dtype} where rows are cut"
        raise wrong(op, "residual[0]", takes, addend.dtype)
    return reference.sum_of(x, addend).to(x.dtype)


def forward(how: How, given: dict[str, Any], save: bool) -> dict[str, Tensor | None]:
    """y, sum, mean and rstd, the last two only if `save`. given: the tensors by their roles."""
    x, residual, gate, *parameters = map(given.get, DERIVED)
    ops, layer, last = torch.ops.tilenorm, how.options.norm == "layer", how.last
    first = gate if how.options.gate_first else None
    part, own, total = ops.row_sums(x, residual, first, *last, how.backend)
    whole, centered = _added_up(part), None
    rows = x if residual is None else total
    if layer:
        centered = _added_up(ops.row_center(x, whole, own, *last, how.backend))
    more = how.eps, x.dtype, save, how.backend
    y, mean, rstd = ops.row_apply(rows, gate, *parameters, whole, centered, *last, *more)
    total = None if residual is None else total
    mean, rstd = mean if save and layer else None, rstd if save else None
    return {"y": y, "sum": total, "mean": mean, "rstd": rstd}


class PieceNorm(Function):
    """Of How, an op of one norm, and the tensors that it takes. Its results are y and the sum."""

    @staticmethod
    def forward(ctx, how, op, *tensors):
        made = forward(how, dict(zip(op.roles, tensors, strict=True)), True)
        ctx.how, ctx.what = how, specs_of_tensors(op, tensors, how.asked)
        ctx.save_for_backward(*ctx.what.kept((*tensors, *[made[role] for role in op.made])))
        ctx.set_materialize_grads(False)
        return made["y"], made["sum"]

    @staticmethod
    def backward(ctx, dy, dsum):
        how, what, saved, asked = ctx.how, ctx.what, ctx.saved_tensors, tuple(asked_of(ctx)[2:])
        steps = what.steps(asked, dy is not None, dsum is not None)
        compute = partial(_gradients, how)
        found = [*run_steps(what.op, steps, (dy, dsum), saved, (how.eps,), compute)]
        # DTensor takes no None for the gradient of a parameter that it has moved to its place.
        for i, port in enumerate(what.op.takes):
            if dy is None and asked[i] and port.lies == "affine":
                found[i] = torch.zeros_like(named(what.spec, saved)[port.role])
        return None, None, *found


def _gradients(how: How, step: Step, dy: Tensor, dsum: Tensor | None, saved, eps: float) -> tuple:
    """The gradients that are needed, in the order of Needs.gradients."""
    spec, needs, by_role = step.spec, step.needs, named(step.spec, saved)
    x, gate, weight, bias, *statistics = map(by_role.get, reference.ROLES)
    dy, dsum = (g if g is None else _moved(g, x.placements) for g in (dy, dsum))
    if needs_grad(dy, dsum, x, gate, weight, bias):  # by single operations, which DTensor runs
        again = by_role | dict.fromkeys(reference.STATISTICS)
        return reference.backward(spec, needs, dy, dsum, again, eps)
    ops, dots = torch.ops.tilenorm, None
    if needs.of_sum or (needs.dgate and spec.gate_first):
        sums = ops.grad_sums(dy, x, gate, weight, *statistics, *how.last, how.backend)
        dots = _added_up(sums)
    more = spec.residual is not None, list(needs.gradients), how.backend
    return ops.grad_apply(dy, dsum, x, gate, weight, bias, *statistics, dots, *how.last, *more)


def _added_up(part: Any) -> Tensor:
    """What is Partial, as Replicate: the all-reduce."""
    from torch.distributed.tensor import Replicate

    return _moved(part, [Replicate() if p.is_partial() else p for p in part.placements])


def _moved(x: Any, placements) -> Tensor:
    same = tuple(x.placements) == tuple(placements)
    return x if same else x.redistribute(placements=tuple(placements))


def _rows_placed(x: Any) -> list:
    """Where the rows of x are: as they are, but Replicate in place of what is not a plain shard."""
    from torch.distributed.tensor import Replicate, Shard

    return [p if type(p) is Shard else Replicate() for p in x.placements]


def _along(parameter: Tensor, x: Tensor, placements: list) -> list:
    """Where a parameter has to be for x to be placed so."""
    from torch.distributed.tensor import Replicate, Shard

    before = x.dim() - parameter.dim()  # dimensions of x that the parameter does not have
    shards = [p.dim - before if p.is_shard() else -1 for p in placements]
    return [Shard(d) if d >= 0 else Replicate() for d in shards]
