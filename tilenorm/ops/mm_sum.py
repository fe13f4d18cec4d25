"""tilenorm::mm_sum: a sum of matrix products, added up inside the matrix multiplications.

The pass integrations/fx/gemms.py makes this op where a gradient is a sum of products.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .library import LIBRARY

LIBRARY.define(
    "mm_sum(Tensor[] a, Tensor[] b) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)


def mm_sum(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """The op: a[0] @ b[0] + a[1] @ b[1] + ..., as mm and then addmm_ on its result.

    cuBLAS reads the sum so far as the matrix C of a multiplication and writes the new sum in its
    place. No kernel adds, and nothing is copied. A graph sees one functional op, because the sum is
    the op's own until the op returns it.

    The sum is added in the multiplication's accumulator, and rounded to the dtype once for each
    product. (a[0] @ b[0]) + (a[1] @ b[1]) rounds each product and then each sum. So each addition
    rounds once less, and the bits are others. Products are added from left to right.

    The schema has lists of tensors, for a sum may have any number of products. vmap and DTensor do
    not look into lists. Neither meets this op: the graphs that a pass sees after autograd hold
    plain tensors, DTensor's local ones among them. The op has a derivative all the same, because
    PyTorch would pass over an op without one in silence.

    Args:
        a: one or more matrices (M, K), each with its own K.
        b: as many matrices (K, N), of a's dtype and device.

    Returns:
        A contiguous matrix (M, N).

    Raises:
        ValueError: a and b have different lengths, or their shapes or dtypes do not fit.
        RuntimeError: devices do not fit, as of torch.mm.
        NotImplementedError: a and b are empty. PyTorch's dispatcher raises it.
    """
    _check(a, b)
    total = torch.mm(a[0], b[0])
    for left, right in zip(a[1:], b[1:], strict=True):
        total.addmm_(left, right)
    return total


def mm_sum_decomposed(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """The op in PyTorch's own operators."""
    total = torch.mm(a[0], b[0])
    for left, right in zip(a[1:], b[1:], strict=True):
        total = torch.addmm(total, left, right)
    return total


def mm_sum_fake(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    _check(a, b)
    return torch.mm(a[0], b[0])


def _check(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    """Raise for products that cannot be added. The fake of addmm_ would not, nor would mm's."""
    if len(a) != len(b):
        what = f"takes as many matrices as argument 'a', {len(a)}, got {len(b)}"
        raise ValueError(f"mm_sum: argument 'b' {what}")
    for name, matrices, kept in (("a", a, 0), ("b", b, 1)):
        for matrix in matrices:
            if matrix.dim() != 2 or matrix.dtype != a[0].dtype:
                what = f"takes matrices of one dtype, {a[0].dtype}"
                got = f"{matrix.dtype}{list(matrix.shape)}"
                raise ValueError(f"mm_sum: argument {name!r} {what}, got {got}")
            if matrix.shape[kept] != matrices[0].shape[kept]:
                what = f"takes matrices with one shape[{kept}], {matrices[0].shape[kept]}"
                raise ValueError(f"mm_sum: argument {name!r} {what}, got {matrix.shape[kept]}")
    for left, right in zip(a, b, strict=True):
        if left.shape[1] != right.shape[0]:
            what = f"takes a matrix with {left.shape[1]} rows, as its factor has columns"
            raise ValueError(f"mm_sum: argument 'b' {what}, got {right.shape[0]}")


def _setup_context(ctx, inputs: tuple, output: Tensor) -> None:
    a, b = inputs
    ctx.count = len(a)
    ctx.save_for_backward(*a, *b)


def _backward(ctx, grad: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    a, b = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
    return [grad @ right.mH for right in b], [left.mH @ grad for left in a]


for key in ("CPU", "CUDA"):
    LIBRARY.impl("mm_sum", mm_sum, key)
torch.library.register_fake("tilenorm::mm_sum", mm_sum_fake, lib=LIBRARY)
torch.library.register_autograd(
    "tilenorm::mm_sum", _backward, setup_context=_setup_context, lib=LIBRARY
)
