"""tilenorm's RMSNorm for Hugging Face's `kernels`, without a repository on the hub.

    from kernels import Mode, kernelize, register_kernel_mapping
    from tilenorm.integrations.hf_kernels import rms_norm

    register_kernel_mapping({"RMSNorm": {"cuda": rms_norm}})
    kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE)

`kernels` binds the forward of the layer to the model's modules. Their classes share the name
"RMSNorm" and not a rounding. So the forward asks for the rounding of each class, as the plugins of
engines do.
"""

import torch
from torch import Tensor, nn

from ..ops.functional import rms_norm as tilenorm_rms_norm
from .engines import form_of_class


@torch._dynamo.assume_constant_result
def _options_of(cls: type[nn.Module]) -> tuple[str, float, str] | None:
    """The name of a class's attribute that holds eps, its offset and its rounding, or None where
    tilenorm does not take it for an RMSNorm. torch.compile does not look into how they are found.
    """
    form = form_of_class(cls)
    plain = form and form.norm == "rms" and form.weight == "weight" and isinstance(form.eps, str)
    if not plain or form.bias or form.gate or form.groups or form.rounds_offset:
        return None
    return form.eps, form.offset, form.rounding


class RMSNorm(nn.Module):
    """The layer: a forward for modules of other classes, and no state, as `kernels` asks."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        """What the module's class computes. The class itself computes it where tilenorm does not
        recognise it, where the weight has another dtype than the input, and under autocast.
        """
        cls, x, weight = type(self), hidden_states, self.weight
        options = _options_of(cls)
        if options is None or weight.dtype != x.dtype or torch.is_autocast_enabled(x.device.type):
            return cls.forward(self, hidden_states)
        eps, offset, rounding = options
        how = {"offset": offset, "rounding": rounding}
        return tilenorm_rms_norm(x, (x.shape[-1],), weight, getattr(self, eps), **how)


class Repository:
    """What `kernels` takes for a repository with one layer."""

    layer_name = "RMSNorm"

    def load(self) -> type[nn.Module]:
        """The layer."""
        return RMSNorm


rms_norm = Repository()
