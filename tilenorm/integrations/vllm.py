"""tilenorm's norms in vLLM: eager, compiled, batch-invariant, on several GPUs. vLLM 0.32 and 0.33.

    VLLM_PLUGINS=tilenorm vllm serve MODEL          # or TILENORM_ENGINES=1

`register` is an entry point of vllm.general_plugins, which vLLM calls in each of its processes. It
puts subclasses in the place of vLLM's layers (CustomOp.register_oot), the way that also serves
VLLM_BATCH_INVARIANT=1. When a model is loaded, each of its norms gets its rounding (engines.py),
both variants of its kernels are compiled, and vLLM's log has the report.

An add returns new tensors, where vLLM's own writes into its arguments.
"""

import inspect
from functools import cache, wraps
from typing import Any

from torch import Tensor, nn

from ..ops.functional import gated_rms_norm, layer_norm, rms_norm
from ..settings import settings
from ..tools.fingerprint import code_digest
from . import engines
from .engines import ATTRIBUTE, DTYPES, Kind, Layer, report

__all__ = ["register", "report"]
KEY = "TILENORM"  # in vLLM's environment, of which a compiled model is kept
REFUSED = "tilenorm's plugin of vLLM failed; without TILENORM_ENGINES and VLLM_PLUGINS=tilenorm"
REFUSED += " vLLM runs its own norms"


def register() -> None:
    """Put tilenorm's layers in the place of vLLM's, if that is asked for. May be called again.

    Raises RuntimeError, which stops vLLM, where another plugin has done so or vLLM is of a version
    that this does not know.
    """
    if not engines.asked_for("VLLM_PLUGINS"):
        return
    try:
        _register()
    except Exception as error:
        raise RuntimeError(f"{REFUSED}: {error}") from error


def _register() -> None:
    import transformers
    from vllm import envs
    from vllm.model_executor import model_loader
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot

    for name, layer in layers().items():
        other = op_registry_oot.get(name)
        if other is None:
            original = layer.name
            CustomOp.register_oot(name=name)(layer)
            layer.name = (
                original  # register_oot renames it, and custom_ops=["+rms_norm"] would miss it
            )
        elif other is not layer:
            raise RuntimeError(f"another plugin replaces vLLM's {name} by {other.__module__}")
    # vLLM keeps compiled models by its own variables and configurations, and drops their guards: a
    # model that was compiled with other norms would be taken from its cache.
    key = f"{code_digest()} {settings().rounding} transformers {transformers.__version__}"
    envs.environment_variables[KEY] = lambda: key
    loaders = [value for value in vars(model_loader).values() if isinstance(value, type)]
    for loader in {model_loader.BaseModelLoader, *loaders}:
        load = vars(loader).get("load_model")
        if load and not hasattr(load, ATTRIBUTE):
            loader.load_model = _preparing(load)


def _preparing(load):
    """A loader's load_model that prepares the model which it returns."""
    signature = inspect.signature(load)

    @wraps(load)
    def load_model(self, *args, **kwargs):
        from vllm.logger import init_logger

        model = load(self, *args, **kwargs)
        config = signature.bind(self, *args, **kwargs).arguments["model_config"]
        logger = init_logger("vllm.plugins.tilenorm")
        engines.take_over(model, config, layer_of, _run, logger)
        return model

    setattr(load_model, ATTRIBUTE, True)
    return load_model


def layer_of(module: nn.Module) -> Layer | str:
    """A norm of a loaded model, or why vLLM's own code computes it."""
    kinds = layers()
    cls = next((name for name, layer in kinds.items() if type(module) is layer), None)
    if cls is None:
        return "is not a layer that tilenorm replaces"
    if getattr(module, "variance_size_override", None) is not None:
        return "normalises by a part of the row"
    if cls == "GemmaRMSNorm":
        return Layer(Kind("rms", 1.0))
    if cls == "RMSNormGated":
        return Layer(Kind("rms", gate="after" if module.norm_before_gate else "before"))
    if cls == "LayerNorm":
        return Layer(Kind("layer"), module.weight is not None)
    return Layer(Kind("rms"), module.has_weight)


