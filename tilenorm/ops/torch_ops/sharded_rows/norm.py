"""The norm of DTensors whose rows are cut: each process computes what its columns add to a row.

DTensor makes the all-reduces, where a Partial result becomes Replicate. RMSNorm takes one of 4
bytes a row each way. LayerNorm takes one of 4 and one of 8 bytes a row forward, and one of 8 back.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ....launch.calls import needs_of
from ....row import Op
from ....spec import NormSpec, Options
from ....table import BRANCH_PORTS, NOT_OF_ROWS, OPS
from ...passes import reference
from ...passes.bound import options_of
from ...passes.gradients import through_sum
from ...passes.reading import heads_of
from ...passes.reference import branched, name_of
from ...pytorch.errors import wrong
from ...pytorch.torch_private import asked_of
from ..autograd import needs_grad
from . import library  # noqa: F401 (defines the ops)

ROLES = ("x", "residual", "gate", "weight", "bias")  # what the ops take


class How(NamedTuple):
    """What a norm is told beside its tensors. dims: how many dimensions are normalised."""

    options: Options
    dims: int
    eps: float
    backend: str | None


def last_of(how: How) -> tuple:
    """The arguments that all ops take after their tensors. TorchDynamo 2.9 reads no property."""
    return *how.options, how.dims


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
    found = op.named(tensors)
    for stage, own in zip(op.stages, eps, strict=True):
        row = OPS[stage.op]
        given = {role: found.get(stage.ports.get(role, "")) for role in row.roles}
        y, total = normalize(row, given, How(options_of(row, options), dims, own, backend))
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
            placements = _along(tensor, x, at) if port.parameter else at
            given[port.role] = _moved(tensor, placements)
    given["x"] = branched(how.options, given["x"], *[given.get(port.role) for port in BRANCH_PORTS])
    x, addend = given["x"], given.get("addend")
    if addend is not None:  # x + addend is rounded to the addend's dtype, and has x's
        if addend.dtype.itemsize > x.dtype.itemsize:
            takes = f"the input's dtype {x.dtype} where rows are cut"
            raise wrong(op.name, "residual[0]", takes, addend.dtype)
        given["x"] = reference.sum_of(x, addend).to(x.dtype)
    placed = tuple(given.get(role) for role in ROLES)
    recorded, skip = needs_grad(*placed), given.get("skip")
    y, total = PieceNorm.apply(how, *placed) if recorded else forward(how, placed, False)[:2]
    return (y if skip is None else reference.sum_of(y, skip)), total


def forward(how: How, tensors: tuple, save: bool) -> tuple[Tensor | None, ...]:
    """(y, sum, mean, rstd), the last two only if `save`. tensors: those of ROLES."""
    x, residual, gate, *parameters = tensors
    ops, layer, last = torch.ops.tilenorm, how.options.norm == "layer", last_of(how)
    first = gate if how.options.gate_first else None
    part, own, total = ops.row_sums(x, residual, first, *last, how.backend)
    whole, centered = _added_up(part), None
    rows = x if residual is None else total
    if layer:
        centered = _added_up(ops.row_center(x, whole, own, *last, how.backend))
    more = how.eps, x.dtype, save, how.backend
    y, mean, rstd = ops.row_apply(rows, gate, *parameters, whole, centered, *last, *more)
    total = None if residual is None else total
    return y, total, mean if save and layer else None, rstd if save else None


class PieceNorm(Function):
    """Of How and the tensors of ROLES. Its results are y and the sum."""

    @staticmethod
    def forward(ctx, how, *tensors):
        y, total, mean, rstd = forward(how, tensors, True)
        x = tensors[0] if total is None else total
        ctx.save_for_backward(x, *tensors[2:], mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.how = how
        ctx.dtypes = [t if t is None else name_of(t.dtype) for t in tensors]
        return y, total

    @staticmethod
    def backward(ctx, dy, dsum):
        how, names = ctx.how, ("x", *ROLES[2:], "mean", "rstd")
        saved: dict[str, Any] = dict(zip(names, ctx.saved_tensors, strict=True))
        asked = [r for r, need in zip(ROLES, asked_of(ctx)[1:], strict=True) if need]
        heads = heads_of(how.options.hidden, saved["weight"], saved["bias"])
        dtypes = dict(zip(ROLES, ctx.dtypes, strict=True))
        spec = NormSpec.of_tensors(how.options, dtypes, heads)
        dsum = dsum if spec.residual else None
        if dy is None:
            given = {} if dsum is None else through_sum(spec, asked, dsum, saved)
            # DTensor takes no None for the gradient of a parameter that it has moved to its place.
            affine = [role for role in asked if role in ("weight", "bias")]
            given |= {role: torch.zeros_like(saved[role]) for role in affine}
            return None, *map(given.get, ROLES)
        at = saved["x"].placements
        dy, dsum = (g if g is None else _moved(g, at) for g in (dy, dsum))
        needs = needs_of(spec, asked, dsum is not None)
        if not any(needs.gradients):  # y.backward(inputs=[y]) runs y's own node too
            return (None,) * 6
        read = (saved[name] for name in names[:4])
        if needs_grad(dy, dsum, *read):  # by single operations, which DTensor runs
            again = saved | {"mean": None, "rstd": None}
            grads = reference.backward(spec, needs, dy, dsum, again, how.eps)
        else:
            grads = _by_pieces(how, spec, needs, dy, dsum, saved)
        dx, dresidual, *others = grads
        every = dx, dx if spec.shares_dx else dresidual, *others
        return None, *(t if r in asked else None for r, t in zip(ROLES, every, strict=True))


def _by_pieces(how: How, spec: NormSpec, needs, dy, dsum, saved: dict) -> Sequence:
    """The gradients that are needed, in the order of Needs.gradients."""
    x, gate, weight, bias, *statistics = saved.values()
    ops, dots = torch.ops.tilenorm, None
    if needs.dx or needs.dresidual or (needs.dgate and how.options.gate_first):
        sums = ops.grad_sums(dy, x, gate, weight, *statistics, *last_of(how), how.backend)
        dots = _added_up(sums)
    more = spec.residual is not None, list(needs.gradients), how.backend
    return ops.grad_apply(dy, dsum, x, gate, weight, bias, *statistics, dots, *last_of(how), *more)


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
