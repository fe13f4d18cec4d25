"""The FX pass on RMSNorm as models write it, with every tracer: one op, and the same bits."""

import importlib

import pytest
import torch
from torch import nn

from ..ops.helpers import EACH_DEVICE, EPS, RMS, assert_step, expected_of, name_of, random
from .graphs import TRACERS, HuggingFaceNorm, argument, by_dynamo, calls

BF16, F32 = torch.bfloat16, torch.float32
N = 64
CLASSES = {
    "Llama": ("llama", "LlamaRMSNorm"),
    "Gemma 3": ("gemma3", "Gemma3RMSNorm"),
    "OLMo 2": ("olmo2", "Olmo2RMSNorm"),
    "T5": ("t5", "T5LayerNorm"),
}
OFFSET, ROUNDING = {"Gemma 3": 1.0}, dict.fromkeys(("Llama", "T5"), "early")


def model(name: str, dtype, device) -> nn.Module:
    pytest.importorskip("transformers")
    folder, kind = CLASSES[name]
    modeling = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    module = getattr(modeling, kind)(N, eps=EPS).to(device, dtype)
    with torch.no_grad():
        module.weight.copy_(random(N, seed=1))
    return module


def assert_bits(device, got, expected):
    """Equal bits on the CPU. A GPU adds up in another order, so a few roundings may differ."""
    if device == "cpu":
        assert torch.equal(got, expected)
    else:
        eps = torch.finfo(got.dtype).eps
        torch.testing.assert_close(got, expected, rtol=max(2 * eps, 6e-7), atol=6e-7)


@EACH_DEVICE
@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=name_of)
@pytest.mark.parametrize("name", CLASSES)
def test_transformers_classes(device, tracer, dtype, name, dynamo, gradients_made):
    module = model(name, dtype, device)
    x = random(2, 3, N, dtype=dtype, device=device).requires_grad_()
    replaced = TRACERS[tracer](module, x)
    (node,) = calls(replaced.graph_module)
    assert not replaced.report.left
    offset = OFFSET.get(name, 0.0)
    assert argument(node, "offset") == offset
    rounding = ROUNDING.get(name, "late") if dtype == BF16 else "late"
    assert argument(node, "rounding") == rounding
    y, dy = replaced.run(x), random(2, 3, N, dtype=dtype, device=device, seed=2)
    assert_bits(device, y, module(x))
    tensors = {"input": x, "weight": module.weight}
    grads = torch.autograd.grad(y, list(tensors.values()), dy)
    assert gradients_made == [{"input", "weight"}]
    got = {"output": y, **dict(zip(tensors, grads, strict=True))}
    assert_step(got, expected_of(RMS, tensors, [dy], offset=offset), tensors)


@pytest.mark.parametrize("shape", [(4, N), (N,)])
def test_weights_per_head(shape, dynamo):
    """A weight of shape (heads, N), and Qwen3's weight of shape (N,) for all heads."""
    module = HuggingFaceNorm(shape, EPS).to(BF16)
    x = random(2, 3, 6, N, dtype=BF16)[:, :, 1:5]
    replaced = by_dynamo(module, x)
    assert len(calls(replaced.graph_module)) == 1
    assert torch.equal(replaced.run(x), module(x))


@EACH_DEVICE
@pytest.mark.parametrize("name", ["Gemma 3", "Llama"])
def test_transposed_queries_and_keys(device, name, dynamo):
    """Gemma 3 normalises transposed views. The output keeps the strides of the model's output."""
    module = model(name, BF16, device)
    x = random(2, 5, 4, N, dtype=BF16, device=device).transpose(1, 2)
    for tracer in TRACERS.values():
        replaced = tracer(module, x)
        assert len(calls(replaced.graph_module)) == 1
        got, expected = replaced.run(x), module(x)
        assert got.stride() == expected.stride()
        assert_bits(device, got, expected)
