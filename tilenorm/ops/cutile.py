"""The cuTile implementation: bound calls, which allocate and launch.

`bind_forward` and `bind_backward` bind a plan. What they return finds the rest once for each shape
of the input, and keeps it. Eager calls, the torch.library ops and Inductor's generated code all end
here.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..launch.calls import ABSENT, BackwardArrays, ForwardArrays, Launch
from ..launch.kernel import launch
from ..launch.plan import BackwardPlan, ForwardPlan
from ..launch.scales import Scales
from ..spec import PLAIN, NormSpec
from . import torch_private
from .layout import (
    Read,
    as_read,
    contiguous_strides_of,
    rows_of,
    shaped_as,
    start_vectors,
    vector_of,
)
from .quantized.reference import quantize
from .quantized.tensors import q_dtype, scale_of
from .tensors import LAYER_SCALE, SKIP, Branch, Saved, Tensors, trimmed
from .torch_private import reinterpret

Run = Callable[[Sequence[Launch], tuple, int], None]
MOST_SHAPES = 256  # that a bound call keeps
# What a chain has neither of, from the slots on.
NEITHER = (ABSENT,) * (
    ForwardArrays._fields.index("inner_w") - ForwardArrays._fields.index("slots")
)
MOST_SCALES = 2**31 - 1  # the kernels number scales in 32 bits


def on_device(launches: Sequence[Launch], arrays: tuple, index: int) -> None:
    """Launch on the current stream of the current CUDA device, which is `index`."""
    launch(torch_private.current_stream(index), launches, arrays)


class Layout(NamedTuple):
    """What follows from the shape of an input.

    shape, strides: of the input and the outputs with rows, contiguous. rows: how many. matrix:
    (rows, hidden), or None where the outputs are such a matrix. read: see layout.as_read. slots,
    partials: shapes of the scratch, or None. scales: of a quantised norm.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    rows: int
    matrix: tuple[int, int] | None
    read: Read | None
    slots: tuple[int, int] | None
    partials: tuple[int, int] | None = None
    scales: Scales | None = None


class Layouts(dict):
    """The Layout of each shape that a plan has met, the first MOST_SHAPES of them."""

    def __init__(self, plan: ForwardPlan | BackwardPlan):
        super().__init__()
        self._plan = plan

    def __missing__(self, shape: torch.Size) -> Layout:
        plan, spec = self._plan, self._plan.spec
        hidden, how = spec.hidden, spec.quantized
        rows = shape.numel() // hidden
        matrix = rows, hidden
        read = Read.of(spec, rows)
        # An extent of 1 may have any stride, and the compiler reads by what the stride is.
        as_it_is = shape == read.rows and rows > 1 and hidden > 1
        layout = Layout(
            tuple(shape),
            contiguous_strides_of(shape),
            rows,
            None if shape == matrix else matrix,
            None if as_it_is else read,
            plan.slots(rows) if rows else None,
            plan.partials(rows) if rows and isinstance(plan, BackwardPlan) else None,
            None if how is None else Scales.of(how, hidden, rows),
        )
        if len(self) < MOST_SHAPES:
            self[shape] = layout
        return layout


