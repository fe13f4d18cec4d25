"""The groups in which tensors travel behind the quantised norms."""

from typing import NamedTuple

import torch
from torch import Tensor

from ...launch.scales import Scales
from ...spec import NormSpec

# The dtypes that PyTorch has for the arrays that the kernels write.
SCALE_DTYPES = {"float32": torch.float32, "uint8": torch.float8_e8m0fnu}


class QuantizedNorm(NamedTuple):
    """What a quantised norm returns. What was not asked for is None.

    q: the codes, of the input's shape. scale: what a group's codes are multiplied by to get its
    numbers back. output: the normalised rows before they are quantised. amax: their largest
    magnitude, float32 (1,). residual_out: input + residual, of the functions that take a residual.
    """

    q: Tensor
    scale: Tensor
    output: Tensor | None = None
    amax: Tensor | None = None
    residual_out: Tensor | None = None

    @classmethod
    def of(cls, results: tuple, given: Tensor | None) -> "QuantizedNorm":
        """Of Results, and the caller's scale."""
        q, scale, amax, y, total, *_ = results
        return cls(q, scale if given is None else given, y, amax, total)


class Results(NamedTuple):
    """What an implementation makes. scale is None where the caller has given it. An implementation
    that was told to save nothing may leave out mean and rstd.
    """

    q: Tensor
    scale: Tensor | None
    amax: Tensor | None
    y: Tensor | None
    sum: Tensor | None
    mean: Tensor | None
    rstd: Tensor | None


def q_dtype(spec: NormSpec) -> torch.dtype:
    return getattr(torch, spec.quantized.dtype)


def scale_of(array: Tensor, scales: Scales) -> Tensor:
    """The tensor that the caller gets, of the array that the kernels write."""
    shaped, dtype = array.as_strided(scales.shape, scales.strides), SCALE_DTYPES[scales.dtype]
    return shaped if shaped.dtype == dtype else shaped.view(dtype)
