"""The reference implementation: the formulas in plain PyTorch, for any device and dtype.

It serves what cuTile does not, and, being made of differentiable operations, gives derivatives of
any order. It computes in float32 or, where an input is float64, in that. On a CPU, a norm
without a gate and without heads calls the operators under F.rms_norm and F.layer_norm, which take
less time. The variance of that LayerNorm is PyTorch's, which is not from centred values.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import silu

from ...launch.calls import Needs
from ...spec import NormSpec, Options
from ...table import BRANCH_PORTS, DROPOUT_MASK, LAYER_SCALE, OPS
from ..pytorch.sizes import known
from ..pytorch.torch_private import fused_rms_norm, reshaped
from .dims import rows_shape
from .quantize import with_codes
from .rotation import Turns, check_positions, rotate, rotate_back

native_layer_norm_backward = torch.ops.aten.native_layer_norm_backward
Given = dict[str, Tensor | None]  # tensors by their roles
ROLES = ("x", "gate", "weight", "bias", "mean", "rstd")  # of a norm's tensors in a backward pass
STATISTICS = ("mean", "rstd", "key_rstd")
VECTOR = 4  # so many elements at a time PyTorch's sums on a GPU read


def bind_forward(spec: NormSpec) -> Callable | None:
    """A function of (tensors, eps) as registry.Implementation has it. None for a chain,
    whose norms run one after the other.
    """
    if spec.inner is not None:
        return None
    op, plain, how = OPS[spec.op], spec.unquantized, spec.quantized
    roles, made_roles, has_operator = op.roles, op.made, _has_operator(spec)

    def forward(tensors: tuple, eps: float) -> tuple:
        named, x = dict(zip(roles, tensors, strict=True)), tensors[0]
        positions = named.get("positions")
        if positions is not None and positions.is_cpu:  # PyTorch takes negative ones from the end
            check_positions(positions, named["cos"])
        if has_operator and x.is_cpu and x.numel():
            results = _by_operator(plain, named, eps)
        else:
            results = formula(plain, named, eps)
            fresh = {role: results[role] for role in ("y", "key_y") if role in results}
            results |= {role: reshaped(y, y.shape) for role, y in fresh.items()}
        if how is not None:
            results = with_codes(spec, results, named["given_scale"])
        return tuple(map(results.get, made_roles))

    return forward


def _by_operator(spec: NormSpec, tensors: Given, eps: float) -> Given:
    """What formula returns, by PyTorch's own operator."""
    x, skip = tensors["x"], tensors.get("skip")
    total = total_of(spec, tensors) if spec.residual else None
    # An output of another dtype is not rounded to the input's first.
    dtype = statistics_dtype(x) if spec.out_dtype else x.dtype
    rows = rows_of(x if total is None else total, spec, dtype).reshape(-1, spec.hidden)
    hidden, mean, weight = (spec.hidden,), None, tensors["weight"]
    if spec.norm == "layer":
        parameters = _fast_parameters(spec, weight, tensors["bias"], statistics_dtype(x))
        y, mean, rstd = torch.native_layer_norm(rows, hidden, *parameters, eps)
        mean = mean.view(-1)
    else:
        y, rstd = fused_rms_norm(
            rows, hidden, weight if weight is None else weight.reshape(-1).to(dtype), eps
        )
    if spec.out_dtype:
        y = y.to(output_dtype(spec, x))
    y = reshaped(y, x.shape) if skip is None else sum_of(y.view(x.shape), skip)
    return {"y": y, "sum": total, "mean": mean, "rstd": rstd.view(-1)}