def bind_forward(plan: ForwardPlan, run: Run = on_device) -> Callable:
    """A function of (tensors, eps, laid_out) that returns Results, as a plain tuple.

    y and the sum are contiguous; mean and rstd are (rows,) float32 where the plan saves them.
    laid_out: whether the caller knows that the tensors are contiguous matrices of rows, and
    vectors.
    """
    spec, saves, layouts = plan.spec, plan.save, Layouts(plan)
    joins, by_row = spec.joins, (spec.hidden, 1)
    layer, added = spec.norm == "layer", spec.residual is not None

    def forward(tensors: Tensors, eps: float, laid_out: bool = False) -> tuple:
        x = tensors[0]
        shape, strides, rows, matrix, read, slots, *_ = layouts[x.shape]
        empty = torch_private.empty_strided_cuda if x.is_cuda else _empty_strided_cpu
        y = y_rows = empty(shape, strides, (tensors[SKIP] if spec.skip else x).dtype)
        total = sum_rows = mean = rstd = None
        if added:
            total = sum_rows = empty(shape, strides, tensors[1].dtype)
        if saves:
            rstd = empty((rows,), (1,), torch.float32)
            if layer:
                mean = empty((rows,), (1,), torch.float32)
        if not rows:
            return y, total, mean, rstd
        if matrix is not None:
            y_rows = reinterpret(y, matrix, by_row)
            if added:
                sum_rows = reinterpret(total, matrix, by_row)
        x, residual, gate, weight, bias = tensors[:PLAIN]
        joined = tensors[PLAIN:LAYER_SCALE] if joins else ()
        if not (laid_out and start_vectors(tensors)):
            rows_read = (x, residual, gate, *joined)
            (x, residual, gate, *joined), (weight, bias) = as_read(
                rows_read, (weight, bias), spec, read
            )
        arrays = (  # in the order of ForwardArrays, which takes longer to make
            x,
            y_rows,
            ABSENT if weight is None else weight,
            ABSENT if bias is None else bias,
            ABSENT if residual is None else residual,
            ABSENT if gate is None else gate,
            ABSENT if sum_rows is None else sum_rows,
            ABSENT if mean is None else mean,
            ABSENT if rstd is None else rstd,
            ABSENT if slots is None else empty(slots, (slots[1], 1), torch.int32),
        )
        if joins:
            addend, skip, mask = joined
            factors = tensors[LAYER_SCALE]
            arrays += (
                ABSENT if addend is None else addend,
                ABSENT if skip is None else skip,
                ABSENT if mask is None else bytes_of(mask),
                ABSENT if factors is None else vector_of(factors, spec.aligned),
            )
        run(plan.launches(rows, eps), arrays, x.get_device())
        return y, total, mean, rstd

    return forward


def bind_quantized(plan: ForwardPlan, run: Run = on_device) -> Callable:
    """A function of (tensors, eps) that returns the Results of a quantised norm, as a plain tuple.

    tensors: Tensors, and the scale that the caller gives, or None. The function raises
    NotImplementedError for more scales than the kernels can number.
    """
    spec, how, saves, layouts = plan.spec, plan.spec.quantized, plan.save, Layouts(plan)
    by_row, dtype, mx = (spec.hidden, 1), q_dtype(spec), how.scaling == "mx"
    layer, added = spec.norm == "layer", spec.residual is not None

    def quantized(tensors: tuple, eps: float, _laid_out: bool = False) -> tuple:
        x, residual, _, weight, bias, *more, given = tensors
        addend = more[0] if more else None
        shape, strides, rows, matrix, read, slots, _, scales = layouts[x.shape]
        if scales.count > MOST_SCALES:
            raise NotImplementedError(
                f"{spec.op}: the kernels write up to {MOST_SCALES} scales, got {scales.count}"
            )
        empty = torch_private.empty_strided_cuda if x.is_cuda else _empty_strided_cpu
        q = empty(shape, strides, dtype)
        y = empty(shape, strides, x.dtype) if how.output else None
        total = empty(shape, strides, residual.dtype) if added else None
        rstd = empty((rows,), (1,), torch.float32) if saves else None
        mean = empty((rows,), (1,), torch.float32) if saves and layer else None
        amax = empty((1,), (1,), torch.int32).zero_() if how.amax else None
        array = given
        if given is None:
            array = empty((scales.count,), (1,), torch.uint8 if mx else torch.float32)
            if scales.padding:
                array.zero_()
        if rows:
            q_rows, y_rows, sum_rows = q, y, total
            if matrix is not None:
                q_rows = reinterpret(q, matrix, by_row)
                y_rows = None if y is None else reinterpret(y, matrix, by_row)
                sum_rows = None if total is None else reinterpret(total, matrix, by_row)
            in_rows = x, residual, addend
            (x, residual, addend), (weight, bias) = as_read(in_rows, (weight, bias), spec, read)
            arrays = (  # in the order of ForwardArrays
                x,
                ABSENT if y_rows is None else y_rows,
                ABSENT if weight is None else weight,
                ABSENT if bias is None else bias,
                ABSENT if residual is None else residual,
                ABSENT,
                ABSENT if sum_rows is None else sum_rows,
                ABSENT if mean is None else mean,
                ABSENT if rstd is None else rstd,
                ABSENT if slots is None else empty(slots, (slots[1], 1), torch.int32),
                ABSENT if addend is None else addend,
                ABSENT,
                ABSENT,
                ABSENT,
                q_rows,
                array,
                ABSENT if amax is None else amax,
                ABSENT,
                ABSENT,
            )
            run(plan.launches(rows, eps), arrays, x.get_device())
        scale = scale_of(array, scales) if given is None else None
        amax = None if amax is None else amax.view(torch.float32)  # whose bits the kernels compare
        return q, scale, amax, y, total, mean, rstd

    return quantized


