"""The norm of DTensors whose rows are cut: each process computes what its columns add to a row.

DTensor makes the all-reduces, where a Partial result becomes Replicate. RMSNorm takes one of 4
bytes a row each way. LayerNorm takes one of 4 and one of 8 bytes a row forward, and one of 8 back.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ...spec import PLAIN, Options
from .. import reference
from ..autograd import needs_grad, through_sum
from ..branch import branched
from ..plans import spec_of_tensors
from ..tensors import ARGUMENTS, Results, Saved, Tensors, distributed, dtype_of, merged_needs
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


def normalize(op: str, tensors: tuple, how: How) -> Results:
    """The norm, and the sum with the residual if there is one, of DTensors of cut rows.

    op: the public function's name. Tensors that are placed otherwise than x are moved to where x
    is. Operations of their own mask and scale the input, and add an addend and a skip. Raises
    RuntimeError where a tensor is no DTensor.
    """
    x = tensors[0]
    for name, tensor in zip(Tensors._fields, tensors, strict=False):
        if tensor is not None and not hasattr(tensor, "placements"):
            raise RuntimeError(
                f"{op}: argument {ARGUMENTS.get(name, name)!r} takes a DTensor, as the input is"
                " one, got a Tensor"
            )
    at = _rows_placed(x)
    rows = [t if t is None else _moved(t, at) for t in tensors[:3]]
    parameters = [t if t is None else _moved(t, _along(t, x, at)) for t in tensors[3:PLAIN]]
    addend, skip, mask, layer_scale = tensors[PLAIN:] or (None,) * 4
    mask = mask if mask is None else _moved(mask, at)
    if layer_scale is not None:
        layer_scale = _moved(layer_scale, _along(layer_scale, x, at))
    rows[0] = branched(how.options, rows[0], mask, layer_scale)
    if addend is not None:
        rows[0] = _plus(op, rows[0], _moved(addend, at))
    placed = (*rows, *parameters)
    run = PieceNorm.apply if needs_grad(*placed) else _without_gradients
    y, total = run(how, *placed)
    return (y if skip is None else reference.sum_of(y, _moved(skip, at))), total


def _without_gradients(how: How, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return forward(how, tensors, False)[:2]


def _plus(op: str, x: Tensor, addend: Tensor) -> Tensor:
    """x + addend, rounded to the addend's dtype, in x's. RuntimeError if x's has fewer bits."""
    if addend.dtype.itemsize > x.dtype.itemsize:
        raise RuntimeError(
            f"{op}: argument 'residual[0]' takes the input's dtype {x.dtype} where rows are cut,"
            f" got {addend.dtype}"
        )
    return reference.sum_of(x, addend).to(x.dtype)


def forward(how: How, tensors: tuple, save: bool) -> tuple[Tensor | None, ...]:
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
    """Of How and the PLAIN tensors. Its results are y and the sum."""

    @staticmethod
    def forward(ctx, how, *tensors):
        y, total, mean, rstd = forward(how, tensors, True)
        x = tensors[0] if total is None else total
        ctx.save_for_backward(x, *tensors[2:], mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.how, ctx.dtype, ctx.added = how, tensors[0].dtype, dtype_of(tensors[1])
        return y, total

    @staticmethod
    def backward(ctx, dy, dsum):
        mask, saved = asked_of(ctx)[1:], Saved(*ctx.saved_tensors)
        x: Any = saved.x  # a DTensor
        dsum = dsum if ctx.added is not None else None
        if dy is None:
            return None, *through_sum(dsum, (ctx.dtype, ctx.added), mask)
        dy, dsum = (g if g is None else _moved(g, x.placements) for g in (dy, dsum))
        tensors = (dy, saved.x if ctx.added is not None else None, *saved[1:4])
        needs = merged_needs(tuple(map(dtype_of, tensors)), dsum is not None, mask)
        if not any(needs.gradients):  # y.backward(inputs=[y]) runs y's own node too
            return (None,) * 6
        find = _by_formula if needs_grad(dy, dsum, *saved[:4]) else _by_pieces
        grads = find(ctx.how, needs, tensors, dsum, saved)
        return None, *distributed(grads, (ctx.dtype, ctx.added), mask)


def _by_pieces(how: How, needs, tensors: tuple, dsum, saved: Saved) -> tuple:
    """The gradients that are needed. tensors: those of the spec, with dy for the input."""
    dy, (x, gate, weight, _, *statistics) = tensors[0], saved
    ops, dots = torch.ops.tilenorm, None
    if needs.dx or needs.dresidual or (needs.dgate and how.options.gate_first):
        sums = ops.grad_sums(dy, x, gate, weight, *statistics, *how.last, how.backend)
        dots = _added_up(sums)
    more = tensors[1] is not None, needs.gradients, how.backend
    return ops.grad_apply(dy, dsum, *saved, dots, *how.last, *more)


def _by_formula(how: How, needs, tensors: tuple, dsum, saved: Saved) -> tuple:
    """The same by single operations, which DTensor runs and autograd sees."""
    spec = spec_of_tensors(tensors, how.options)
    again = saved._replace(mean=None, rstd=None)
    return reference.backward(spec, needs, tensors[0], dsum, again, how.eps)


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
