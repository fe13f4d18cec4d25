"""tilenorm's norms in SGLang, normal and deterministic. SGLang 0.5.23.

    TILENORM_ENGINES=1 python -m sglang.launch_server --model-path MODEL

`register` is an entry point of sglang.srt.plugins, which SGLang calls in each of its processes. It
hooks the forwards of SGLang's layers, and not the classes, because models derive from the classes:
forward_cuda, inside of which the deterministic mode branches, and forward_native, which an outer
torch.compile calls. When a model is loaded, each of its norms gets its rounding (engines.py), both
variants of its kernels are compiled, and SGLang's log has the report.

Where a norm follows an all-reduce, SGLang reduces first and then calls its layer, and queries and
keys are normalised by their layers: two fused kernels beside the layers decline.

An add returns new tensors, where SGLang's own writes into its arguments.
"""

import logging
import pkgutil
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.functional import layer_norm, rms_norm
from . import engines
from .engines import ATTRIBUTE, DTYPES, Kind, Layer, report

__all__ = ["register", "report"]
LAYERS = "sglang.srt.layers.layernorm"
LOAD = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
# What normalises beside the layers, and says by what it returns that it does not.
REDUCED = "sglang.srt.layers.flashinfer_comm_fusion.flashinfer_allreduce_residual_rmsnorm"
OF_HEADS = "sglang.kernels.ops.layernorm.norm.can_use_fused_inplace_qknorm"
REFUSED = "tilenorm's plugin of SGLang failed; without TILENORM_ENGINES and SGLANG_PLUGINS=tilenorm"
REFUSED += " SGLang runs its own norms"


def register() -> None:
    """Hook SGLang's layers, if that is asked for. May be called again.

    Raises SystemExit where SGLang is of a version that this does not know: SGLang logs any other
    exception of a plugin, and goes on without it.
    """
    try:
        if engines.asked_for("SGLANG_PLUGINS"):
            _register()
    except Exception as error:
        raise SystemExit(f"{REFUSED}: {error!r}") from error


def _register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = [(LOAD, _prepared, HookType.AFTER)]
    hooks += [(REDUCED, _declines, HookType.REPLACE), (OF_HEADS, _never, HookType.REPLACE)]
    for name, hook in FORWARDS.items():
        for method in ("forward_cuda", "forward_native"):
            hooks.append((f"{LAYERS}.{name}.{method}", hook, HookType.AROUND))
    for target, hook, kind in hooks:
        pkgutil.resolve_name(target)  # SGLang would only log that there is none
        HookRegistry.register(target, hook, kind)


def _prepared(_: None, runner: Any) -> None:
    """After a runner's load_model: prepares the model."""
    logger = logging.getLogger(__name__)
    engines.take_over(runner.model, runner.model_config, layer_of, _run, logger)


def layer_of(module: nn.Module) -> Layer | str:
    """A norm of a loaded model, or why SGLang's own code computes it."""
    layernorm = pkgutil.resolve_name(LAYERS)
    name = next((n for n in FORWARDS if isinstance(module, getattr(layernorm, n))), None)
    if name is None:
        return "is not a layer that tilenorm replaces"
    hooked = getattr(layernorm, name)
    for method in ("forward", "forward_cuda", "forward_native"):
        if getattr(type(module), method) is not getattr(hooked, method):
            return f"has a {method} of its own"
    if getattr(module, "variance_size_override", None) is not None:
        return "normalises by a part of the row"
    if name == "LayerNorm":
        return Layer(Kind("layer"), module.elementwise_affine)
    if name == "Gemma4RMSNorm":
        return Layer(Kind("rms", module.scale_shift), module.with_scale)
    if name != "RMSNorm":
        return Layer(Kind("rms", 1.0))
    rounding = "early" if module.cast_x_before_out_mul else None
    return Layer(Kind("rms"), module.has_weight, rounding)


def _served(layer: nn.Module, x: Tensor) -> bool:
    return getattr(layer, ATTRIBUTE, None) is not None and x.numel() > 0 and x.dtype in DTYPES


def _rms(original, layer, x, residual=None, post_residual_addition=None, quant_linear=None):
    """Around RMSNorm. A norm that quantises its output for a projection stays SGLang's."""
    if not _served(layer, x) or quant_linear is not None or layer._quant_linear is not None:
        others = () if quant_linear is None else (quant_linear,)
        return original(layer, x, residual, post_residual_addition, *others)
    if layer.override_orig_dtype is not None:  # rl_on_policy_target: float32 goes on
        x = x.to(layer.override_orig_dtype)
    if residual is not None and layer.fp32_residual:
        residual = residual.float()
    weight = layer.weight.data if layer.has_weight else None
    residual = _with(residual, post_residual_addition)
    rounding = getattr(layer, ATTRIBUTE)
    return engines.add_norm(x, residual, weight, layer.variance_epsilon, rounding=rounding)


def _gemma(original, layer, x, residual=None, post_residual_addition=None):
    """Around GemmaRMSNorm and Gemma3RMSNorm, the second of which takes no third tensor."""
    if not _served(layer, x):
        others = () if post_residual_addition is None else (post_residual_addition,)
        return original(layer, x, residual, *others)
    eps = layer.eps if hasattr(layer, "eps") else layer.variance_epsilon
    residual = _with(residual, post_residual_addition)
    options = {"offset": 1.0, "rounding": getattr(layer, ATTRIBUTE)}
    return engines.add_norm(x, residual, layer.weight.data, eps, **options)


def _gemma4(original, layer, x):
    if not _served(layer, x):
        return original(layer, x)
    weight = layer.weight.data if layer.with_scale else None
    offset = layer.scale_shift if layer.with_scale else 0.0
    options = {"offset": offset, "rounding": getattr(layer, ATTRIBUTE)}
    return rms_norm(x, (x.shape[-1],), weight, layer.eps, **options)


def _layer(original, layer, x):
    if not _served(layer, x) or torch.promote_types(x.dtype, layer.dtype) != layer.dtype:
        return original(layer, x)  # it rounds x to the layer's dtype
    weight = layer.weight if layer.elementwise_affine else None
    bias = layer.bias if layer.use_bias else None
    rounding, eps = getattr(layer, ATTRIBUTE), layer.variance_epsilon
    return layer_norm(x, (layer.hidden_size,), weight, bias, eps, rounding=rounding)


FORWARDS = {
    "RMSNorm": _rms,
    "GemmaRMSNorm": _gemma,
    "Gemma3RMSNorm": _gemma,
    "Gemma4RMSNorm": _gemma4,
    "LayerNorm": _layer,
}


def _with(residual: Tensor | None, addition: Tensor | None) -> Tensor | None:
    """The residual and what SGLang adds to it first, rounded as by its CUDA kernels."""
    return residual if residual is None or addition is None else residual + addition


def _declines(*_, **__) -> tuple[None, None]:
    """For FlashInfer's all-reduce with a norm."""
    return None, None


def _never(*_, **__) -> bool:
    """For the test whether queries and keys are normalised in place."""
    return False


def _run(layer: Any, x: Tensor, residual: Tensor | None) -> None:
    """Call a layer, to warm it up."""
    if residual is None:
        layer.forward_cuda(x)
    elif FORWARDS.get(type(layer).__name__) not in (_gemma4, _layer):
        layer.forward_cuda(x, residual)
