"""A stand-in for the parts of SGLang that tilenorm's plugin uses, with their names and semantics.

Its layers compute as SGLang's own: a fused add normalises the sum before it is rounded, and
forward_cuda turns to self.forward_native for what its kernels do not take.
"""

import pkgutil
from collections import Counter, defaultdict
from enum import Enum
from functools import wraps
from types import ModuleType
from typing import ClassVar

import torch
from torch import nn

from .stand_in_vllm import linked, normalized

RAN = Counter()  # calls of SGLang's own code, by class and method


class HookType(Enum):
    AFTER, AROUND, REPLACE = "after", "around", "replace"


def modules() -> dict[str, ModuleType]:
    """The modules by name, as sys.modules has them."""

    class HookRegistry:
        hooks: ClassVar[dict] = defaultdict(list)
        failed: ClassVar[list] = []

        @classmethod
        def register(cls, target, hook, kind):
            cls.hooks[target].append((kind, hook))

        @classmethod
        def apply_hooks(cls):
            for target, hooks in cls.hooks.items():
                path, name = target.rsplit(".", 1)
                try:
                    holder = pkgutil.resolve_name(path)
                    function = getattr(holder, name)
                except (ImportError, AttributeError):
                    cls.failed.append(target)
                    continue
                for kind, hook in hooks:
                    function = wrapped(function, hook, kind)
                setattr(holder, name, function)
            cls.hooks.clear()

    class Fused(nn.Module):
        def forward(self, *args):
            return self.forward_cuda(*args)

    class RMSNorm(Fused):
        _quant_linear = None

        def __init__(
            self,
            size,
            eps=1e-6,
            var_hidden_size=None,
            cast_x_before_out_mul=False,
            fp32_residual=False,
            has_weight=True,
            weight_dtype=None,
            override_orig_dtype=None,
        ):
            super().__init__()
            self.variance_epsilon, self.has_weight = eps, has_weight
            self.cast_x_before_out_mul, self.fp32_residual = cast_x_before_out_mul, fp32_residual
            self.override_orig_dtype = override_orig_dtype
            self.variance_size_override = var_hidden_size
            weight = torch.ones(size, dtype=weight_dtype)
            self.weight = nn.Parameter(weight) if has_weight else weight

        def forward_native(self, x, residual=None, post_residual_addition=None, quant_linear=None):
            RAN["RMSNorm", "native"] += 1
            return normalized(x, self.weight, self.variance_epsilon, residual)

        def forward_cuda(self, x, residual=None, post_residual_addition=None, quant_linear=None):
            if self.variance_size_override is not None:
                return self.forward_native(x, residual, post_residual_addition)
            RAN["RMSNorm", "cuda"] += 1
            return normalized(x, self.weight, self.variance_epsilon, residual)

    class GemmaRMSNorm(Fused):
        def __init__(self, size, eps=1e-6):
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.zeros(size)), eps

        def forward_native(self, x, residual=None, post_residual_addition=None):
            RAN["GemmaRMSNorm", "native"] += 1
            return x if residual is None else (x, residual)

        def forward_cuda(self, x, residual=None, post_residual_addition=None):
            RAN["GemmaRMSNorm", "cuda"] += 1
            return x if residual is None else (x, residual)

    class Gemma3RMSNorm(Fused):
        def __init__(self, size, eps=1e-6):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.zeros(size)), eps

        def forward_native(self, x, residual=None):
            RAN["Gemma3RMSNorm", "native"] += 1
            return x

        def forward_cuda(self, x, residual=None):
            return self.forward_native(x, residual)

    class Gemma4RMSNorm(Fused):
        def __init__(self, size, eps=1e-6, scale_shift=0.0, with_scale=True):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(size)), eps
            self.scale_shift, self.with_scale = scale_shift, with_scale

        def forward_native(self, x):
            RAN["Gemma4RMSNorm", "native"] += 1
            return x

        def forward_cuda(self, x):
            return self.forward_native(x)

    class LayerNorm(Fused):
        def __init__(self, size, eps=1e-5, elementwise_affine=True, bias=True, dtype=torch.float32):
            super().__init__()
            self.hidden_size, self.variance_epsilon, self.dtype = size, eps, dtype
            self.elementwise_affine, self.use_bias = elementwise_affine, bias
            self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
            self.bias = nn.Parameter(torch.zeros(size, dtype=dtype))

        def forward_native(self, x):
            RAN["LayerNorm", "native"] += 1
            return x

        def forward_cuda(self, x):
            return self.forward_native(x)

    class ModelRunner:
        def __init__(self, model, model_config):
            self.pending, self.model_config = model, model_config

        def load_model(self):
            self.model = self.pending

    def reduced(*args, **kwargs):
        raise AssertionError("the fused all-reduce ran")

    classes = (RMSNorm, GemmaRMSNorm, Gemma3RMSNorm, Gemma4RMSNorm, LayerNorm)
    packages = ["sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.layers"]
    packages += ["sglang.srt.model_executor", "sglang.kernels", "sglang.kernels.ops"]
    packages += ["sglang.kernels.ops.layernorm"]
    return linked(
        {name: {} for name in packages}
        | {
            "sglang.srt.plugins.hook_registry": {
                "HookRegistry": HookRegistry,
                "HookType": HookType,
            },
            "sglang.srt.layers.layernorm": {cls.__name__: cls for cls in classes},
            "sglang.srt.layers.flashinfer_comm_fusion": {
                "flashinfer_allreduce_residual_rmsnorm": reduced
            },
            "sglang.srt.model_executor.model_runner": {"ModelRunner": ModelRunner},
            "sglang.kernels.ops.layernorm.norm": {
                "can_use_fused_inplace_qknorm": lambda head_dim, dtype: True
            },
        }
    )


def wrapped(function, hook, kind: HookType):
    """As SGLang's registry wraps."""

    @wraps(function)
    def wrapper(*args, **kwargs):
        if kind is HookType.REPLACE:
            return hook(*args, **kwargs)
        if kind is HookType.AROUND:
            return hook(function, *args, **kwargs)
        result = function(*args, **kwargs)
        modified = hook(result, *args, **kwargs)
        return result if modified is None else modified

    return wrapper
