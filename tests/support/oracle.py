"""The tests' oracle: every norm in float64, with gradients by autograd.

Tests compare the results of every executor with the oracle. Each value has a scale: the sum of the
absolute values of the terms that add up to the value. Rounding errors are proportional to the
scale. The value itself may be much smaller, because the terms may cancel.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from tilenorm.spec import NormSpec


@dataclass(frozen=True)
class Truth:
    """A true result: its value and its scale, both float64, in the shape of the result."""

    value: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Arguments:
    """The inputs of a norm and the gradients of its outputs; None for an absent tensor.

    weight and bias have the shape (N,) or (heads, N). The other tensors have the shape (rows, N) or
    (tokens, heads, N), or, by group, (groups, N).
    """

    x: Tensor
    residual: Tensor | None
    gate: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    dy: Tensor | None
    dsum: Tensor | None
    eps: float = 1e-6
    addend: Tensor | None = None
    skip: Tensor | None = None
    dropout_mask: Tensor | None = None
    layer_scale: Tensor | None = None
    mod_scale: Tensor | None = None
    mod_shift: Tensor | None = None
    mod_gate: Tensor | None = None
    given_sum: Tensor | None = None  # see total


def wide(t: Tensor) -> Tensor:
    """In the dtype in which PyTorch and the kernels compute: float32, or float64 of float64."""
    return t if t.dtype == torch.float64 else t.float()


def by_row(parameter: Tensor, rows: Tensor) -> Tensor:
    """A tensor (groups, N) for each row of (rows, N), in groups of consecutive rows."""
    return parameter.repeat_interleave(rows.shape[0] // parameter.shape[0], 0)


def by_group(rows: Tensor, parameter: Tensor) -> Tensor:
    """The sums over the rows of each group."""
    return rows.unflatten(0, (parameter.shape[0], -1)).sum(1)


def factor_of(spec: NormSpec, arguments: Arguments) -> Tensor | None:
    """What multiplies x before the sum, in float64, or None."""
    found = None
    if arguments.dropout_mask is not None:
        found = arguments.dropout_mask.double() * spec.dropout_scale
    if arguments.layer_scale is not None:
        layer_scale = arguments.layer_scale.double()
        found = layer_scale if found is None else found * layer_scale
    if arguments.mod_gate is not None:
        found = by_row(arguments.mod_gate.double(), arguments.x)
    return found


def branched(spec: NormSpec, x: Tensor, *factors: Tensor | None) -> Tensor:
    """x times a mask and times a layer scale in an order, rounded to x's dtype after each."""
    for factor in factors:
        if factor is not None:
            scale = spec.dropout_scale if factor.dtype == torch.bool else 1.0
            compute = torch.promote_types(wide(x).dtype, factor.dtype)
            x = (x.to(compute) * (factor.to(compute) * scale)).to(x.dtype)
    return x


def total(spec: NormSpec, arguments: Arguments) -> Tensor:
    """The tensor that is normalised: x, or x + residual rounded to the residual's dtype.

    An addend is added to x first, and the sum is rounded to the addend's dtype. A mask and a layer
    scale multiply x first. given_sum, a kernel's own, takes its place.
    """
    if arguments.given_sum is not None:
        return arguments.given_sum
    found = branched(spec, arguments.x, arguments.dropout_mask, arguments.layer_scale)
    if arguments.mod_gate is not None:  # the product is not rounded
        found = wide(found) * by_row(wide(arguments.mod_gate), found)
    for other in (arguments.addend, arguments.residual):
        if other is not None:
            found = (wide(found) + wide(other)).to(other.dtype)
    return found


def norm(spec: NormSpec, arguments: Arguments) -> dict[str, Truth]:
    """The true y, sum, mean and rstd by name, and the gradients if there is a dy."""
    leaves = x, gate, w, b, mod_scale, mod_shift = _leaves(spec, arguments, torch.float64)
    u = x * act(spec, gate) if spec.gate and spec.gate_first else x
    mean = u.mean(-1, keepdim=True) if spec.norm == "layer" else torch.zeros_like(u[..., :1])
    centered = u - mean
    rstd = (centered.square().mean(-1, keepdim=True) + arguments.eps).rsqrt()
    x_hat = centered * rstd
    gain = torch.ones_like(x_hat) if w is None else (w + spec.offset).expand_as(x_hat)
    shift = torch.zeros_like(x_hat) if b is None else b.expand_as(x_hat)
    factor = torch.ones_like(x_hat)
    if spec.gate and not spec.gate_first:
        factor = act(spec, gate)
    # What a factor 1 + scale is rounded from.
    factor_scale, added = factor.abs(), torch.zeros_like(x_hat)
    if mod_scale is not None:
        factor = by_row(1 + mod_scale, x_hat)
        factor_scale = by_row(1 + mod_scale.abs(), x_hat)
    if mod_shift is not None:
        added = by_row(mod_shift, x_hat)
    y = (x_hat * gain + shift) * factor + added
    # Scale of x_hat: x_hat is a difference from the mean, and the mean's own error adds to it.
    spread = x_hat.abs() + (x_hat.abs().mean(-1, keepdim=True) if spec.norm == "layer" else 0.0)
    if arguments.mod_gate is not None:  # a kernel may round its product with x, and the sum, once
        spread = spread + sum(t.abs() for t in _terms(spec, arguments)) * rstd
    plain_scale = spread * gain.abs() + shift.abs()
    out, out_scale = y, plain_scale * factor_scale + added.abs()
    if arguments.skip is not None:
        out, out_scale = y + arguments.skip.double(), out_scale + arguments.skip.double().abs()
    truths = {
        "y": Truth(out, out_scale),
        "mean": Truth(mean.reshape(-1), u.abs().mean(-1).reshape(-1)),
        "rstd": Truth(rstd.reshape(-1), rstd.reshape(-1)),
    }
    if arguments.residual is not None:
        terms = _terms(spec, arguments)
        truths["sum"] = Truth(sum(terms), sum(t.abs() for t in terms))
    if arguments.dy is not None:
        parts = x_hat, spread, rstd, gain, factor, factor_scale
        truths |= _gradients(spec, arguments, leaves, y, parts, plain_scale)
    return {name: Truth(t.value.detach(), t.scale.detach()) for name, t in truths.items()}


