"""A linear in 8-bit floats with scales by row, as training code in plain PyTorch has it.

It is what QuantizedNormLinear is compared with, so nothing here is tilenorm's. Gradients go through
the quantisations as if they were not there.
"""

import torch
from torch import Tensor, nn
from torch.autograd import Function

FP8, MOST = torch.float8_e4m3fn, 448.0
UNIT = 16  # products in 8-bit floats take matrices whose sizes are multiples of it
LEAST_PEAK = 1e-12  # a row of zeros has a finite scale, too


def cast(y: Tensor, group: int = 0) -> tuple[Tensor, Tensor]:
    """The codes and the decoding scales of rows, or of groups of so many elements."""
    groups = y.float().unflatten(-1, (-1, group or y.shape[-1]))
    factor = MOST / groups.abs().amax(-1, keepdim=True).clamp(min=LEAST_PEAK)
    return saturated(groups * factor).flatten(-2), factor.reciprocal().squeeze(-1)


def saturated(scaled: Tensor) -> Tensor:
    """PyTorch's own cast does not saturate before 2.12."""
    return scaled.clamp(-MOST, MOST).to(FP8)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ bᵀ in bfloat16, of matrices (M, K) and (N, K) that are quantised by row.

    On a CPU the decoded matrices are multiplied in float32.
    """
    (a, scale_a), (b, scale_b) = cast(a), cast(b)
    if a.device.type == "cpu":
        return ((a.float() * scale_a) @ (b.float() * scale_b).t()).bfloat16()
    # The layouts that cuBLAS and CUTLASS multiply.
    given = a.contiguous(), b.contiguous().t(), scale_a, scale_b.t()
    # Inductor of PyTorch 2.11 knows this name. It has F.scaled_mm's factors copied to row-major in
    # a backward pass, and F.scaled_mm does not take them then.
    return torch._scaled_mm(*given, out_dtype=torch.bfloat16)


class RowsLinear(Function):
    """y @ weightᵀ of bfloat16 y (..., K) and weight (N, K), with the product in 8-bit floats.

    The gradient of y is a product in bfloat16. The gradient of the weight is one in 8-bit floats:
    its factors have a scale for each column of g and of y. Eager PyTorch keeps y for the backward
    pass. torch.compile may keep the norm's input instead, and compute y again.
    """

    @staticmethod
    def forward(ctx, y, weight):
        ctx.save_for_backward(y, weight)
        return product(y.flatten(0, -2), weight).view(*y.shape[:-1], -1)

    @staticmethod
    def backward(ctx, g):
        y, weight = ctx.saved_tensors
        rows = g.flatten(0, -2)
        dy = (rows @ weight).view(y.shape)
        return dy, product(rows.t(), y.flatten(0, -2).t())


class RowsNormLinear(nn.Module):
    """The linear of the norm of x, with the parameters of both modules."""

    def __init__(self, norm: nn.Module, linear: nn.Linear):
        super().__init__()
        self.norm, self.linear = norm, linear

    def forward(self, x: Tensor) -> Tensor:
        return RowsLinear.apply(self.norm(x), self.linear.weight)
