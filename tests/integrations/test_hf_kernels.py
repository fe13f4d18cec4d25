"""tilenorm's layer for Hugging Face's `kernels`."""

from random import Random
from types import MethodType

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from tests.support.calls import random
from tilenorm.integrations import hf_kernels

from .counted import counting

CLASSES = (LlamaRMSNorm, GptOssRMSNorm, Gemma3RMSNorm, Qwen3NextRMSNorm)


class Clipped(nn.Module):
    """A norm that cannot be made with a size alone, so that nothing tells what it computes."""

    def __init__(self, size, limit):
        super().__init__()
        self.weight, self.eps, self.limit = nn.Parameter(torch.ones(size)), 1e-6, limit

    def forward(self, x):
        y = nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return y.clamp(-self.limit, self.limit)


def kernelized(module: nn.Module) -> nn.Module:
    """A module as `kernels` changes it."""
    module.forward = MethodType(hf_kernels.rms_norm.load().forward, module)
    return module


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_each_class_keeps_its_rounding(cls, seed):
    rng = Random(f"{cls} {seed}")
    hidden, eps = rng.choice((64, 100, 256)), rng.choice((1e-5, 1e-6))
    dtype = rng.choice((torch.bfloat16, torch.float16))
    norm = cls(hidden, eps=eps).to(dtype)
    norm.weight.data = random(hidden, dtype=dtype, seed=seed)
    x = random(3, 5, hidden, dtype=dtype)
    expected = norm(x)
    kernelized(norm)(x)  # finds out what the class computes
    with counting() as counts:
        assert torch.equal(kernelized(norm)(x), expected)
    assert counts == {"rms_norm": 1}


def test_what_the_class_itself_computes():
    """A weight of another dtype, autocast, and what tilenorm does not recognise."""
    x = random(3, 64, dtype=torch.bfloat16)
    for norm in (LlamaRMSNorm(64), Clipped(64, 1.0).bfloat16()):
        expected = norm(x)
        kernelized(norm)(x)
        with counting() as counts:
            assert torch.equal(norm(x), expected)
        assert not counts
    norm = LlamaRMSNorm(64).bfloat16()
    kernelized(norm)(x)
    with torch.autocast("cpu", torch.bfloat16), counting() as counts:
        norm(x)
    assert not counts


def test_torch_compile_does_not_look_into_how_a_class_is_recognised(dynamo):
    norm = LlamaRMSNorm(64).bfloat16()
    x = random(3, 64, dtype=torch.bfloat16)
    expected = norm(x)
    compiled = torch.compile(kernelized(norm), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), expected)


def test_kernels_takes_the_object():
    """The library checks that a layer has no state, and no method but forward."""
    kernels = pytest.importorskip("kernels", reason="needs Hugging Face's kernels")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = kernels.use_kernel_forward_from_hub("RMSNorm")(
                type("Norm", (LlamaRMSNorm,), {})
            )(64)

        def forward(self, x):
            return self.norm(x)

    model, x = Model().bfloat16(), random(3, 64, dtype=torch.bfloat16).requires_grad_()
    expected = model(x)
    cpu = kernels.Device(type="cpu")
    mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
    with kernels.use_kernel_mapping({"RMSNorm": {cpu: hf_kernels.rms_norm}}):
        model = kernels.kernelize(model, mode=mode, device="cpu")
    assert torch.equal(model(x), expected)
    with counting() as counts:
        model(x).sum().backward()
    assert counts == {"rms_norm": 1, "rms_norm backward": 1}
