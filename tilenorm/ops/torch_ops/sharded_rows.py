"""The norm of DTensors whose rows are sharded: each process has some columns of each row.

Each process computes with PyTorch's own operations on its columns. DTensor adds up the numbers of a
row over the processes, where a Partial tensor becomes Replicate. RMSNorm takes one all-reduce of 4
bytes a row each way. LayerNorm takes one of 4 and one of 8 bytes a row forward, and one of 8 back.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.compiler import is_compiling

from ...launch.calls import needs_of
from ...row import Op
from ...spec import NormSpec, Options
from ...table import BRANCH_PORTS, NOT_OF_ROWS, OPS
from ..passes import reference
from ..passes.bound import kinds_of, options_of, specs_of
from ..passes.reading import contiguous_strides_of, heads_of
from ..passes.reference import act, name_of, scale, slope, statistics_dtype
from ..passes.registry import device_of, select_reference
from ..pytorch.errors import wrong
from ..pytorch.torch_private import asked_of
from .autograd import needs_grad

ROLES = ("x", "residual", "gate", "weight", "bias")  # what the norm takes
PARAMETERS = ("weight", "bias")
SHARDED = "rows are sharded over processes, for which there are no kernels"


class How(NamedTuple):
    """What a norm is told beside its tensors. dims: how many dimensions are normalised. out_dtype:
    of the output; None for the input's.
    """

    options: Options
    dims: int
    eps: float
    out_dtype: torch.dtype | None = None


def has_sharded_rows(x: Tensor, dims: int) -> bool:
    """Whether x is a DTensor that is sharded in one of its last `dims` dimensions, a row's."""
    placements = getattr(x, "placements", ())
    return any(p.is_shard() and p.dim >= x.dim() - dims for p in placements)


def of_sharded_rows(
    op: Op, tensors: tuple, options: tuple, dims: int, eps: tuple, backend: str | None
) -> tuple:
    """What an op makes of DTensors with sharded rows, for users, without mean and rstd.

    options: `hidden` and the values of the op's options. eps: of each of its norms.
    """
    if op.name in NOT_OF_ROWS:
        raise NotImplementedError(
            f"{op.name}: argument 'input' takes no DTensor that is cut in a normalised dimension"
        )
    for port, tensor in zip(op.takes, tensors, strict=True):
        if tensor is not None and not hasattr(tensor, "placements"):
            raise wrong(op.name, port.argument, "a DTensor, as the input is one", "a Tensor")
    _select(op, tensors, options, backend)
    values = op.named(tensors)
    out_dtype = op.named_options(options).get("out_dtype")
    for stage, stage_eps in zip(op.stages, eps, strict=True):
        row = OPS[stage.op]
        inputs = {role: values.get(stage.ports.get(role, "")) for role in row.roles}
        how = How(options_of(op, options), dims, stage_eps, out_dtype)
        y, total = normalize(row, inputs, how)
        values |= {stage.ports["y"]: y, stage.ports.get("sum", ""): total}
    return tuple([values.get(port.name) for port in op.makes[: op.shown]])


def _select(op: Op, tensors: tuple, options: tuple, backend: str | None) -> None:
    """Check that the reference may serve, and warn where the kernels would serve whole rows."""
    x = tensors[0]
    if is_compiling() or type(x.to_local()) is not Tensor:  # a fake tensor may have no device
        select_reference(op.name, (), None, backend, SHARDED)
    else:
        _selected(op.name, options, *kinds_of(op, tensors, options[0]), x.device, backend)


@cache
def _selected(name: str, options: tuple, dtypes, heads, device, backend: str | None) -> None:
    specs = specs_of(OPS[name], options, dtypes, heads)
    select_reference(name, specs, device_of(device.type, device.index), backend, SHARDED)