def bind_cast_apart(spec: NormSpec, plan: ForwardPlan, run: Run = on_device) -> Callable:
    """The same by the plain norm's kernels, and PyTorch's operations for the cast. plan: of the
    plain norm.
    """
    normalize = bind_forward(plan, run)

    def cast_apart(tensors: tuple, eps: float, _laid_out: bool = False) -> tuple:
        *tensors, given = tensors
        y, *others = normalize(trimmed(tuple(tensors)), eps)
        q, scale, amax = quantize(spec, y, given)
        return q, scale, amax, y if spec.quantized.output else None, *others

    return cast_apart


def bind_chain(plan: ForwardPlan, run: Run = on_device) -> Callable:
    """A function of (input, residual, weight, next_weight) and eps, for a norm, the addition to the
    residual and another norm. It returns y, the sum, and each norm's rstd.
    """
    spec, saves, layouts = plan.spec, plan.save, Layouts(plan)
    by_row = spec.hidden, 1

    def chain(tensors: tuple, eps: float) -> tuple:
        x, residual, *weights = tensors
        shape, strides, rows, matrix, read, *_ = layouts[x.shape]
        empty = torch_private.empty_strided_cuda if x.is_cuda else _empty_strided_cpu
        y = y_rows = empty(shape, strides, residual.dtype)
        total = sum_rows = empty(shape, strides, residual.dtype)
        inner_rstd = empty((rows,), (1,), torch.float32) if saves else None
        rstd = empty((rows,), (1,), torch.float32) if saves else None
        if rows:
            if matrix is not None:
                y_rows = reinterpret(y, matrix, by_row)
                sum_rows = reinterpret(total, matrix, by_row)
            (x, residual), (weight, after) = as_read((x, residual), weights, spec, read)
            arrays = (  # in the order of ForwardArrays
                x,
                y_rows,
                ABSENT if after is None else after,
                ABSENT,
                residual,
                ABSENT,
                sum_rows,
                ABSENT,
                ABSENT if rstd is None else rstd,
                *NEITHER,
                ABSENT if weight is None else weight,
                ABSENT if inner_rstd is None else inner_rstd,
            )
            run(plan.launches(rows, eps), arrays, x.get_device())
        return y, total, inner_rstd, rstd

    return chain


