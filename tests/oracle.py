"""RMSNorm in float64, gradients by autograd: what every executor is compared with.

Each value comes with its scale, the sum of the absolute values of the terms it is made of: rounding
errors are proportional to that, not to a result in which the terms may cancel.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Truth:
    """value and scale, float64, in the shape of the result."""

    value: Tensor
    scale: Tensor


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    hidden: int,
    eps: float,
    offset: float = 0.0,
    dy: Tensor | None = None,
) -> dict[str, Truth]:
    """y and rstd; with dy also dx, and dw and db of those there are. Keys: the results' names."""
    rows = x.reshape(-1, hidden).double().detach().requires_grad_()
    w = None if weight is None else weight.reshape(-1).double().detach().requires_grad_()
    b = None if bias is None else bias.reshape(-1).double().detach().requires_grad_()
    rstd = (rows.pow(2).mean(-1, keepdim=True) + eps).pow(-0.5)
    gain = torch.ones(hidden, dtype=torch.float64, device=x.device) if w is None else w + offset
    y = rows * rstd * gain
    y_scale = y.abs()
    if b is not None:
        y = y + b
        y_scale = y_scale + b.abs()
    found = {"y": Truth(y.reshape(x.shape), y_scale.reshape(x.shape))}
    found["rstd"] = Truth(rstd[:, 0], rstd[:, 0])
    if dy is not None:
        dys = dy.reshape(-1, hidden).double()
        inputs = [t for t in (rows, w, b) if t is not None]
        grads = iter(torch.autograd.grad(y, inputs, dys))
        x_hat, g = rows * rstd, dys * gain
        dx_scale = rstd * (g.abs() + x_hat.abs() * (g * x_hat).abs().mean(-1, keepdim=True))
        found["dx"] = Truth(next(grads).reshape(x.shape), dx_scale.reshape(x.shape))
        if w is not None:
            found["dw"] = Truth(next(grads), (dys * x_hat).abs().sum(0))
        if b is not None:
            found["db"] = Truth(next(grads), dys.abs().sum(0))
    return {name: Truth(t.value.detach(), t.scale.detach()) for name, t in found.items()}


def torch_own(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    hidden: int,
    eps: float,
    offset: float = 0.0,
    dy: Tensor | None = None,
) -> dict[str, Tensor]:
    """What PyTorch computes in these dtypes: what it has no op for, in float32, rounded once."""
    x = x.detach().requires_grad_()
    w = None if weight is None else weight.detach().requires_grad_()
    b = None if bias is None else bias.detach().requires_grad_()
    if b is None and not offset and (w is None or w.dtype == x.dtype):
        y = torch.nn.functional.rms_norm(x, (hidden,), w, eps)
    else:
        gain = None if w is None else w.float() + offset
        y = torch.nn.functional.rms_norm(x.float(), (hidden,), gain, eps)
        y = (y if b is None else y + b.float()).to(x.dtype)
    found = {"y": y.detach()}
    found["rstd"] = torch.rsqrt(x.detach().float().square().mean(-1) + eps).reshape(-1)
    if dy is not None:
        inputs = {"dx": x, "dw": w, "db": b}
        given = {name: t for name, t in inputs.items() if t is not None}
        found |= zip(given, torch.autograd.grad(y, list(given.values()), dy), strict=True)
    return found
