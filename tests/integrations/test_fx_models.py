"""The FX pass on RMSNorm as models write it: one op, with the bits and strides of the model."""

import importlib

import pytest
import torch
from torch import nn

from ..ops.helpers import EACH_DEVICE, EPS, RMS, assert_step, expected_of, name_of, random
from .graphs import TRACERS, HuggingFaceNorm, argument, calls

BF16, F32 = torch.bfloat16, torch.float32
N = 64
CLASSES = {
    "Llama": ("llama", "LlamaRMSNorm"),
    "Gemma 3": ("gemma3", "Gemma3RMSNorm"),
    "OLMo 2": ("olmo2", "Olmo2RMSNorm"),
    "T5": ("t5", "T5LayerNorm"),
}
OFFSET, ROUNDING = {"Gemma 3": 1.0}, dict.fromkeys(("Llama", "T5", "by heads"), "early")
# Gemma 3 normalises transposed views of queries and keys.
LAYOUTS = [(name, False) for name in (*CLASSES, "by heads")]
LAYOUTS += [(name, True) for name in ("Gemma 3", "Llama")]


def model(name: str, dtype, device) -> nn.Module:
    if name == "by heads":
        return HuggingFaceNorm((4, N), EPS).to(device, dtype)
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
@pytest.mark.parametrize("name, transposed", LAYOUTS)
def test_classes(device, tracer, dtype, name, transposed, dynamo, gradients_made):
    module = model(name, dtype, device)
    shape = (2, 4, 5, N) if transposed else (2, 5, 4, N)
    x = random(*shape, dtype=dtype, device=device)
    x = (x.transpose(1, 2) if transposed else x).requires_grad_()
    replaced = TRACERS[tracer](module, x)
    (node,) = calls(replaced.graph_module)
    assert not replaced.report.left
    offset = OFFSET.get(name, 0.0)
    assert argument(node, "offset") == offset
    rounding = ROUNDING.get(name, "late") if dtype == BF16 else "late"
    assert argument(node, "rounding") == rounding
    y, dy = replaced.run(x), random(2, 5, 4, N, dtype=dtype, device=device, seed=2)
    expected = module(x)
    assert y.stride() == expected.stride()
    assert_bits(device, y, expected)
    tensors = {"input": x, "weight": module.weight}
    grads = torch.autograd.grad(y, list(tensors.values()), dy)
    assert gradients_made == [{"input", "weight"}]
    got = {"output": y, **dict(zip(tensors, grads, strict=True))}
    assert_step(got, expected_of(RMS, tensors, [dy], offset=offset), tensors)