def formula(spec: NormSpec, tensors: Given, eps: float) -> Given:
    """y, sum, mean and rstd by name, of differentiable operations alone; mean and rstd are (rows,).

    tensors: those of the norm by their roles.
    """
    if spec.rotation:
        return _rotated(spec, tensors, eps)
    x, gate, skip = tensors["x"], tensors.get("gate"), tensors.get("skip")
    total = total_of(spec, tensors)
    dtype = statistics_dtype(x, tensors.get("residual"))
    rows = rows_of(x if total is None else total, spec, dtype)
    z = None if gate is None else rows_of(gate, spec, dtype)
    x_hat, mean, rstd = _normalize(spec, rows, z, eps)
    y = affine(spec, x_hat, tensors.get("weight"), tensors.get("bias"), x.dtype)
    if z is not None and not spec.gate_first:
        y = y * act(spec, z)
    y = modulated(y, tensors.get("mod_scale"), tensors.get("mod_shift"))
    y = y.to(output_dtype(spec, x)).reshape(x.shape)
    y = y if skip is None else sum_of(y, skip)
    mean = None if mean is None else mean.reshape(-1)
    return {"y": y, "sum": total, "mean": mean, "rstd": rstd.reshape(-1)}


def _rotated(spec: NormSpec, tensors: Given, eps: float) -> Given:
    """The formula of heads that are rotated."""
    dtype, early, results = statistics_dtype(tensors["x"]), spec.rounding == "early", {}
    turns = _turns(spec, tensors, dtype)
    for norm, key in zip(spec.rotated_norms, ("", "key_"), strict=False):
        x = tensors["key" if key else "x"]
        x_hat, _, rstd = _normalize(norm, rows_of(x, norm, dtype), None, eps)
        rows = affine(norm, x_hat, tensors.get(f"{key}weight"), None, x.dtype).reshape(x.shape)
        del x_hat
        y = rotate(spec.rotation, rows, turns, x.dtype, early)
        y = y.transpose(1, 2).contiguous() if spec.rotation.heads_first else y
        results |= {f"{key}y": y, f"{key}rstd": rstd.reshape(-1)}
    return results


def _turns(spec: NormSpec, tensors: Given, dtype: torch.dtype) -> Turns:
    cos, sin, positions = map(tensors.get, ("cos", "sin", "positions"))
    return Turns.of(spec.rotation, cos, sin, positions, dtype)


def bind_backward(spec: NormSpec, needs: Needs) -> Callable:
    """A function of (tensors, eps) as registry.Implementation has it."""
    kept = spec.kernel_reads
    end = 2 + len(kept)

    def bound(tensors: Sequence[Tensor | None], eps: float) -> tuple:
        dy, dsum, *saved = tensors[:end]
        return backward(
            spec, needs, dy, dsum, dict(zip(kept, saved, strict=True)), eps, tensors[end:]
        )

    return bound