def _terms(spec: NormSpec, arguments: Arguments) -> list[Tensor]:
    """What adds up to the tensor that is normalised."""
    found = (arguments.x, arguments.residual, arguments.addend)
    terms = [t.double() for t in found if t is not None]
    if (times := factor_of(spec, arguments)) is not None:
        terms[0] = terms[0] * times
    return terms


def _leaves(spec: NormSpec, arguments: Arguments, dtype=None) -> tuple[Tensor | None, ...]:
    """What is normalised, and what else has a gradient, as leaves: in a dtype, or in their own."""
    names = ("gate", "weight", "bias", "mod_scale", "mod_shift")
    tensors = total(spec, arguments), *(getattr(arguments, name) for name in names)
    return tuple(
        t if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors
    )


def _gradients(spec, arguments, leaves, y, parts, plain_scale) -> dict[str, Truth]:
    x, gate, w, b, mod_scale, mod_shift = leaves
    x_hat, spread, rstd, gain, factor, factor_scale = parts
    dy = arguments.dy.double()
    present = [t for t in leaves if t is not None]
    grads = iter(torch.autograd.grad(y, present, dy))
    dx, dgate, dw, db, dscale, dshift = (None if t is None else next(grads) for t in leaves)
    dn = dy * (factor_scale if spec.modulated else factor)
    g = dn * gain
    mean_g = g.abs().mean(-1, keepdim=True) if spec.norm == "layer" else 0.0
    du_scale = rstd * (g.abs() + spread * (g * x_hat).abs().mean(-1, keepdim=True) + mean_g)
    dx_scale = du_scale
    if gate is not None:
        slope = _slope_scale(spec, gate)
        if spec.gate_first:
            dgate_scale = du_scale * x.abs() * slope
            dx_scale = du_scale * act(spec, gate).abs()
        else:
            dgate_scale = dy.abs() * plain_scale * slope
    if arguments.dsum is not None:
        dx, dx_scale = dx + arguments.dsum.double(), dx_scale + arguments.dsum.double().abs()
    truths = {"dx": Truth(dx, dx_scale)}
    if arguments.residual is not None:
        truths["dresidual"] = truths["dx"]
        if (times := factor_of(spec, arguments)) is not None:
            truths["dx"] = Truth(dx * times, dx_scale * times.abs())
    if arguments.layer_scale is not None:
        branch = factor_of(spec, replace(arguments, layer_scale=None))
        branch = arguments.x.double() * (1.0 if branch is None else branch)
        terms = dx * branch, dx_scale * branch.abs()
        truths["dlayer_scale"] = Truth(*(t.reshape(-1, spec.hidden).sum(0) for t in terms))
    if gate is not None:
        truths["dgate"] = Truth(dgate, dgate_scale)
    rows = (-1, (spec.heads or 1) * spec.hidden)
    if w is not None:
        truths["dw"] = Truth(dw.reshape(-1), (dn.abs() * spread).reshape(rows).sum(0))
    if b is not None:
        truths["db"] = Truth(db.reshape(-1), dn.abs().reshape(rows).sum(0))
    if mod_scale is not None:
        truths["dscale"] = Truth(dscale, by_group(dy.abs() * plain_scale, mod_scale))
    if mod_shift is not None:
        truths["dshift"] = Truth(dshift, by_group(dy.abs(), mod_shift))
    if (mod_gate := arguments.mod_gate) is not None:
        branch = arguments.x.double()
        scale = by_group(dx_scale * branch.abs(), mod_gate)
        truths["dmod_gate"] = Truth(by_group(dx * branch, mod_gate), scale)
    return truths


def act(spec: NormSpec, z: Tensor) -> Tensor:
    """The activation of the gate.

    σ(z) is 1 − σ(−z) where z is positive: PyTorch's gradient of σ(z) is σ(z) · (1 − σ(z)), whose
    difference would have few digits.
    """
    if spec.activation == "sigmoid":
        return torch.where(z > 0, 1 - torch.sigmoid(-z), torch.sigmoid(z))
    return functional.silu(z)


