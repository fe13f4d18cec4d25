"""The op tilenorm::scaled_product: a product of two quantised matrices.

On CUDA it is PyTorch's F.scaled_mm. Elsewhere, where no such product is served, both matrices are
multiplied by their scales and then with each other in float32.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from ..schemas import LIBRARY
from ..torch_private import scaled_mm_before

CAPABILITY = 8, 9  # the first with 8-bit floats in matrix products
BLOCKS_CUDA = 12, 9  # the first cuBLAS with a scale for 128 elements, on sm_90 alone
AUTOCAST = "cpu", "cuda"  # devices; PyTorch 2.9 does not compile the function that knows them
ROWS_TOGETHER = 4  # cuBLAS reads the scales of blocks in vectors of so many rows

LIBRARY.define(
    "scaled_product(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias,"
    " ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def scaled_product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The op: (a · scale_a) @ (b · scale_b)ᵀ + bias, of shape (M, N).

    On CUDA the product is added up in float32 and rounded to bfloat16, and the bias with it, before
    it gets another dtype. Elsewhere it is rounded once.

    Args:
        a: (M, K) of 8-bit floats, contiguous. b: (N, K), likewise.
        scale_a: float32 (M, 1), or (M, K / 128) with strides (1, M). scale_b: float32 (N, 1), or
            (N, K / 128) with strides (1, N).
        bias: (N,) or None.
        dtype: of the result.

    Raises:
        NotImplementedError: CUDA does not serve such scales: see refused.
    """
    rows, blocks = a.shape[0], scale_a.shape[1] > 1
    if not (a.is_cuda and a.numel()):
        return scaled_product_decomposed(a, b, scale_a, scale_b, bias, dtype)
    if reason := refused(blocks, a.device):
        raise NotImplementedError(f"tilenorm::scaled_product: {reason}")
    more = -rows % ROWS_TOGETHER if blocks else 0
    if more:
        a = F.pad(a.view(torch.uint8), (0, 0, 0, more)).view(a.dtype)
        scale_a = F.pad(scale_a.t(), (0, more)).t()
    made = by_scaled_mm(a, b, scale_a, scale_b, None if blocks else bias)
    if blocks and bias is not None:
        made = made + bias.to(made.dtype)
    return made.narrow(0, 0, rows).to(dtype)


def scaled_product_decomposed(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The op in PyTorch's own operators, for tensors on any device."""
    if not a.shape[1]:
        made = a.new_zeros((a.shape[0], b.shape[0]), dtype=torch.float32)
    else:
        with without_autocast(a):
            made = _decoded(a, scale_a) @ _decoded(b, scale_b).t()
    return (made if bias is None else made + bias.float()).to(dtype)


def by_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None
) -> Tensor:
    """The product in bfloat16, by F.scaled_mm or, before PyTorch 2.10, by its private name."""
    if bias is not None:
        bias = bias.to(torch.bfloat16)
    if scale_a.shape[1] == 1:  # of one group a row has both layouts
        scale_a, scale_b = scale_a.reshape(-1).unsqueeze(1), scale_b.reshape(1, -1)
    if not hasattr(F, "scaled_mm"):
        return scaled_mm_before(a, b.t(), scale_a, scale_b, bias, out_dtype=torch.bfloat16)
    by_row = scale_a.shape[1] == 1
    recipe = F.ScalingType.RowWise if by_row else F.ScalingType.BlockWise1x128
    return F.scaled_mm(
        a, b.t(), scale_a, recipe, scale_b, recipe, bias=bias, output_dtype=torch.bfloat16
    )


@cache
def refused(blocks: bool, device: torch.device) -> str | None:
    """Why a device does not serve products with one scale a row, or, with `blocks`, with one for
    128 elements; or None, always where it is no CUDA device.
    """
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_capability(device)
    if not blocks:
        if not hasattr(F, "scaled_mm") and scaled_mm_before is None:
            return "this PyTorch has no F.scaled_mm"
        name = "sm_{}{}".format(*found)
        return f"{name} has no products of 8-bit floats" if found < CAPABILITY else None
    if not hasattr(F, "scaled_mm"):
        return "blocks take F.scaled_mm, which PyTorch has from 2.10 on"
    if found[0] != 9:
        return "blocks take a GPU of sm_90, got sm_{}{}".format(*found)
    toolkit = torch.version.cuda
    new = tuple(map(int, toolkit.split(".")[:2])) >= BLOCKS_CUDA
    return None if new else f"blocks take cuBLAS of CUDA 12.9, got {toolkit}"


def without_autocast(x: object) -> AbstractContextManager:
    """A context in which autocast casts nothing on x's device."""
    if not isinstance(x, Tensor) or x.device.type not in AUTOCAST:
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def _decoded(q: Tensor, scale: Tensor) -> Tensor:
    """The numbers that codes stand for, in float32."""
    groups = scale.shape[1]
    apart = q.float().reshape(q.shape[0], groups, q.shape[1] // groups)
    return (apart * scale[:, :, None]).reshape(q.shape)


def scaled_product_fake(a, b, scale_a, scale_b, bias, dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


for key in ("CPU", "CUDA"):
    LIBRARY.impl("scaled_product", scaled_product, key)
torch.library.register_fake("tilenorm::scaled_product", scaled_product_fake, lib=LIBRARY)