def backward(
    spec: NormSpec,
    needs: Needs,
    dy: Tensor,
    dsum: Tensor | None,
    saved: Given,
    eps: float = 0.0,
    terms: Sequence[Tensor] = (),
) -> tuple[Tensor | None, ...]:
    """The gradients that are needed, in the order of Needs.gradients, contiguous, and behind them y
    if it is needed.

    saved: the tensors of NormSpec.kernel_reads by their roles; without rstd, as a differentiable
    function of x too. terms: what is added to dy, term by term.
    """
    if spec.rotation:
        return _rotated_backward(spec, needs, (dy, dsum), saved, eps)
    for term in terms:
        dy = dy + term  # rounded to its dtype, as autograd's own sums are
    x, gate, weight, bias, mean, rstd = map(saved.get, ROLES)
    dtype = torch.float64 if spec.dtype == "float64" else statistics_dtype(dy, x)
    rows, g = rows_of(x, spec, dtype), rows_of(dy, spec, dtype)
    z = None if gate is None else rows_of(gate, spec, dtype)
    through_norm = needs.of_sum or (needs.dgate and spec.gate_first)
    dx = dgate = dw = db = None
    by_group: tuple = ()
    like = (*rows.shape[:-1], 1)
    fast = spec.norm == "layer" and x.is_cpu and x.numel() and spec.hidden > 1
    if rstd is not None and fast and _has_operator(spec):
        parameters = _fast_parameters(spec, weight, bias, dtype)
        statistics = (mean.reshape(like).to(dtype), rstd.reshape(like).to(dtype))
        mask = [through_norm, needs.dw, needs.db]
        dx, dw, db = native_layer_norm_backward(
            g, rows, (spec.hidden,), *statistics, *parameters, mask
        )
    else:
        if rstd is None:
            x_hat, mean, rstd = _normalize(spec, rows, z, eps)
        else:
            u = rows * act(spec, z) if spec.gate_first and z is not None else rows
            rstd = rstd.reshape(like)
            x_hat = (u if mean is None else u - mean.reshape(like)) * rstd
        if z is not None and not spec.gate_first:
            if needs.dgate:
                dgate = g * affine(spec, x_hat, weight, bias, dtype) * slope(spec, z)
            g = g * act(spec, z)
        if spec.modulated:
            by_group = _modulation_gradients(spec, needs, g, x_hat, saved)
            g = modulated(g, saved["mod_scale"], None)
        dw = _sum_rows(spec, g * x_hat, weight) if needs.dw else None
        db = _sum_rows(spec, g, bias) if needs.db else None
        if through_norm:
            dx = _through_norm(weigh(spec, g, weight), x_hat, mean is not None, rstd)
            if z is not None and spec.gate_first:
                dgate = dx * rows * slope(spec, z) if needs.dgate else None
                dx = dx * act(spec, z)
    if dsum is not None and dx is not None:
        dx = dx + rows_of(dsum, spec, dtype)
    if spec.modulated:
        by_group += (group_gradient(spec, dx, saved) if needs.dmod_gate else None,)
    dtype_of_input = getattr(torch, spec.dtype) if spec.residual else x.dtype
    grads = (
        of_input(spec, dx.to(dtype_of_input).reshape(x.shape), dx, saved) if needs.dx else None,
        dx.to(x.dtype).reshape(x.shape) if needs.dresidual else None,
        dgate.to(gate.dtype).reshape(gate.shape) if needs.dgate else None,
        dw.to(weight.dtype).reshape(weight.shape) if needs.dw else None,
        db.to(bias.dtype).reshape(bias.shape) if needs.db else None,
        *by_group,
    )
    return (*grads, _output_again(spec, saved, dy.dtype, eps)) if needs.output else grads


def _rotated_backward(
    spec: NormSpec, needs: Needs, dys: tuple, saved: Given, eps: float
) -> tuple[Tensor | None, ...]:
    """The gradients of heads that are rotated. dys: those of the rotated input, and of the key."""
    how, dtype = spec.rotation, statistics_dtype(saved["x"])
    turns, grads = _turns(spec, saved, dtype), dict.fromkeys(("", "key_"), (None,) * 5)
    asked = (needs.dx, needs.dw), (needs.dkey, needs.dkey_weight)
    parts = zip(spec.rotated_norms, ("", "key_"), dys, asked, strict=False)
    for norm, key, dy, of in parts:
        if any(of):
            dy = dy.transpose(1, 2) if how.heads_first else dy
            turned = rotate_back(how, dy.to(dtype), turns)
            of_part = {"x": saved["key" if key else "x"], "weight": saved.get(f"{key}weight")}
            of_part["rstd"] = saved.get(f"{key}rstd")
            grads[key] = backward(norm, Needs(*of), turned, None, of_part, eps)
    dkey, _, _, dkey_weight, _ = grads["key_"]
    return *grads[""], dkey, dkey_weight


def of_input(spec: NormSpec, dx: Tensor, dsum: Tensor, saved: Given) -> Tensor:
    """The gradient of the input, from that of the sum. dx: the same in the input's dtype."""
    dx = branched(spec, dx, *[saved.get(port.role) for port in reversed(BRANCH_PORTS)])
    return gated(spec, dsum, saved.get("mod_gate"), dx)


