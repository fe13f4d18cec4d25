"""The function that users call for a norm, an addition and another norm in one pass."""

from collections.abc import Sequence

import torch
from torch import Tensor, is_autocast_enabled
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function, has_torch_function

from .. import arguments, dispatch, library
from ..autograd import needs_grad
from ..direct import in_onnx_export, is_transformed
from ..functional import rms_norm, rms_norm_add
from ..overrides import Whole, has_nested
from ..sharding import is_distributed
from ..tensors import Tensors
from .library import apply, chain_runner_of

NAME = "rms_norm_add_rms_norm"


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
    residual_out and output. Where input and residual have different dtypes, and where rows are so
    wide that blocks share them, the two functions run; tilenorm.explain tells which.

    Args:
        input: (..., *normalized_shape), float16, bfloat16, float32 or float64: a layer's output.
        residual: of the input's shape, in its dtype or another floating-point dtype.
        normalized_shape: the trailing sizes that are normalised together.
        weight, next_weight: of the norm before the addition and of the norm after it, each as the
            weight of tilenorm.rms_norm.
        eps, offset, rounding: those of tilenorm.rms_norm, for both norms.
        backend: as for tilenorm.rms_norm.

    Returns:
        (output, residual_out), contiguous, in the residual's dtype, differentiable in input,
        residual, weight and next_weight, to any order. The gradients are those of the two
        functions; where both results have a gradient, that of residual_out is added before the
        only rounding, as by tilenorm.add_rms_norm. torch.func's transforms, nested tensors,
        DTensors and weights by heads run the two functions.

    Raises: as tilenorm.rms_norm.
    """
    tensors = (input, residual, None, weight, None, next_weight)
    what = NAME, tensors, normalized_shape, eps, (offset, rounding), backend
    return dispatch.normalize(*what, _checked)[:2]


def _checked(op, tensors, normalized_shape, eps, asked, backend, known) -> tuple:
    """The output and the sum, after checks, and remembered where a runner is called directly."""
    taken = tensors
    input, residual, _, weight, _, next_weight = tensors
    tensors, (offset, rounding) = (input, residual, weight, next_weight), asked
    given = [t for t in tensors if t is not None]
    options = {"offset": offset, "rounding": rounding, "backend": backend}
    if not is_compiling() and has_torch_function(given):
        returned = handle_torch_function(
            rms_norm_add_rms_norm, given, input, residual, normalized_shape, weight=weight,
            next_weight=next_weight, eps=eps, **options,
        )  # fmt: skip
        return Whole(returned)
    if has_nested(tensors):
        return _in_two(tensors, normalized_shape, eps, options)
    eps = arguments.without_tensor(eps)
    checked = _check(tensors, normalized_shape, eps, (offset, False, rounding), backend)
    by_heads = any(t is not None and t.numel() != checked.hidden for t in tensors[2:])
    # DTensors know the op of a norm, but not that of a chain.
    apart = is_transformed(tensors) or in_onnx_export() or any(map(is_distributed, given))
    if by_heads or apart:
        return _in_two(tensors, normalized_shape, eps, options)
    first, second = (arguments.default_eps(t) if eps is None else float(eps) for t in tensors[:2])
    uncast = tensors
    if input.is_cuda and is_autocast_enabled():
        cast = Tensors(*library.autocast_tensors(Tensors(input, skip=residual), "rms"))
        tensors = (cast.input, cast.skip, weight, next_weight)
    save = needs_grad(*tensors)
    if dispatch.is_direct(tensors):
        runner = chain_runner_of(tensors, checked, backend)
        if known is not None and all(a is b for a, b in zip(tensors, uncast, strict=True)):
            dispatch.remember(known, taken, len(normalized_shape), (first, second), runner, apply)
        cast = (*tensors[:2], None, weight, None, next_weight)
        if save:
            return apply(((first, second), False, runner, runner.training), *cast)
        return runner.inference(cast, (first, second))
    last = (checked.hidden, checked.offset, checked.rounding, first, second, save, backend)
    return torch.ops.tilenorm.norm_add_norm(*tensors, *last)


def _in_two(tensors: tuple, normalized_shape, eps, options: dict) -> tuple[Tensor, Tensor]:
    input, residual, weight, next_weight = tensors
    total = rms_norm_add(input, residual, normalized_shape, weight, eps, **options)
    return rms_norm(total, normalized_shape, next_weight, eps, **options), total


def _check(tensors: tuple, normalized_shape, eps, asked: tuple, backend):
    """Raises as arguments.check does."""
    input, residual, weight, next_weight = tensors
    what = normalized_shape, eps, asked, backend
    options = arguments.check(NAME, (input, None, None, weight, None), *what)
    arguments.check_like_input(NAME, "residual", residual, input)
    if next_weight is not None:
        arguments.check_parameter(NAME, "next_weight", next_weight, tuple(normalized_shape), input)
    return options