def torch_act(spec: NormSpec, z: Tensor) -> Tensor:
    """The activation as PyTorch computes it."""
    return torch.sigmoid(z) if spec.activation == "sigmoid" else functional.silu(z)


def _slope_scale(spec: NormSpec, z: Tensor) -> Tensor:
    """The scale of the activation's derivative at z."""
    s, rest = torch.sigmoid(z), torch.sigmoid(-z)
    return s * rest if spec.activation == "sigmoid" else s * (1 + z.abs() * rest)


def torch_own(spec: NormSpec, arguments: Arguments) -> dict[str, Tensor]:
    """PyTorch's own results in the arguments' dtypes. The error budget depends on their errors.

    If PyTorch has no op for the norm, the norm is composed from operations in float32 and rounded
    once at the end. With early rounding, models also round before the product with the weight, and
    after the product if weight and output have the input's dtype; the composed norm does the same.
    """
    x, gate, w, b, mod_scale, mod_shift = _leaves(spec, arguments)
    dtype = arguments.x.dtype
    if spec.modulated:
        y = _composed(spec, wide(x), gate, w, b, arguments.eps, torch.float32)
        y = y * by_row(1 + wide(mod_scale), y)
        y = (y if mod_shift is None else y + by_row(wide(mod_shift), y)).to(dtype)
    elif spec.rounding == "late" and not spec.out_dtype and _has_pytorch_op(spec, x, dtype, w, b):
        if spec.norm == "layer":
            y = functional.layer_norm(x, (spec.hidden,), w, b, arguments.eps)
        else:
            y = functional.rms_norm(x, (spec.hidden,), w, arguments.eps)
    else:
        y = _composed(spec, wide(x), gate, w, b, arguments.eps, dtype)
    if arguments.skip is not None:
        y = (arguments.skip + y).to(arguments.skip.dtype)
    u = wide(x.detach())
    if spec.gate and spec.gate_first:
        u = u * torch_act(spec, wide(gate.detach()))
    mean = u.mean(-1) if spec.norm == "layer" else torch.zeros_like(u[..., 0])
    variance = (u - mean[..., None]).square().mean(-1)
    results = {"y": y.detach(), "mean": mean.reshape(-1), "sum": x.detach()}
    results["rstd"] = torch.rsqrt(variance + arguments.eps).reshape(-1)
    if arguments.dy is None:
        return results
    leaves = {"dx": x, "dgate": gate, "dw": w, "db": b, "dscale": mod_scale, "dshift": mod_shift}
    present = {name: t for name, t in leaves.items() if t is not None}
    results |= zip(
        present, torch.autograd.grad(y, list(present.values()), arguments.dy), strict=True
    )
    results |= {name: results[name].reshape(-1) for name in ("dw", "db") if name in results}
    dx = wide(results["dx"])
    dx = dx if arguments.dsum is None else dx + wide(arguments.dsum)
    results["dresidual"] = dx.to(x.dtype)
    branch = arguments.layer_scale, arguments.dropout_mask
    results["dx"] = branched(spec, dx.to(dtype), *branch)
    if arguments.layer_scale is not None:
        branch = branched(spec, arguments.x, arguments.dropout_mask)
        products = wide(results["dresidual"]) * wide(branch)
        results["dlayer_scale"] = products.reshape(-1, spec.hidden).sum(0)
    if (gate := arguments.mod_gate) is not None:
        results["dx"] = (dx * by_row(wide(gate), dx)).to(dtype)
        results["dmod_gate"] = by_group(dx * wide(arguments.x), gate).to(gate.dtype)
    return results


def _has_pytorch_op(spec: NormSpec, x: Tensor, dtype, w: Tensor | None, b: Tensor | None) -> bool:
    """Whether F.rms_norm or F.layer_norm computes this norm in the arguments' dtypes."""
    if spec.gate or spec.heads or spec.offset or x.dtype != dtype:
        return False
    if any(t is not None and t.dtype != dtype for t in (w, b)):
        return False
    return spec.norm == "layer" or b is None


def _composed(spec, x, gate, w, b, eps, dtype) -> Tensor:
    """The norm in float32 operations, rounded to the output's dtype. x is float32. dtype: that of
    the input.
    """
    early = spec.rounding == "early"
    if spec.gate and spec.gate_first:
        x = x * torch_act(spec, wide(gate))
    function = functional.layer_norm if spec.norm == "layer" else functional.rms_norm
    y = function(x, (spec.hidden,), eps=eps)
    if early:
        y = wide(y.to(dtype))
    if w is not None:
        y = y * (wide(w) + spec.offset)
        if early and w.dtype == dtype and not spec.out_dtype:
            y = wide(y.to(dtype))
    if b is not None:
        y = y + wide(b)
    if spec.gate and not spec.gate_first:
        y = y * torch_act(spec, wide(gate))
    return y.to(getattr(torch, spec.out_dtype) if spec.out_dtype else dtype)
