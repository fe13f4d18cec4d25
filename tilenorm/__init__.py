"""RMSNorm and LayerNorm for NVIDIA GPUs in cuTile: forward and backward, with what surrounds them.

Importing this never touches CUDA. It takes little time, because engines and data workers do it in
every process: what models and tools alone use is imported when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .nn import LayerNorm, ModulatedLayerNorm, ModulatedRMSNorm, RMSNorm
from .ops.functional import (
    add_layer_norm,
    add_rms_norm,
    gated_layer_norm,
    gated_rms_norm,
    layer_norm,
    layer_norm_add,
    layer_norm_add_layer_norm,
    modulated_layer_norm,
    modulated_rms_norm,
    rms_norm,
    rms_norm_add,
    rms_norm_add_rms_norm,
    rms_norm_rope,
)
from .ops.functional_quantized import (
    add_layer_norm_quantized,
    add_rms_norm_quantized,
    layer_norm_quantized,
    rms_norm_quantized,
)
from .ops.passes.quantize import QuantizedNorm
from .ops.passes.registry import ReferenceWarning
from .ops.torch_ops.decompositions import decompositions

if TYPE_CHECKING:  # __getattr__ imports these
    from . import integrations as integrations
    from .integrations.aten import disable, enable, override
    from .integrations.compile import compile
    from .integrations.patch import patch, unpatch
    from .tools.explain import explain
    from .tools.fingerprint import fingerprint

# The module of each public name that is imported when it is first asked for.
_MODULE_OF = {
    "compile": "integrations.compile",
    "disable": "integrations.aten",
    "enable": "integrations.aten",
    "explain": "tools.explain",
    "fingerprint": "tools.fingerprint",
    "override": "integrations.aten",
    "patch": "integrations.patch",
    "unpatch": "integrations.patch",
}
__all__ = [
    "LayerNorm",
    "ModulatedLayerNorm",
    "ModulatedRMSNorm",
    "QuantizedNorm",
    "RMSNorm",
    "ReferenceWarning",
    "__version__",
    "add_layer_norm",
    "add_layer_norm_quantized",
    "add_rms_norm",
    "add_rms_norm_quantized",
    "compile",
    "decompositions",
    "disable",
    "enable",
    "explain",
    "fingerprint",
    "gated_layer_norm",
    "gated_rms_norm",
    "layer_norm",
    "layer_norm_add",
    "layer_norm_add_layer_norm",
    "layer_norm_quantized",
    "modulated_layer_norm",
    "modulated_rms_norm",
    "override",
    "patch",
    "rms_norm",
    "rms_norm_add",
    "rms_norm_add_rms_norm",
    "rms_norm_quantized",
    "rms_norm_rope",
    "unpatch",
]
__version__ = "0.4.0"


if not TYPE_CHECKING:  # a type checker would then take every name for one that is there

    def __getattr__(name: str) -> Any:
        """A name that the package does not have yet. Python calls this for such names alone."""
        if name == "integrations":
            return import_module(".integrations", __name__)
        if name in _MODULE_OF:
            return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "integrations"})