def normalize(op: Op, inputs: dict[str, Any], how: How) -> tuple[Tensor, Tensor | None]:
    """The norm, and the sum with the residual if there is one.

    inputs: the tensors of the norm by their roles. A tensor that is placed otherwise than x is
    moved to where x is. DTensor's own operations mask and scale the input, and add an addend and a
    skip.
    """
    x = inputs["x"]
    at = _rows_placed(x)
    for port in op.takes:
        tensor = inputs[port.role]
        if tensor is not None:
            placements = _along(tensor, x, at) if port.parameter else at
            inputs[port.role] = _moved(tensor, placements)
    factors = [inputs.get(port.role) for port in BRANCH_PORTS]
    inputs["x"] = reference.branched(how.options, inputs["x"], *factors)
    x, addend = inputs["x"], inputs.get("addend")
    if addend is not None:  # x + addend is rounded to the addend's dtype, and has x's
        if addend.dtype.itemsize > x.dtype.itemsize:
            takes = f"the input's dtype {x.dtype} where rows are cut"
            raise wrong(op.name, "residual[0]", takes, addend.dtype)
        inputs["x"] = reference.sum_of(x, addend).to(x.dtype)
    tensors, skip = tuple(inputs.get(role) for role in ROLES), inputs.get("skip")
    recorded = needs_grad(*tensors)
    y, total = ShardedNorm.apply(how, *tensors) if recorded else forward(how, *tensors)[:2]
    return (y if skip is None else reference.sum_of(y, skip)), total


