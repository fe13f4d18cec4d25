"""The functions that users call for norms whose output is quantised."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .call import call
from .passes.quantize import QuantizedNorm

E4M3 = torch.float8_e4m3fn


def rms_norm_quantized(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    rounding: str = "late",
    scaling: str,
    dtype: torch.dtype = E4M3,
    power_of_2: bool = False,
    scale: Tensor | None = None,
    layout: str | None = None,
    return_output: bool = False,
    return_amax: bool = False,
    backend: str | None = None,
) -> QuantizedNorm:
    """RMSNorm whose rows are written as 8-bit floats with scales, in one pass.

        y = rms_norm(input)        q = y / scale, to the nearest number of `dtype`

    q has, bit for bit, the codes of what tilenorm.rms_norm returns, quantised afterwards. Where no
    single kernel keeps these bits, PyTorch's operations quantise what the norm's kernels return: on
    a GPU before sm_90, and in layer_norm_quantized and add_layer_norm_quantized of some N from 4097
    on. tilenorm.explain tells. Groups of elements share a scale. With F the largest number of
    `dtype` (448 or 57344) and a the largest magnitude of y in a group:

        "row"     a group is a row, "block" 128 elements of one: factor = F / max(a, 1e-12),
                  q = y · factor, scale = 1 / factor, each in float32 and rounded once
        "mx"      a group is 32 elements: scale = the smallest power of two from a / F on, after
                  "OCP Microscaling Formats (MX) Specification" 1.0 (2023), rounded up as NVIDIA's
                  cuDNN and TransformerEngine do
        "tensor"  the caller gives the one scale: q = y · (1 / scale), saturated

    Args:
        input to rounding: those of tilenorm.rms_norm.
        scaling: "row", "block", "mx" or "tensor". A row is the elements of normalized_shape, which
            are a multiple of 128 for "block" and of 32 for "mx".
        dtype: of q, torch.float8_e4m3fn or torch.float8_e5m2.
        power_of_2: for "row" and "block": the factor is rounded down to a power of two.
        scale: for "tensor": one float32 on the input's device. It is not read by the host.
        layout: of the scales of M rows in groups of G elements.
            "row": one; (M, 1), contiguous, as F.scaled_mm's ScalingType.RowWise takes it.
            "block": "column" (the default) is (M, N / G) with strides (1, M), as
            ScalingType.BlockWise1x128 takes it; "column_tma" has strides (1, M rounded up to a
            multiple of 4), as DeepGEMM and vLLM take it; "row" is contiguous.
            "mx": "row" (the default) is (M, N / G), contiguous; "swizzled" is one dimension in
            tiles of 128 rows and 4 groups, as SwizzleType.SWIZZLE_32_4_4 takes it, with zeros
            around.
        return_output: y is returned too, in the input's dtype.
        return_amax: the largest magnitude of y is returned too.
        backend: as for tilenorm.rms_norm.

    Returns:
        QuantizedNorm. q has the input's shape. scale is the factor of decoding, y ≈ q · scale:
        float32, for "mx" torch.float8_e8m0fnu, for "tensor" the caller's. A group of zeros has
        zeros in q and a finite scale. A NaN in a group makes its scale and q NaN. An infinity makes
        the scale of a row or block infinite and its own code NaN, the others zero; a group of "mx"
        is NaN.
        q, scale and amax have no gradient. output has that of tilenorm.rms_norm: gradients go
        through the quantisation as if it were not there.

    Raises: as tilenorm.rms_norm, and
        RuntimeError: an argument requires a gradient and return_output is False; rows that are not
            whole groups; a scale of another shape, dtype or device.
        ValueError: an unknown scaling; a layout, power_of_2 or scale that does not fit it.
        NotImplementedError: another dtype; nested tensors; torch.func's transforms.
    """
    tensors = input, weight, bias, scale
    asked = offset, rounding, scaling, dtype, power_of_2, layout, return_output, return_amax
    results = call("rms_norm_quantized", tensors, normalized_shape, eps, asked, backend)
    return QuantizedNorm.of("rms_norm_quantized", results, scale)


def layer_norm_quantized(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    offset: float = 0.0,
    rounding: str = "late",
    scaling: str,
    dtype: torch.dtype = E4M3,
    power_of_2: bool = False,
    scale: Tensor | None = None,
    layout: str | None = None,
    return_output: bool = False,
    return_amax: bool = False,
    backend: str | None = None,
) -> QuantizedNorm:
    """LayerNorm whose rows are written as 8-bit floats with scales, in one pass.

        y = layer_norm(input)        q = y / scale, to the nearest number of `dtype`

    Args, returns, raises: as tilenorm.layer_norm and rms_norm_quantized.
    """
    tensors = input, weight, bias, scale
    asked = offset, rounding, scaling, dtype, power_of_2, layout, return_output, return_amax
    results = call("layer_norm_quantized", tensors, normalized_shape, eps, asked, backend)
    return QuantizedNorm.of("layer_norm_quantized", results, scale)


def add_rms_norm_quantized(
    input: Tensor,
    residual: Tensor | Sequence[Tensor],
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    rounding: str = "late",
    scaling: str,
    dtype: torch.dtype = E4M3,
    power_of_2: bool = False,
    scale: Tensor | None = None,
    layout: str | None = None,
    return_output: bool = False,
    return_amax: bool = False,
    backend: str | None = None,
) -> QuantizedNorm:
    """input + residual, and its RMSNorm written as 8-bit floats with scales, in one pass.

        residual_out = input + residual        y = rms_norm(residual_out)
        q = y / scale, to the nearest number of `dtype`

    Args, returns, raises: as tilenorm.add_rms_norm and rms_norm_quantized. The sum is the field
    residual_out, the last, of what is returned; it is differentiable.
    """
    tensors = input, residual, weight, bias, None, scale
    asked = offset, rounding, scaling, dtype, power_of_2, layout, return_output, return_amax
    results = call("add_rms_norm_quantized", tensors, normalized_shape, eps, asked, backend)
    return QuantizedNorm.of("add_rms_norm_quantized", results, scale)


def add_layer_norm_quantized(
    input: Tensor,
    residual: Tensor | Sequence[Tensor],
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    offset: float = 0.0,
    rounding: str = "late",
    scaling: str,
    dtype: torch.dtype = E4M3,
    power_of_2: bool = False,
    scale: Tensor | None = None,
    layout: str | None = None,
    return_output: bool = False,
    return_amax: bool = False,
    backend: str | None = None,
) -> QuantizedNorm:
    """input + residual, and its LayerNorm written as 8-bit floats with scales, in one pass.

        residual_out = input + residual        y = layer_norm(residual_out)
        q = y / scale, to the nearest number of `dtype`

    Args, returns, raises: as tilenorm.add_layer_norm and add_rms_norm_quantized.
    """
    tensors = input, residual, weight, bias, None, scale
    asked = offset, rounding, scaling, dtype, power_of_2, layout, return_output, return_amax
    results = call("add_layer_norm_quantized", tensors, normalized_shape, eps, asked, backend)
    return QuantizedNorm.of("add_layer_norm_quantized", results, scale)