@cache
def layers() -> dict[str, type[Any]]:
    """tilenorm's layers by the names of those of vLLM that they replace.

    A compiled model calls forward_native and an eager one forward_cuda. The layer of a CPU calls
    forward_native, and so do vLLM's own forward_cuda. A norm that is left runs vLLM's code of the
    same method, which ends in vLLM's forward_native.
    """
    from vllm.model_executor.layers import layernorm

    def replaced(name: str, compute) -> type:
        base = getattr(layernorm, name)

        def forward_native(self, x, *others):
            y = _served(compute, self, x, *others)
            return base.forward_native(self, x, *others) if y is None else y

        def forward_cuda(self, x, *others):
            y = _served(compute, self, x, *others)
            return base.forward_cuda(self, x, *others) if y is None else y

        methods = {"forward_native": forward_native, "forward_cuda": forward_cuda, ATTRIBUTE: None}
        return type(f"Tile{name}", (base,), methods | {"__module__": __name__})

    forwards = {"RMSNorm": _rms, "GemmaRMSNorm": _gemma}
    forwards |= {"LayerNorm": _layer, "RMSNormGated": _gated}
    return {name: replaced(name, compute) for name, compute in forwards.items()}


def _served(compute, layer, x: Tensor, *others: Tensor | None):
    """What tilenorm computes for a layer, or None where vLLM's own code has to."""
    tensors = (x, layer.weight, *others)
    if getattr(layer, ATTRIBUTE) is None or any(
        t is not None and t.dtype not in DTYPES for t in tensors
    ):
        return None
    return compute(layer, x, *others)


def _rms(layer, x, residual=None):
    passes = layer.pass_weight if residual is None else layer.pass_weight_add
    return _add_norm(layer, x, residual, layer.weight.data if passes else None)


def _gemma(layer, x, residual=None):
    return _add_norm(layer, x, residual, layer.weight.data, offset=1.0)


def _add_norm(layer, x, residual, weight, **options):
    options["rounding"] = getattr(layer, ATTRIBUTE)
    eps = layer.variance_epsilon
    if residual is None or residual.dtype == x.dtype:
        return engines.add_norm(x, residual, weight, eps, **options)
    total = (x + residual).to(x.dtype)  # vLLM's sum has the dtype of x, tilenorm's the residual's
    return rms_norm(total, (x.shape[-1],), weight, eps, **options), total


def _layer(layer, x):
    shape, rounding = layer.normalized_shape, getattr(layer, ATTRIBUTE)
    return layer_norm(x, shape, layer.weight, layer.bias, layer.eps, rounding=rounding)


def _gated(layer, x, gate=None):
    size, weight, shape = layer.group_size or x.shape[-1], layer.weight.data, x.shape
    if size != x.shape[-1]:  # a row for each group, with its part of the weight
        x, weight = x.unflatten(-1, (-1, size)), weight.view(-1, size)
        gate = gate if gate is None else gate.unflatten(-1, (-1, size))
    options: dict[str, Any] = {"rounding": getattr(layer, ATTRIBUTE)}
    if gate is None:
        return rms_norm(x, (size,), weight, layer.eps, **options).reshape(shape)
    options["activation"] = "sigmoid" if layer.activation == "sigmoid" else "silu"
    options["norm_before_gate"] = layer.norm_before_gate
    return gated_rms_norm(x, gate, (size,), weight, layer.eps, **options).reshape(shape)


def _run(layer: Any, x: Tensor, residual: Tensor | None) -> None:
    """Call a layer as an eager model does, to warm it up."""
    if residual is None:
        layer.forward_cuda(x)
    elif not isinstance(layer, layers()["LayerNorm"]):
        layer.forward_cuda(x, residual)