class ShardedNorm(Function):
    """Of How and the tensors of ROLES. Its results are y and the sum."""

    @staticmethod
    def forward(ctx, how, *tensors):
        y, total, mean, rstd = forward(how, *tensors)
        ctx.save_for_backward(tensors[0] if total is None else total, *tensors[2:], mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.how, ctx.dtypes = how, [t if t is None else t.dtype for t in tensors]
        return y, total

    @staticmethod
    def backward(ctx, dy, dsum):
        saved: dict[str, Any] = dict(zip(reference.ROLES, ctx.saved_tensors, strict=True))
        dtypes = dict(zip(ROLES, ctx.dtypes, strict=True))
        asked = [role for role, need in zip(ROLES, asked_of(ctx)[1:], strict=True) if need]
        by_role: dict[str, Any] = {}
        dy, dsum = (g if g is None else _moved(g, saved["x"].placements) for g in (dy, dsum))
        if dy is None:
            # DTensor takes no None for the gradient of a parameter that it has moved to its place.
            by_role = {role: torch.zeros_like(saved[role]) for role in asked if role in PARAMETERS}
            if dsum is not None:  # copies, because dsum is the caller's
                of_sum = [role for role in asked if role in ("x", "residual")]
                by_role |= {role: dsum.to(dtypes[role], copy=True) for role in of_sum}
        elif asked and needs_grad(dy, dsum, *[saved[role] for role in reference.ROLES[:4]]):
            by_role = differentiable(ctx.how, asked, dtypes, dy, dsum, saved)
        elif asked:  # y.backward(inputs=[y]) runs y's own node, and asks for nothing
            by_role = gradients(ctx.how, asked, dtypes, dy, dsum, saved)
        return None, *[by_role.get(role) if role in asked else None for role in ROLES]


def forward(how: How, x, residual, gate, weight, bias) -> tuple[Any, ...]:
    """(y, sum, mean, rstd). mean and rstd are plain tensors, of this process's rows.

    The formulas are those of the reference.
    """
    options, lead, dtype = how.options, x.dim() - how.dims, statistics_dtype(x, residual)
    rows, added, z = (_columns(t, lead) for t in (x, residual, gate))
    after = z is not None and not options.gate_first
    total = None if added is None else (rows + added).to(added.dtype)  # the bits of sum_of
    u = (rows if total is None else total).to(dtype)
    u = u * act(options, z.to(dtype)) if options.gate_first else u
    means, rstd = statistics(how, x, u)
    for mean in means:
        u = u - mean
    y = affine(how, u * rstd, weight, bias, x.dtype)
    y = y * act(options, z.to(dtype)) if after else y
    total = total if total is None else _placed(total, x, x.placements)
    y = _placed(y.to(how.out_dtype or x.dtype), x, x.placements)
    return y, total, sum(means) if means else None, rstd


def statistics(how: How, x: Any, u: Tensor) -> tuple[Sequence[Tensor], Tensor]:
    """(means, rstd) of whole rows, of shape (..., 1). The mean is the sum of two numbers, and
    RMSNorm has none. u: what is normalised.

    The mean of a process's own columns is the sum of two numbers, too: rounding leaves some of it
    in u − mean. The variance of a row follows from Σ (u − mean)² over the columns of each process;
    after Chan, Golub and LeVeque.
    """
    if how.options.norm != "layer":
        (square,) = _means(how, x, u.square().sum(-1, keepdim=True))
        return (), torch.rsqrt(square + how.eps)
    count = u.shape[-1]
    local = u.sum(-1, keepdim=True) / max(count, 1)  # a process may have no columns
    u = u - local
    rest = u.sum(-1, keepdim=True) / max(count, 1)
    squares = (u - rest).square().sum(-1, keepdim=True)
    (mean,) = _means(how, x, (local + rest) * count)
    apart = (local - mean) + rest
    correction, square = _means(how, x, apart * count, squares + apart.square() * count)
    return (mean, correction), torch.rsqrt(square - correction.square() + how.eps)


def affine(how: How, x_hat: Tensor, weight, bias, dtype: torch.dtype) -> Tensor:
    """x̂ · (weight + offset) + bias. dtype: the input's, see reference.affine."""
    compute, early = x_hat.dtype, how.options.rounding == "early"
    y = x_hat.to(dtype).to(compute) if early else x_hat
    if weight is not None:
        y = y * scale(how.options, _parameter(how, weight), compute)
        again = early and weight.dtype == dtype and how.out_dtype in (None, dtype)
        y = y.to(dtype).to(compute) if again else y
    return y if bias is None else y + _parameter(how, bias).to(compute)


def gradients(how: How, asked: Sequence[str], dtypes: dict, dy, dsum, saved: dict) -> dict:
    """The gradients that are asked for, by roles.

    dtypes: of the tensors, by their roles. saved: by reference.ROLES. A product of a 16-bit tensor
    and a float32 tensor is float32, so that no tensor is cast first.
    """
    x, gate, weight, bias, mean, rstd = map(saved.get, reference.ROLES)
    options, lead, dtype = how.options, x.dim() - how.dims, rstd.dtype
    rows, g, z = (_columns(t, lead) for t in (x, dy, gate))
    z = z if z is None else z.to(dtype)
    first = options.gate_first
    after = z is not None and not first
    u = rows * act(options, z) if first else rows
    x_hat = (u if mean is None else u - mean) * rstd
    by_role: dict[str, Any] = {}
    if after and "gate" in asked:
        by_role["gate"] = g * affine(how, x_hat, weight, bias, dtype) * slope(options, z)
    g = g * act(options, z) if after else g
    if "weight" in asked:
        by_role["weight"] = _sum_of_rows(g * x_hat, x, weight)
    if "bias" in asked:
        by_role["bias"] = _sum_of_rows(g.to(dtype), x, bias)
    if {"x", "residual", *["gate"] * first} & {*asked}:
        g = g if weight is None else g * scale(options, _parameter(how, weight), dtype)
        sums = [(g * x_hat).sum(-1, keepdim=True)]
        sums += [] if mean is None else [g.sum(-1, keepdim=True, dtype=dtype)]
        dot, *total = _means(how, x, *sums)
        dx = g - x_hat * dot
        dx = (dx - total[0] if total else dx) * rstd
        if first:
            by_role["gate"] = dx * rows * slope(options, z)
            dx = dx * act(options, z)
        by_role["x"] = by_role["residual"] = dx if dsum is None else dx + _columns(dsum, lead)
    rounded = {role: by_role[role].to(dtypes[role]) for role in asked if role not in PARAMETERS}
    return by_role | {role: _placed(t, x, x.placements) for role, t in rounded.items()}


def differentiable(how: How, asked: Sequence[str], dtypes: dict, dy, dsum, saved: dict) -> dict:
    """The same by single operations of the reference, which DTensor runs: mean and rstd are found
    once more, as functions of x.
    """
    heads = heads_of(how.options.hidden, saved["weight"], saved["bias"])
    names = {role: t if t is None else name_of(t) for role, t in dtypes.items()}
    spec = NormSpec.of_tensors(how.options, names, heads)
    needs = needs_of(spec, asked, dsum is not None)
    again = saved | dict.fromkeys(reference.STATISTICS)
    dx, dresidual, *others = reference.backward(spec, needs, dy, dsum, again, how.eps)
    every = dx, dx if spec.shares_dx else dresidual, *others
    return dict(zip(ROLES, every, strict=True))


def _columns(t: Any, lead: int) -> Any:
    """This process's columns of each row, as the last dimension behind `lead` dimensions."""
    return t if t is None else t.to_local().flatten(lead).contiguous()


def _parameter(how: How, parameter: Any) -> Tensor:
    """This process's columns of a parameter: (columns,), or (heads, columns)."""
    return _columns(parameter, parameter.dim() - how.dims)


def _means(how: How, x: Any, *sums: Tensor) -> Sequence[Tensor]:
    """Of sums over this process's columns of each row, the means over the whole row, in one
    all-reduce. sums: (..., 1).
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    part = (sums[0] if len(sums) == 1 else torch.cat(sums, -1)) / how.options.hidden
    lead = x.dim() - how.dims
    apart = [Partial() if p.is_shard() and p.dim >= lead else p for p in x.placements]
    together = [Replicate() if p.is_partial() else p for p in apart]
    shape = (*x.shape[:lead], len(sums))
    placed = {"shape": shape, "stride": contiguous_strides_of(shape)}
    whole = DTensor.from_local(part, x.device_mesh, apart, **placed)
    return whole.redistribute(placements=together).to_local().split(1, -1)


def _sum_of_rows(rows: Tensor, x: Any, parameter: Any) -> Tensor:
    """The gradient of a parameter, from that of each row. It is Partial where processes have
    different rows for the same elements of the parameter.
    """
    from torch.distributed.tensor import Partial

    before = range(x.dim() - parameter.dim())  # dimensions of x that the parameter lacks
    sums = rows.sum(tuple(before)) if before else rows
    both = zip(parameter.placements, x.placements, strict=True)
    placements = [
        placement if placement.is_shard() or p.is_replicate() else Partial()
        for placement, p in both
    ]
    return _placed(sums.to(parameter.dtype), parameter, placements)


def _placed(t: Tensor, like: Any, placements: Sequence) -> Tensor:
    """This process's part of a DTensor, as that DTensor. like: one of the same shape."""
    from torch.distributed.tensor import DTensor

    part, stride = t.reshape(like.to_local().shape), contiguous_strides_of(like.shape)
    return DTensor.from_local(part, like.device_mesh, placements, shape=like.shape, stride=stride)


def _moved(x: Any, placements) -> Tensor:
    same = tuple(x.placements) == tuple(placements)
    return x if same else x.redistribute(placements=tuple(placements))


def _rows_placed(x: Any) -> list:
    """Where the rows are computed: where x is, but Replicate in place of what is no plain shard.

    A dimension with fewer elements than processes is not sharded either: DTensor refuses to view
    such a shard.
    """
    from torch.distributed.tensor import Replicate, Shard

    shards, parts = [], [1] * x.dim()
    for i, p in enumerate(x.placements):
        if type(p) is Shard and parts[p.dim] * x.device_mesh.size(i) <= x.shape[p.dim]:
            parts[p.dim] *= x.device_mesh.size(i)
            shards.append(p)
        else:
            shards.append(Replicate())
    return shards


def _along(parameter: Tensor, x: Tensor, placements: list) -> list:
    """Where a parameter has to be for x to be placed so."""
    from torch.distributed.tensor import Replicate, Shard

    before = x.dim() - parameter.dim()  # dimensions of x that the parameter does not have
    shards = [p.dim - before if p.is_shard() else -1 for p in placements]
    return [Shard(d) if d >= 0 else Replicate() for d in shards]
