"""RMSNorm and LayerNorm for NVIDIA GPUs in cuTile: forward and backward, with what surrounds them.

Importing this never touches CUDA.
"""

from .integrations.aten import disable, enable, override
from .integrations.compile import compile
from .integrations.models import patch
from .nn import LayerNorm, RMSNorm
from .ops.functional import (
    add_layer_norm,
    add_rms_norm,
    gated_layer_norm,
    gated_rms_norm,
    layer_norm,
    rms_norm,
)
from .ops.registry import ReferenceWarning
from .tools.explain import explain

__all__ = [
    "LayerNorm",
    "RMSNorm",
    "ReferenceWarning",
    "__version__",
    "add_layer_norm",
    "add_rms_norm",
    "compile",
    "disable",
    "enable",
    "explain",
    "gated_layer_norm",
    "gated_rms_norm",
    "layer_norm",
    "override",
    "patch",
    "rms_norm",
]
__version__ = "0.1.0"
