"""What multiplies the input before the residual is added, in PyTorch operations."""

import torch
from torch import Tensor

from ..spec import NormSpec, Options
from .tensors import LAYER_SCALE, Branch, statistics_dtype


def branched(spec: NormSpec | Options, x: Tensor, *factors: Tensor | None) -> Tensor:
    """x times each factor, a mask or a layer scale, rounded to x's dtype after each."""
    dtype = statistics_dtype(x)
    for factor in factors:
        if factor is not None:
            scale = spec.dropout_scale if factor.dtype == torch.bool else 1.0
            x = (x.to(dtype) * (factor.to(dtype) * scale)).to(x.dtype)
    return x


def layer_scale_gradient(
    spec: NormSpec, dsum: Tensor | None, mask: tuple[bool, ...], branch: Branch | None
) -> Tensor | None:
    """The gradient of the layer scale, if `mask` asks for it: the sum over rows of dsum · x, x as
    it was scaled. dsum: the gradient of the whole sum, that of the residual.
    """
    if branch is None or not mask[LAYER_SCALE]:
        return None
    x, layer_scale, dtype = branch.input, branch.layer_scale, statistics_dtype(branch.input)
    u = branched(spec, x, branch.dropout_mask)
    products = (dsum.to(x.dtype).to(dtype) * u.to(dtype)).contiguous()  # for one order of the sum
    leading = x.dim() - layer_scale.dim()
    sums = products.sum(tuple(range(leading))) if leading else products
    return sums.to(layer_scale.dtype)
