"""RMSNorm and LayerNorm for NVIDIA GPUs in cuTile: forward and backward, with what surrounds them.

Importing this never touches CUDA.
"""

from .integrations.aten import disable, enable, override
from .integrations.compile import compile
from .integrations.patch import patch, unpatch
from .nn import LayerNorm, ModulatedLayerNorm, ModulatedRMSNorm, RMSNorm
from .ops.decompositions import decompositions
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
from .ops.quantize import QuantizedNorm
from .ops.registry import ReferenceWarning
from .tools.explain import explain

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
__version__ = "0.3.0"
