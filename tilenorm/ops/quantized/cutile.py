"""Quantised norms by cuTile: allocate, plan, launch."""

import torch
from torch import Tensor

from ...launch.calls import ABSENT, ForwardArrays
from ...launch.plan import ForwardPlan
from ...launch.scales import Scales, padded
from ...launch.target import Target
from ...launch.transposed import TransposedArrays, transposed_launches
from ...spec import NormSpec
from .. import cutile
from ..cutile import Run, fresh, on_device
from ..layout import as_read, parameter_of, plain, rows_of, shaped_as
from ..tensors import Saved, Tensors, trimmed
from .reference import quantize
from .tensors import Results, q_dtype, scale_of
from .transposed import BLOCKS

MOST_SCALES = 2**31 - 1  # the kernels number scales in 32 bits
NAMES = ("x", *Tensors._fields[1:])  # of ForwardArrays


def forward(plan: ForwardPlan, tensors: tuple, eps: float, run: Run = on_device) -> Results:
    """tensors: Tensors, and the scale that the caller gives, or None.

    Raises NotImplementedError for more scales than the kernels can number.
    """
    *tensors, given = tensors
    spec, how, x = plan.spec, plan.spec.quantized, tensors[0]
    shape = x.numel() // spec.hidden, spec.hidden
    rows = shape[0]
    scales = Scales.of(how, spec.hidden, rows)
    if scales.count > MOST_SCALES:
        raise NotImplementedError(
            f"{spec.op}: the kernels write up to {MOST_SCALES} scales, got {scales.count}"
        )
    q = fresh(x, shape, q_dtype(spec))
    y = fresh(x, shape, x.dtype) if how.output else None
    total = None if tensors[1] is None else fresh(x, shape, tensors[1].dtype)
    rstd = fresh(x, (rows,), torch.float32) if plan.save else None
    mean = fresh(x, (rows,), torch.float32) if plan.save and spec.norm == "layer" else None
    amax = fresh(x, (1,), torch.int32).zero_() if how.amax else None
    array, scale = given, None
    if given is None:
        array = fresh(x, (scales.count,), getattr(torch, scales.dtype))
        if scales.padding:
            array.zero_()
        scale = scale_of(array, scales)
    if rows:
        matrices = x.dim() == 2 and x.shape == shape
        if not (matrices and rows > 1 and not spec.heads and plain(tensors)):
            tensors = as_read(tensors, spec, shape)
        slots = plan.slots(rows)
        made = {"y": y, "sum": total, "mean": mean, "rstd": rstd}
        made |= {"q": q, "scale": array, "amax": amax}
        made["slots"] = None if slots is None else fresh(x, slots, torch.int32)
        made |= zip(NAMES, tensors, strict=True)
        arrays = {name: ABSENT if t is None else t for name, t in made.items()}
        run(plan.launches(rows, eps), ForwardArrays(**arrays), x.get_device())
    q, y, total = (_shaped(t, x) for t in (q, y, total))
    return Results(q, scale, _number(amax), y, total, mean, rstd)


def cast_apart(
    spec: NormSpec, plan: ForwardPlan, tensors: tuple, eps: float, run: Run = on_device
) -> Results:
    """The plain norm's kernels, and PyTorch's operations for the cast. plan: of the plain norm."""
    *tensors, given = tensors
    y, *others = cutile.forward(plan, trimmed(tuple(tensors)), eps, run=run)
    q, scale, amax = quantize(spec, y, given)
    return Results(q, scale, amax, y if spec.quantized.output else None, *others)


def transposed(
    spec: NormSpec, target: Target, saved: Saved, eps: float, run: Run = on_device
) -> tuple[Tensor, Tensor]:
    """As transposed.reference. eps: is not read, because the saved rstd holds it."""
    x, _, weight, bias, mean, rstd = saved
    rows = x.numel() // spec.hidden
    scales = Scales.of(BLOCKS, padded(rows), spec.hidden)
    q = fresh(x, (spec.hidden, padded(rows)), q_dtype(spec))
    array = fresh(x, (scales.count,), torch.float32)
    if rows:
        normalized = rstd is not None
        arrays = TransposedArrays(
            x=rows_of(x, spec),
            weight=ABSENT if weight is None else parameter_of(weight, spec),
            bias=ABSENT if bias is None else parameter_of(bias, spec),
            mean=ABSENT if mean is None else mean.reshape(-1),
            rstd=rstd.reshape(-1) if normalized else ABSENT,
            q=q,
            scale=array,
        )
        run(transposed_launches(spec, target, rows, normalized), arrays, x.get_device())
    return q, scale_of(array, scales)


def _shaped(made: Tensor | None, like: Tensor) -> Tensor | None:
    return made if made is None or made.shape == like.shape else shaped_as(made, like)


def _number(amax: Tensor | None) -> Tensor | None:
    """The float32 number whose bits the kernels compare."""
    return amax if amax is None else amax.view(torch.float32)