def bind_backward(plan: BackwardPlan, run: Run = on_device) -> Callable:
    """A function of (dy, dsum, saved, eps, more, branch) that returns the gradients of Tensors that
    the plan needs, contiguous, each in its own tensor's dtype, and behind them y if the plan needs
    it.

    dsum: the gradient of the sum, which is read if the plan needs it. eps: is not read, because the
    saved rstd holds it. more: the terms of dy behind the first. branch: what the input was
    multiplied by.
    """
    spec, layouts = plan.spec, Layouts(plan)
    by_row = spec.hidden, 1
    need_dx, need_dw, need_db, need_dresidual, need_dgate, need_dsum, _, need_y = plan.needs

    def backward(
        dy: Tensor,
        dsum: Tensor | None,
        saved: Saved,
        eps: float = 0.0,
        more: Sequence[Tensor] = (),
        branch: Branch | None = None,
    ) -> tuple[Tensor | None, ...]:
        x, gate, weight, bias, mean, rstd = saved
        shape, strides, rows, matrix, read, slots, partials, _ = layouts[x.shape]
        empty = torch_private.empty_strided_cuda if x.is_cuda else _empty_strided_cpu
        dx = empty(shape, strides, (x if spec.skip else dy).dtype) if need_dx else None
        dresidual = empty(shape, strides, x.dtype) if need_dresidual else None
        dgate = empty(shape, strides, gate.dtype) if need_dgate else None
        dw = empty((weight.numel(),), (1,), weight.dtype) if need_dw else None
        db = empty((bias.numel(),), (1,), bias.dtype) if need_db else None
        y = empty(shape, strides, dy.dtype) if need_y else None
        if rows:
            made = dx, dresidual, dgate, y
            if matrix is not None:
                made = [t if t is None else reinterpret(t, matrix, by_row) for t in made]
            made_dx, made_dresidual, made_dgate, made_y = made
            in_rows = x, gate, dsum if need_dsum else None, dy, *more
            in_rows, (weight, bias) = as_read(in_rows, (weight, bias), spec, read)
            x, gate, dsum, *terms = in_rows
            arrays = (  # in the order of BackwardArrays
                x,
                tuple(terms),
                ABSENT if gate is None else gate,
                ABSENT if dsum is None else dsum,
                ABSENT if weight is None else weight,
                ABSENT if bias is None else bias,
                ABSENT if mean is None else mean,
                rstd,
                ABSENT if made_dx is None else made_dx,
                ABSENT if made_dresidual is None else made_dresidual,
                ABSENT if made_dgate is None else made_dgate,
                ABSENT if made_y is None else made_y,
                ABSENT if partials is None else empty(partials, (partials[1], 1), torch.float32),
                ABSENT if slots is None else empty(slots, (slots[1], 1), torch.int32),
                ABSENT if dw is None else dw,
                ABSENT if db is None else db,
            )
            if spec.branches:
                arrays = with_branch(arrays, spec, branch)
            run(plan.launches(rows), arrays, x.get_device())
        else:
            for sums in (dw, db):
                if sums is not None:
                    sums.zero_()
        weight, bias = saved[2:4]
        if need_dw and weight.dim() > 1:
            dw = shaped_as(dw, weight)
        if need_db and bias.dim() > 1:
            db = shaped_as(db, bias)
        return (dx, dresidual, dgate, dw, db, y) if need_y else (dx, dresidual, dgate, dw, db)

    return backward


def with_branch(arrays: tuple, spec: NormSpec, branch: Branch) -> BackwardArrays:
    """The arrays of a backward pass, and what the input was multiplied by."""
    mask, layer_scale, _ = branch
    mask = ABSENT if mask is None else bytes_of(rows_of(mask, spec))
    if layer_scale is not None:
        layer_scale = vector_of(layer_scale, spec.aligned)
    arrays += (mask, ABSENT if layer_scale is None else layer_scale)
    return BackwardArrays(*arrays)


def bytes_of(tensor: Tensor) -> Tensor:
    """A tensor as the kernels read it: a mask as bytes, which are 0 or 1."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def fresh(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A contiguous tensor on the device of another, not filled."""
    empty = torch_private.empty_strided_cuda if like.is_cuda else _empty_strided_cpu
    return empty(tuple(shape), contiguous_strides_of(shape), dtype)


def _empty_strided_cpu(shape: tuple[int, ...], strides: tuple, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor. Inductor's allocator does not fill it where PyTorch is told to."""
    return torch.empty(shape, dtype=dtype)
