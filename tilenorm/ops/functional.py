"""The functions that users call: those of torch.nn.functional, and more; all but quantised norms.

Each makes two groups of its arguments, in the order of its row in the table: tensors and options.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .call import call
from .functional_rotated import rms_norm_rope  # noqa: F401


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    rounding: str = "late",
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """Root mean square normalisation over the trailing dimensions, as torch.nn.functional.rms_norm.

        y = x / sqrt(mean(x²) + eps) · (weight + offset) + bias

    after Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), computed in float32
    (float64 for a float64 input) and rounded once.

    Args:
        input: (..., *normalized_shape), float16, bfloat16, float32 or float64. Or a jagged nested
            tensor, if the normalised dimensions come after the ragged one: its sequences' rows are
            rows like any others, and the output has its ragged sizes.
        normalized_shape: the trailing sizes that are normalised together.
        weight: of shape normalized_shape, in the input's dtype or another floating-point dtype. Or
            (H, *normalized_shape), where the input is (..., H, *normalized_shape): one for each
            head, as for the queries and keys of attention.
        eps: added to the mean square; None is the machine epsilon of float32 (of float64 for a
            float64 input), which is what PyTorch takes. A tensor without dimensions is read at
            once.
        bias: as the weight. PyTorch's function has none.
        offset: added to the weight, 1.0 for weights stored around zero, as Gemma's.
        rounding: "late" rounds once, as PyTorch does. "early" rounds x / sqrt(...) to the input's
            dtype before the weight, as Hugging Face's LlamaRMSNorm does.
        out_dtype: of the output, float16, bfloat16, float32 or float64; None is the input's. What
            is computed in float32 is rounded to it, and to no other dtype before. With
            rounding="early", x / sqrt(...) is rounded to the input's dtype, and what the weight and
            the bias make of it is rounded once, to out_dtype.
        backend: "cutile" or "reference" to insist on one; None chooses (see tilenorm.explain).

    Returns:
        A contiguous tensor of the input's shape, and of its dtype or out_dtype. Differentiable in
        input, weight and bias, to any order; each gradient has the dtype of its tensor.
        torch.func's transforms and forward-mode derivatives run the reference. Under torch.autocast
        in out_dtype, or in the dtype that PyTorch's own function gives: on CUDA the input is cast
        to float32 first, for RMSNorm from PyTorch 2.12 on.

    Raises:
        TypeError, RuntimeError, NotImplementedError: an argument of the wrong type, shape, device
            or dtype; nothing has been launched then.
        RuntimeError: the backend asked for cannot serve, with the reason.
        ValueError: an unknown backend or rounding, an input of too few dimensions.
    """
    tensors, asked = (input, weight, bias), (offset, rounding, out_dtype)
    return call("rms_norm", tensors, normalized_shape, eps, asked, backend)[0]


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    offset: float = 0.0,
    rounding: str = "late",
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """Layer normalisation over the trailing dimensions, as torch.nn.functional.layer_norm.

        y = (x − mean(x)) / sqrt(var(x) + eps) · (weight + offset) + bias

    after Ba, Kiros and Hinton, "Layer Normalization" (2016), with the variance of all elements, not
    an estimate from a sample. The kernels compute it from x − mean(x): a mean far larger than the
    standard deviation costs no accuracy. On a CPU the reference calls PyTorch's own operator, whose
    error is about 1e-4 where the mean is 1000 times the standard deviation.
    With eps = 0, a row of equal numbers is 0 / 0: rounding decides whether it is NaN or a number.

    Args, returns, raises: as rms_norm, but eps takes no None, and too few dimensions raise
    RuntimeError, as in PyTorch.
    """
    tensors, asked = (input, weight, bias), (offset, rounding, out_dtype)
    return call("layer_norm", tensors, normalized_shape, eps, asked, backend)[0]


def add_rms_norm(
    input: Tensor,
    residual: Tensor | Sequence[Tensor],
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    rounding: str = "late",
    dropout_mask: Tensor | None = None,
    dropout_scale: float = 1.0,
    layer_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """input + residual and its RMSNorm, in one pass.

        residual_out = input + residual        output = rms_norm(residual_out)

    Args:
        input: (..., *normalized_shape).
        residual: of the input's shape, in its dtype or another floating-point dtype. Or a sequence
            of two such tensors (a, r), as for a transformer's parallel attention and MLP:
            residual_out = (input + a) + r has the bits of PyTorch's two additions. The first is
            rounded to the dtype of a, which is the input's or that of r.
        dropout_mask, dropout_scale: a torch.bool tensor of the input's shape, False where dropout
            makes a zero, and 1 / (1 − p): the input is input · mask · scale first, rounded to its
            dtype once, as F.dropout on a GPU rounds. The caller draws the mask.
        layer_scale: of shape normalized_shape: the input, masked or not, is input · layer_scale
            first, rounded to its dtype, after Touvron et al., "Going deeper with Image
            Transformers" (2021). Then the residual has at least as many digits as the input.
            Neither the mask nor layer_scale goes with two residuals.
        The others are those of rms_norm.

    Returns:
        (output, residual_out), contiguous: output in out_dtype or the input's dtype (under
        autocast, as rms_norm), residual_out in the (last) residual's. output is the norm of
        residual_out as rounded to that dtype. The backward pass takes the gradients of both, either
        of which may be absent, and returns that of the input and that of the residual, each in its
        own dtype and in memory of its own or of the other's, never the caller's; and that of
        layer_scale.

    Raises: as rms_norm.
    """
    tensors = (input, residual, weight, bias, None, dropout_mask, layer_scale)
    asked = (offset, rounding, dropout_scale, out_dtype)
    results = call("add_rms_norm", tensors, normalized_shape, eps, asked, backend)
    return results[:2]


def add_layer_norm(
    input: Tensor,
    residual: Tensor | Sequence[Tensor],
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    offset: float = 0.0,
    rounding: str = "late",
    dropout_mask: Tensor | None = None,
    dropout_scale: float = 1.0,
    layer_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """input + residual and its LayerNorm, in one pass.

        residual_out = input + residual        output = layer_norm(residual_out)

    Args, returns, raises: as add_rms_norm and layer_norm.
    """
    tensors = (input, residual, weight, bias, None, dropout_mask, layer_scale)
    asked = (offset, rounding, dropout_scale, out_dtype)
    results = call("add_layer_norm", tensors, normalized_shape, eps, asked, backend)
    return results[:2]


def rms_norm_add(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    rounding: str = "late",
    backend: str | None = None,
) -> Tensor:
    """residual + the RMSNorm of input, in one pass, as models with norms after their layers add it.

        output = residual + rms_norm(input)

    after Team OLMo, "2 OLMo 2 Furious" (2024). The norm is rounded to the input's dtype before it
    is added, as by PyTorch's addition of what rms_norm returns.

    Args:
        input: (..., *normalized_shape).
        residual: of the input's shape, in its dtype or another floating-point dtype.
        The others are those of rms_norm.

    Returns:
        A contiguous tensor of the input's shape and the residual's dtype, differentiable in input,
        residual, weight and bias. The gradient of the residual is that of the output itself, as
        PyTorch's addition gives it.

    Raises: as rms_norm.
    """
    tensors, asked = (input, residual, weight, bias), (offset, rounding)
    return call("rms_norm_add", tensors, normalized_shape, eps, asked, backend)[0]


def layer_norm_add(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    offset: float = 0.0,
    rounding: str = "late",
    backend: str | None = None,
) -> Tensor:
    """residual + the LayerNorm of input, in one pass.

        output = residual + layer_norm(input)

    as in Liu et al., "Swin Transformer V2" (2022).

    Args, returns, raises: as rms_norm_add and layer_norm.
    """
    tensors, asked = (input, residual, weight, bias), (offset, rounding)
    return call("layer_norm_add", tensors, normalized_shape, eps, asked, backend)[0]


def gated_rms_norm(
    input: Tensor,
    gate: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    norm_before_gate: bool = True,
    activation: str = "silu",
    rounding: str = "late",
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """RMSNorm with a gate, as in Mamba-2, Qwen3-Next and Kimi Linear.

        y = rms_norm(input) · act(gate)          with norm_before_gate
        y = rms_norm(input · act(gate))          without

    where act(z) is silu(z) = z / (1 + exp(−z)), after Dao and Gu, "Transformers are SSMs" (2024),
    or the sigmoid 1 / (1 + exp(−z)), after Kimi Team, "Kimi Linear" (2025). Nothing is rounded
    between the norm and the gate, except by rounding="early" (see rms_norm), which rounds x̂ and,
    where the weight has the input's dtype, x̂ · weight.

    Args:
        input: (..., *normalized_shape).
        gate: of the input's shape, in its dtype or another floating-point dtype.
        norm_before_gate: whether the rows are normalised before the gate multiplies them.
        activation: act, "silu" or "sigmoid".
        The others are those of rms_norm.

    Returns:
        A contiguous tensor of the input's shape, and of its dtype or out_dtype, differentiable in
        input, gate, weight and bias.

    Raises: as rms_norm.
    """
    tensors = (input, gate, weight, bias)
    asked = (offset, rounding, norm_before_gate, activation, out_dtype)
    return call("gated_rms_norm", tensors, normalized_shape, eps, asked, backend)[0]


def gated_layer_norm(
    input: Tensor,
    gate: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    offset: float = 0.0,
    norm_before_gate: bool = True,
    activation: str = "silu",
    rounding: str = "late",
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """LayerNorm with a gate.

        y = layer_norm(input) · act(gate)          with norm_before_gate
        y = layer_norm(input · act(gate))          without

    Args, returns, raises: as gated_rms_norm and layer_norm.
    """
    tensors = (input, gate, weight, bias)
    asked = (offset, rounding, norm_before_gate, activation, out_dtype)
    return call("gated_layer_norm", tensors, normalized_shape, eps, asked, backend)[0]


def rms_norm_add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    next_weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
    rounding: str = "late",
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """residual + the RMSNorm of input, and the RMSNorm of that sum.

        residual_out = residual + rms_norm(input, weight)
        output       = rms_norm(residual_out, next_weight)

    after Gemma Team, "Gemma 2" (2024), where a norm follows each layer and another precedes the
    next one. It rounds where tilenorm.rms_norm_add and then tilenorm.rms_norm do; a kernel may add
    up a row in another order than theirs. One pass reads input and residual and writes
    residual_out and output. Where input and residual have different dtypes, where a weight is by
    heads, and where rows are so wide that blocks share them, the kernels run twice, as for the two
    functions; tilenorm.explain tells.

    Args:
        input: a layer's output.
        weight, next_weight: of the norm before the addition and of the norm after it.
        The others are those of rms_norm_add; eps, offset and rounding serve both norms.

    Returns:
        (output, residual_out), contiguous, in the residual's dtype, differentiable in input,
        residual, weight and next_weight, to any order. The gradients are those of the two
        functions; where both results have a gradient, that of residual_out is added before the
        only rounding, as by tilenorm.add_rms_norm.

    Raises: as tilenorm.rms_norm.
    """
    tensors, asked = (input, residual, weight, next_weight), (offset, rounding)
    results = call("rms_norm_add_rms_norm", tensors, normalized_shape, eps, asked, backend)
    return results[:2]


def layer_norm_add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    next_weight: Tensor | None = None,
    next_bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    offset: float = 0.0,
    rounding: str = "late",
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """residual + the LayerNorm of input, and the LayerNorm of that sum.

        residual_out = residual + layer_norm(input, weight, bias)
        output       = layer_norm(residual_out, next_weight, next_bias)

    as where blocks that normalise what they add follow one another, as in Liu et al., "Swin
    Transformer V2" (2022), and the last one is followed by a norm. It rounds where
    tilenorm.layer_norm_add and then tilenorm.layer_norm do.

    Args: weight, bias, next_weight, next_bias: of the norm before the addition and of the norm
    after it, each as those of tilenorm.layer_norm. The others, returns, raises: as
    rms_norm_add_rms_norm and layer_norm.
    """
    tensors = (input, residual, weight, bias, next_weight, next_bias)
    asked = (offset, rounding)
    return call("layer_norm_add_layer_norm", tensors, normalized_shape, eps, asked, backend)[:2]


def modulated_rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    scale: Tensor,
    shift: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm that is scaled and shifted by group, as adaptive norms of diffusion transformers.

        output = rms_norm(s, weight, bias) · (1 + scale) + shift
        s      = input, or residual + gate · input, which is returned, too

    after Peebles and Xie, "Scalable Diffusion Models with Transformers" (2023). All is computed in
    float32 and rounded once; s is rounded to the residual's dtype, and output is that of the
    rounded s.

    Args:
        input: (..., *normalized_shape), float16, bfloat16, float32 or float64.
        normalized_shape: the trailing sizes that are normalised together.
        scale: what multiplies the norm is 1 + scale. It has a row for each group of consecutive
            rows of the input. For an input (B, S, D) it is (D,), (B, D) or (B, 1, D) for each
            sample, (B, F, D) for each of F frames of S / F tokens, or (B, S, D) for each token: its
            sizes before normalized_shape are leading sizes of the input's, of which the last may be
            a divisor; sizes of 1 behind them are left out. In the input's dtype or another
            floating-point dtype. Rows that are evenly spaced, as those of a chunk of a projection
            (B, 6 · D), are read in place.
        shift: of scale's shape, in any of the dtypes; is added.
        weight, bias: of the norm, as those of rms_norm. The kernels take no weight by heads.
        eps: as that of rms_norm.
        residual: of the input's shape, in its dtype or another floating-point dtype.
        gate: of scale's shape, in any of the dtypes; only with a residual. Without a gate, s is
            residual + input.
        backend: as for rms_norm. The kernels take rows of up to 8192 elements.

    Returns:
        output, contiguous, of the input's shape and dtype; with a residual (output, s), s in the
        residual's dtype. Differentiable in every tensor, to any order. The gradients of scale,
        shift and gate are sums over the rows of each group, in float32 in one order, which depends
        on the number of rows. torch.func's transforms and forward-mode derivatives run the
        reference.

    Raises:
        RuntimeError: a scale, shift or gate of a shape that does not fit.
        ValueError: a gate without a residual.
        NotImplementedError: nested tensors, and DTensors that are cut in a normalised dimension.
        The others are those of rms_norm.
    """
    tensors = input, scale, shift, weight, bias, residual, gate
    results = call("modulated_rms_norm", tensors, normalized_shape, eps, (), backend)
    return results[0] if residual is None else results[:2]


def modulated_layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    scale: Tensor,
    shift: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """LayerNorm that is scaled and shifted by group, as adaptive norms of diffusion transformers.

        output = layer_norm(s, weight, bias) · (1 + scale) + shift
        s      = input, or residual + gate · input, which is returned, too

    Args, returns, raises: as modulated_rms_norm and layer_norm.
    """
    tensors = input, scale, shift, weight, bias, residual, gate
    results = call("modulated_layer_norm", tensors, normalized_shape, eps, (), backend)
    return results[0] if residual is None else results[:2]
