"""The norm of DTensors whose rows are cut: each process computes what its columns add to a row.

DTensor makes the all-reduces, where a Partial result becomes Replicate. RMSNorm takes one of 4
bytes a row each way. LayerNorm takes one of 4 and one of 8 bytes a row forward, and one of 8 back.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ...spec import Options
from .. import reference
from ..autograd import needs_grad, through_sum
from ..plans import spec_of_tensors
from ..tensors import Results, Saved, Tensors, computed, distributed, dtype_of, merged_needs
from ..torch_private import asked_of
from . import library  # noqa: F401 (defines the ops)


class How(NamedTuple):
    """What a norm is told beside its tensors. dims: how many dimensions are normalised."""

    options: Options
    dims: int
    eps: float
    backend: str | None

    @property
    def last(self) -> tuple:
        """The arguments that all ops take after their tensors."""
        return *self.options, self.dims


def is_cut(x: Tensor, dims: int) -> bool:
    """Whether x is a DTensor whose last `dims` dimensions, which make up a row, are cut."""
    placements = getattr(x, "placements", ())
    return any(p.is_shard() and p.dim >= x.dim() - dims for p in placements)


def normalize(op: str, tensors: Tensors, how: How) -> Results:
    """The norm, and the sum with the residual if there is one, of DTensors of cut rows.

    op: the public function's name. Tensors that are placed otherwise than x are moved to where x
    is. Raises RuntimeError where a tensor is no DTensor.
    """
    x = tensors[0]
    for name, tensor in tensors._asdict().items():
        if tensor is not None and not hasattr(tensor, "placements"):
            raise RuntimeError(
                f"{op}: argument {name!r} takes a DTensor, as the input is one, got a Tensor"
            )
    at = _rows_placed(x)
    rows = [t if t is None else _moved(t, at) for t in tensors[:3]]
    parameters = [t if t is None else _moved(t, _along(t, x, at)) for t in tensors[3:]]
    placed = Tensors(*rows, *parameters)
    if needs_grad(*placed):
        return PieceNorm.apply(how, *placed)
    return forward(how, placed, False)[:2]


def forward(how: How, tensors: Tensors, save: bool) -> tuple[Tensor | None, ...]:
    """(y, sum, mean, rstd), the last two only if `save`."""
    x, residual, gate, *parameters = tensors
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
    return y, total, mean if save and layer else None, rstd if save else None


class PieceNorm(Function):
    """Of How and Tensors. Its results are y and the sum."""

    @staticmethod
    def forward(ctx, how, *tensors):
        given = Tensors(*tensors)
        y, total, mean, rstd = forward(how, given, True)
        x = given.input if total is None else total
        ctx.save_for_backward(x, *given[2:], mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.how, ctx.dtype, ctx.added = how, given.input.dtype, dtype_of(given.residual)
        return y, total

    @staticmethod
    def backward(ctx, dy, dsum):
        mask, saved = asked_of(ctx)[1:], Saved(*ctx.saved_tensors)
        dsum = dsum if ctx.added is not None else None
        if dy is None:
            return None, *through_sum(dsum, ctx.added, ctx.dtype, mask)
        dy, dsum = (g if g is None else _moved(g, saved.x.placements) for g in (dy, dsum))
        tensors = Tensors(dy, saved.x if ctx.added is not None else None, *saved[1:4])
        needs = merged_needs(Tensors(*map(dtype_of, tensors)), dsum is not None, mask)
        if not any(needs):  # y.backward(inputs=[y]) runs y's own node too
            return (None,) * 6
        find = _by_formula if needs_grad(dy, dsum, *saved[:4]) else _by_pieces
        return None, *distributed(
            find(ctx.how, needs, tensors, dsum, saved), ctx.added, ctx.dtype, mask
        )


def _by_pieces(how: How, needs, tensors: Tensors, dsum, saved: Saved) -> tuple:
    """The gradients that are needed. tensors: those of the spec, with dy for the input."""
    dy, (x, gate, weight, _, *statistics) = tensors[0], saved
    ops, dots = torch.ops.tilenorm, None
    if needs.dx or needs.dresidual or (needs.dgate and how.options.gate_first):
        sums = ops.grad_sums(dy, x, gate, weight, *statistics, *how.last, how.backend)
        dots = _added_up(sums)
    more = tensors[1] is not None, computed(needs), how.backend
    return ops.grad_apply(dy, dsum, *saved, dots, *how.last, *more)


def _by_formula(how: How, needs, tensors: Tensors, dsum, saved: Saved) -> tuple:
    """The same by single operations, which DTensor runs and autograd sees."""
    spec = spec_of_tensors(tensors, how.options)
    again = saved._replace(mean=None, rstd=None)
    return reference.backward(spec, needs, tensors[0], dsum, again, how.eps)


def _added_up(part: Tensor) -> Tensor:
    """What is Partial, as Replicate: the all-reduce."""
    from torch.distributed.tensor import Replicate

    return _moved(part, [Replicate() if p.is_partial() else p for p in part.placements])


def _moved(x: Tensor, placements) -> Tensor:
    same = tuple(x.placements) == tuple(placements)
    return x if same else x.redistribute(placements=tuple(placements))


def _rows_placed(x: Tensor) -> list:
    """Where the rows of x are: as they are, but Replicate in place of what is not a plain shard."""
    from torch.distributed.tensor import Replicate, Shard

    return [p if type(p) is Shard else Replicate() for p in x.placements]


def _along(parameter: Tensor, x: Tensor, placements: list) -> list:
    """Where a parameter has to be for x to be placed so."""
    from torch.distributed.tensor import Replicate, Shard

    before = x.dim() - parameter.dim()  # dimensions of x that the parameter does not have
    shards = [p.dim - before if p.is_shard() else -1 for p in placements]
    return [Shard(d) if d >= 0 else Replicate() for d in shards]
