"""A stand-in for the parts of vLLM that tilenorm's plugin uses, with their names and semantics.

Its layers compute as vLLM's own on a GPU: a fused add normalises the sum before it is rounded, and
forward_cuda calls self.forward_native, unless it is batch-invariant.
"""

import logging
from collections import Counter
from types import ModuleType, SimpleNamespace

import torch
from torch import nn

RAN = Counter()  # calls of vLLM's own code, by class and method


def normalized(x, weight, eps, residual=None):
    total = x.float() if residual is None else x.float() + residual.float()
    y = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps)
    y = (y if weight is None else y * weight.float()).to(x.dtype)
    return y if residual is None else (y, total.to(x.dtype))


def modules() -> dict[str, ModuleType]:
    """The modules by name, as sys.modules has them."""
    registry, batch_invariant = {}, SimpleNamespace(VLLM_BATCH_INVARIANT=False)

    class CustomOp(nn.Module):
        def __new__(cls, *args, **kwargs):
            return super().__new__(registry.get(cls.__name__, cls))

        def __init__(self):
            super().__init__()
            self._forward_method = self.forward_cuda

        def forward(self, *args):
            return self._forward_method(*args)

        @classmethod
        def register_oot(cls, name):
            def decorated(layer):
                assert name not in registry, f"Duplicate op name: {name}"
                layer.name = registry[name] = name
                registry[name] = layer
                return layer

            return decorated

    class RMSNorm(CustomOp):
        name = "rms_norm"

        def __init__(self, size, eps=1e-6, var_hidden_size=None, has_weight=True, dtype=None):
            super().__init__()
            self.variance_epsilon, self.has_weight = eps, has_weight
            self.variance_size_override = None if var_hidden_size == size else var_hidden_size
            weight = torch.ones(size, dtype=dtype)
            self.weight = nn.Parameter(weight) if has_weight else weight
            self.pass_weight = self.pass_weight_add = has_weight

        def forward_native(self, x, residual=None):
            RAN["RMSNorm", "native"] += 1
            weight = self.weight if self.pass_weight else None
            return normalized(x, weight, self.variance_epsilon, residual)

        def forward_cuda(self, x, residual=None):
            if batch_invariant.VLLM_BATCH_INVARIANT:
                RAN["RMSNorm", "batch-invariant"] += 1
                return normalized(x, self.weight, self.variance_epsilon, residual)
            return self.forward_native(x, residual)

    class GemmaRMSNorm(CustomOp):
        name = "gemma_rms_norm"

        def __init__(self, size, eps=1e-6):
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.zeros(size)), eps

        def forward_native(self, x, residual=None):
            RAN["GemmaRMSNorm", "native"] += 1
            return normalized(x, self.weight.float() + 1, self.variance_epsilon, residual)

        def forward_cuda(self, x, residual=None):
            return self.forward_native(x, residual)

    class LayerNorm(CustomOp):
        name = "layer_norm"

        def __init__(self, size, eps=1e-5, elementwise_affine=True, bias=True, dtype=None):
            super().__init__()
            self.normalized_shape, self.eps = (size,), eps
            self.weight = self.bias = None
            if elementwise_affine:
                self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
                self.bias = nn.Parameter(torch.zeros(size, dtype=dtype)) if bias else None

        def forward_native(self, x):
            RAN["LayerNorm", "native"] += 1
            return nn.functional.layer_norm(
                x.float(),
                self.normalized_shape,
                *(p if p is None else p.float() for p in (self.weight, self.bias)),
                self.eps,
            ).to(x.dtype)

        def forward_cuda(self, x):
            return self.forward_native(x)

    class RMSNormGated(CustomOp):
        name = "rms_norm_gated"

        def __init__(
            self, size, eps=1e-5, group_size=None, norm_before_gate=False, activation="swish"
        ):
            super().__init__()
            self.weight, self.eps, self.group_size = nn.Parameter(torch.ones(size)), eps, group_size
            self.norm_before_gate, self.activation = norm_before_gate, activation

        def forward_native(self, x, z=None):
            RAN["RMSNormGated", "native"] += 1
            return x

        def forward_cuda(self, x, z=None):
            RAN["RMSNormGated", "cuda"] += 1
            return x

    class BaseModelLoader:
        def load_model(self, vllm_config, model_config, prefix=""):
            return vllm_config.model

    class TensorizerLoader(BaseModelLoader):
        def load_model(self, vllm_config, model_config, prefix=""):
            return vllm_config.model

    contents = {
        "vllm": {},
        "vllm.envs": {"environment_variables": {}},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.model_executor": {},
        "vllm.model_executor.custom_op": {"CustomOp": CustomOp, "op_registry_oot": registry},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.layernorm": {
            cls.__name__: cls for cls in (RMSNorm, GemmaRMSNorm, LayerNorm, RMSNormGated)
        }
        | {"envs": batch_invariant},
        "vllm.model_executor.model_loader": {
            cls.__name__: cls for cls in (BaseModelLoader, TensorizerLoader)
        },
    }
    return linked(contents)


def linked(contents: dict[str, dict]) -> dict[str, ModuleType]:
    """Modules with these contents, each an attribute of the one that holds it."""
    built = {}
    for name, values in contents.items():
        module = built[name] = ModuleType(name)
        module.__path__ = []
        vars(module).update(values)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(built[parent], child, module)
    return built