def branched(spec: NormSpec | Options, x: Tensor, *factors: Tensor | None) -> Tensor:
    """x times each factor, a mask or a layer scale, rounded to x's dtype after each."""
    dtype = statistics_dtype(x)
    for factor in factors:
        if factor is not None:
            scale = spec.dropout_scale if factor.dtype == torch.bool else 1.0
            x = (x.to(dtype) * (factor.to(dtype) * scale)).to(x.dtype)
    return x


def vector_gradient(spec: NormSpec, dsum: Tensor, saved: Given) -> Tensor:
    """The gradient of the layer scale: the sum over rows of dsum · x, x as it was scaled.
    dsum: the gradient of the whole sum, that of the residual.
    """
    x, vector = saved["input"], saved[LAYER_SCALE.role]
    dtype = statistics_dtype(x)
    u = branched(spec, x, saved.get(DROPOUT_MASK.role))
    products = (dsum.to(x.dtype).to(dtype) * u.to(dtype)).contiguous()  # for one order of the sum
    leading = x.dim() - vector.dim()
    sums = products.sum(tuple(range(leading))) if leading else products
    return sums.to(vector.dtype)


def modulated(y: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    """y · (1 + scale) + shift, by group, in y's dtype."""
    if scale is not None:
        y = by_groups(y, 1 + scale.to(y.dtype), torch.mul)
    return y if shift is None else by_groups(y, shift.to(y.dtype), torch.add)


def by_groups(rows: Tensor, parameter: Tensor, function: Callable) -> Tensor:
    """function(rows, parameter), where each group of consecutive rows meets a row of the parameter.

    rows: (..., hidden), in the dimensions of the input where the parameter has several rows.
    """
    if known(parameter.numel() == 0) or known(rows.numel() == 0):
        return rows
    grouped = _in_groups(rows, parameter)
    return function(grouped, parameter.reshape(-1, 1, rows.shape[-1])).reshape(rows.shape)


def sums_by_group(rows: Tensor, like: Tensor) -> Tensor:
    """The sum over the rows of each group, in the shape of a tensor that lies by group."""
    if known(rows.numel() == 0) or known(like.numel() == 0):
        return rows.new_zeros(like.shape)
    return _in_groups(rows, like).sum(1).reshape(like.shape)


def _in_groups(rows: Tensor, like: Tensor) -> Tensor:
    """Rows as (groups, rows of a group, hidden). like: a tensor that lies by group."""
    hidden = rows.shape[-1]
    count, groups = rows.numel() // hidden, like.numel() // hidden
    rows_of_group = count // groups
    if not known(rows_of_group * groups == count):  # a graph's groups, of which none may be left
        rows_of_group = count // torch.sym_max(groups, 1)
    return rows.reshape(groups, rows_of_group, hidden)


def gated(spec: NormSpec, x: Tensor, gate: Tensor | None, other: Tensor) -> Tensor:
    """x times a gate by group, in the dtype of `other`; `other` without a gate."""
    if gate is None:
        return other
    dtype = statistics_dtype(x)
    rows = x.reshape(*rows_shape(x.shape, spec.hidden), spec.hidden).to(dtype)
    return by_groups(rows, gate.to(dtype), torch.mul).to(other.dtype).reshape(other.shape)


def group_gradient(spec: NormSpec, dsum: Tensor, saved: Given) -> Tensor:
    """The gradient of a gate by group: the sum over each group of dsum · x. dsum: the gradient of
    the sum.
    """
    x, gate = saved["input"], saved["mod_gate"]
    dtype = statistics_dtype(x, dsum)
    products = rows_of(dsum, spec, dtype) * rows_of(x, spec, dtype)
    return sums_by_group(products, gate).to(gate.dtype)


def _modulation_gradients(
    spec: NormSpec, needs: Needs, dy: Tensor, x_hat: Tensor, saved: Given
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of scale and shift, which are needed."""
    scale, weight, bias = (saved.get(role) for role in ("mod_scale", "weight", "bias"))
    dscale, dshift, _ = needs.modulation
    products = dy * affine(spec, x_hat, weight, bias, x_hat.dtype) if dscale else dy
    shift = spec.mod_shift and getattr(torch, spec.mod_shift)
    return (
        sums_by_group(products, scale).to(scale.dtype) if dscale else None,
        sums_by_group(dy, scale).to(shift) if dshift else None,
    )


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype in a NormSpec."""
    return str(dtype).removeprefix("torch.")


def output_dtype(spec: NormSpec, x: Tensor) -> torch.dtype:
    """The dtype of normalised rows, to which nothing was added yet."""
    return getattr(torch, spec.out_dtype) if spec.out_dtype else x.dtype


def statistics_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype of mean and rstd, and of what the reference computes in."""
    for tensor in tensors:  # any() of a generator takes longer
        if tensor is not None and tensor.dtype == torch.float64:
            return torch.float64
    return torch.float32


def _output_again(spec: NormSpec, saved: Given, dtype: torch.dtype, eps: float) -> Tensor:
    """y from the saved sum, by the operations of the forward pass: from rstd it would have other
    bits. dtype: y's.
    """
    x, weight, bias = (saved.get(role) for role in ("x", "weight", "bias"))
    if x.dtype == dtype:
        plain = replace(spec, residual=None)
        return bind_forward(plain)((x, weight, bias), eps)[0]
    x_hat = _normalize(spec, rows_of(x, spec, statistics_dtype(x)), None, eps)[0]
    return affine(spec, x_hat, weight, bias, dtype).to(dtype).reshape(x.shape)


def _through_norm(g: Tensor, x_hat: Tensor, centred: bool, rstd: Tensor) -> Tensor:
    """rstd · (g − x̂ · mean(g · x̂)), less the mean of g if x̂ is centred."""
    dx = g - x_hat * (g * x_hat).mean(-1, keepdim=True)
    if centred:
        dx = dx - g.mean(-1, keepdim=True)
    return dx * rstd


def weigh(spec: NormSpec, g: Tensor, weight: Tensor | None) -> Tensor:
    """Rows times weight + offset."""
    return g if weight is None else by_heads(spec, g, scale(spec, weight, g.dtype), torch.mul)


def _has_operator(spec: NormSpec) -> bool:
    """Whether PyTorch's own operators compute the norm of tensors on the CPU that have elements.

    A sum may be in another dtype than the input, a weight too, and then no operator fits. Rounding
    early differs from rounding late in 16 bits alone.
    """
    if spec.gate or spec.heads or spec.residual not in (None, spec.dtype):
        return False
    if spec.modulated or spec.rotation:
        return False
    if spec.rounding == "early" and spec.dtype not in ("float32", "float64"):
        return False
    if spec.norm == "layer":
        allowed = {"float64"} if spec.dtype == "float64" else {"float16", "bfloat16", "float32"}
        return {spec.weight or spec.dtype, spec.bias or spec.dtype} <= allowed
    plain = spec.weight in (None, spec.dtype) and spec.bias is None and spec.offset == 0.0
    return plain and fused_rms_norm is not None


def _fast_parameters(
    spec: NormSpec, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """weight + offset, and bias, in the dtype of the sums, in which mean and rstd then come too."""
    if weight is not None:
        weight = scale(spec, weight, dtype).reshape(-1)
    elif spec.item_bytes < dtype.itemsize:
        weight = torch.ones(spec.hidden, dtype=dtype)
    return weight, bias if bias is None else bias.to(dtype).reshape(-1)


def total_of(spec: NormSpec, tensors: Given) -> Tensor | None:
    """The sum that is normalised, if there is a residual."""
    x, residual = tensors["x"], tensors.get("residual")
    mask, vector, gate = (
        tensors.get(DROPOUT_MASK.role),
        tensors.get(LAYER_SCALE.role),
        tensors.get("mod_gate"),
    )
    if mask is not None or vector is not None:
        x = branched(spec, x, mask, vector)
    if gate is not None:  # the product is not rounded
        x = gated(spec, x, gate, x.to(statistics_dtype(x, residual)))
    return sum_of(x, residual, tensors.get("addend"))


def sum_of(x: Tensor, residual: Tensor | None, addend: Tensor | None = None) -> Tensor | None:
    """x + residual in the residual's dtype, where x is x + addend in the addend's dtype, if any."""
    if residual is None:
        return None
    x = x if addend is None else sum_of(x, addend)
    dtype = statistics_dtype(x, residual)
    return (x.to(dtype) + residual.to(dtype)).to(residual.dtype).contiguous()


def scale(spec: NormSpec | Options, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """weight + offset."""
    weight = weight.to(dtype)
    return weight + spec.offset if spec.offset else weight


def _normalize(
    spec: NormSpec, rows: Tensor, gate: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """x̂; mean and rstd with a last dimension of 1."""
    if gate is not None and spec.gate_first:
        rows = rows * act(spec, gate)
    mean = None
    if spec.norm == "layer":
        mean = rows.mean(-1, keepdim=True)
        rows = rows - mean
        rest = rows.mean(-1, keepdim=True)  # rounding left this much of the mean in the rows
        rows, mean = rows - rest, mean + rest
    rstd = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    return rows * rstd, mean, rstd


def affine(
    spec: NormSpec, x_hat: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """x̂ · (weight + offset) + bias. dtype: the input's, to which early rounding rounds x̂ first, and
    the product where the weight and the output have it too.
    """
    compute, early = x_hat.dtype, spec.rounding == "early"
    y = x_hat.to(dtype).to(compute) if early else x_hat
    y = weigh(spec, y, weight)
    if early and weight is not None and weight.dtype == dtype and not spec.out_dtype:
        y = y.to(dtype).to(compute)
    if bias is not None:
        y = by_heads(spec, y, bias.to(compute), torch.add)
    return y


def by_heads(spec: NormSpec, rows: Tensor, parameter: Tensor, function) -> Tensor:
    """function(rows, parameter). With heads, each head's rows meet that head's parameter."""
    if not parameter.numel():  # of no heads, on a rank that has no rows: others hold them
        return rows
    if not spec.heads:
        return function(rows, parameter.reshape(-1))
    shape = (spec.heads, spec.hidden)
    parameter = parameter.reshape(shape)
    if rows.shape[-2:] == shape:
        return function(rows, parameter)
    return function(rows.reshape(-1, *shape), parameter).reshape(rows.shape)


def _sum_rows(spec: NormSpec, rows: Tensor, parameter: Tensor) -> Tensor:
    if spec.heads and rows.shape[-2] != spec.heads:
        rows = rows.reshape(-1, spec.heads, spec.hidden)
    leading = rows.dim() - (2 if spec.heads else 1)
    sums = rows.sum(tuple(range(leading))) if leading else rows
    return sums.reshape(-1)[: parameter.numel()]  # none for the parameters of no heads


def act(spec: NormSpec | Options, z: Tensor) -> Tensor:
    """The activation of the gate."""
    return torch.sigmoid(z) if spec.activation == "sigmoid" else silu(z)


def slope(spec: NormSpec | Options, z: Tensor) -> Tensor:
    """The derivative of the gate's activation."""
    s = torch.sigmoid(z)
    return s * (1 - s) if spec.activation == "sigmoid" else s * (1 + z * (1 - s))


def rows_of(x: Tensor, spec: NormSpec, dtype: torch.dtype) -> Tensor:
    """x as contiguous rows that start where vectors do: PyTorch sums in another order along other
    strides, and on a GPU from another start.

    The leading dimensions stay as they are: a DTensor may be cut in each of them.
    """
    hidden = spec.hidden
    leading = rows_shape(x.shape, hidden) or (1,)
    rows = x.reshape(*leading, hidden).contiguous().to(dtype)
    if rows.is_cuda and not is_compiling() and known(rows.storage_offset() % VECTOR != 0):
        return rows.clone()
    return rows
