"""tilenorm's RMSNorm for Hugging Face's `kernels`, without a repository on the hub.

    from kernels import Mode, kernelize, register_kernel_mapping
    from tilenorm.integrations.hf_kernels import rms_norm

    register_kernel_mapping({"RMSNorm": {"cuda": rms_norm}})
    kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE)

`kernels` binds the forward of the layer to the model's modules. Their classes share the name
"RMSNorm" and not a rounding, so the forward asks for that of each class, as the plugins of engines do.
"""

import torch
from torch import Tensor, nn

from .engines import form_of_class

_form_of = torch._dynamo.assume_constant_result(form_of_class)


class RMSNorm(nn.Module):
    """The layer: a forward for modules with a weight and an eps, and no state, as `kernels` asks."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        """What the module's class computes, by tilenorm, or by the class where tilenorm does not
        recognise it, or does not serve the call (see tilenorm.patch).
        """
        cls = type(self)
        form = _form_of(cls)
        if form is None or form.served(self, hidden_states) is None:
            return cls.forward(self, hidden_states)
        return form.compute(self, hidden_states, backend=None)


class Repository:
    """What `kernels` takes for a repository with one layer."""

    layer_name = "RMSNorm"

    def load(self) -> type[nn.Module]:
        """The layer."""
        return RMSNorm


rms_norm = Repository()
