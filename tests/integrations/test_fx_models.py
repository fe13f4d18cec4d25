"""The FX pass on RMSNorm as models write it, with every tracer: one op, and the same bits."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from tilenorm.integrations.fx import replace_norms

from ..ops.helpers import EACH_DEVICE, EPS, LAYER, RMS, assert_step, expected_of, name_of, random
from .graphs import NORM, TRACERS, by_dynamo, calls

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
N = 64


class FormulaNorm(nn.Module):
    """A module whose forward is formula(x, weight)."""

    def __init__(self, formula):
        super().__init__()
        self.formula, self.weight = formula, nn.Parameter(torch.ones(N))

    def forward(self, x):
        return self.formula(x, self.weight)


def root_mean_square(x):
    return torch.sqrt(torch.mean(x * x, dim=-1, keepdim=True) + EPS)


def with_bias(x, w):
    return F.layer_norm(x, (N,), weight=w, bias=w, eps=EPS)


FORMULAS = {
    "F.rms_norm": lambda x, w: F.rms_norm(x, (N,), w, EPS),
    "torch.rms_norm": lambda x, w: torch.rms_norm(x, (N,), weight=w, eps=EPS),
    "no eps": lambda x, w: F.rms_norm(x, (N,), w),
    "divided": lambda x, w: (x.float() / root_mean_square(x.float())).type_as(x) * w,
    "square": lambda x, w: (
        w * (x.float() * x.float().square().mean((-1,), True).add(EPS).rsqrt()).to(x.dtype)
    ),
    "power": lambda x, w: (
        (x.float() * (x.float().pow(2).mean(-1, True) + EPS).pow(-0.5)).to(x.dtype) * w
    ),
}
CLASSES = {
    "Llama": ("llama", "LlamaRMSNorm"),
    "Gemma 2": ("gemma2", "Gemma2RMSNorm"),
    "Gemma 3": ("gemma3", "Gemma3RMSNorm"),
    "Qwen3": ("qwen3", "Qwen3RMSNorm"),
    "OLMo 2": ("olmo2", "Olmo2RMSNorm"),
    "T5": ("t5", "T5LayerNorm"),
}
OFFSET = {"Gemma 2": 1.0, "Gemma 3": 1.0}
ROUNDING = dict.fromkeys(("Llama", "Qwen3", "T5"), "early")


def model(name: str, dtype, device) -> nn.Module:
    if name in FORMULAS:
        module = FormulaNorm(FORMULAS[name])
    else:
        folder, kind = CLASSES[name]
        pytest.importorskip("transformers")
        modeling = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
        module = getattr(modeling, kind)(N, eps=EPS)
    module = module.to(device, dtype)
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
def test_transformers_classes(device, tracer, dtype, name, dynamo):
    module = model(name, dtype, device)
    x = random(2, 3, N, dtype=dtype, device=device)
    replaced = TRACERS[tracer](module, x)
    (node,) = calls(replaced.graph_module)
    assert not replaced.report.left
    offset, rounding = node.args[7], node.args[9]
    assert offset == OFFSET.get(name, 0.0)
    assert rounding == (ROUNDING.get(name, "late") if dtype == BF16 else "late")
    assert_bits(device, replaced.run(x), module(x))


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("name", FORMULAS)
def test_formulas(tracer, name, dynamo):
    module = model(name, BF16, "cpu")
    x = random(2, 3, N, dtype=BF16)
    replaced = TRACERS[tracer](module, x)
    assert len(calls(replaced.graph_module)) == 1
    assert not replaced.report.left
    assert replaced.run(x).dtype == BF16
    torch.testing.assert_close(replaced.run(x), module(x), rtol=2**-7, atol=0)


@EACH_DEVICE
@pytest.mark.parametrize("name", ["Llama", "Gemma 3", "OLMo 2", "T5", "F.rms_norm"])
@pytest.mark.parametrize("tracer", ["dynamo", "export"])
def test_backward_pass_uses_tilenorms_gradients(device, name, tracer, dynamo, gradients_made):
    module = model(name, BF16, device)
    x = random(2, 3, N, dtype=BF16, device=device).requires_grad_()
    replaced = TRACERS[tracer](module, x)
    dy = random(2, 3, N, dtype=BF16, device=device, seed=2)
    y = replaced.run(x)
    dx, dw = torch.autograd.grad(y, (x, module.weight), dy)
    assert gradients_made == [{"input", "weight"}]
    tensors = {"input": x, "weight": module.weight}
    expected = expected_of(RMS, tensors, [dy], offset=OFFSET.get(name, 0.0))
    assert_step({"output": y, "input": dx, "weight": dw}, expected, tensors)


@EACH_DEVICE
@pytest.mark.parametrize("tracer", TRACERS)
def test_layer_norm(device, tracer, dynamo):
    module = FormulaNorm(with_bias).to(device)
    x = random(5, N, device=device)
    replaced = TRACERS[tracer](module, x)
    assert len(calls(replaced.graph_module)) == 1
    tensors = {"input": x, "weight": module.weight, "bias": module.weight}
    output = {"output": expected_of(LAYER, tensors, [x])["output"]}
    assert_step({"output": replaced.run(x)}, output)


FACTORS = {"weight": lambda w: w, "1 + weight": lambda w: 1 + w, "float": lambda w: 1.0 + w.float()}
CASTS = {
    "before": lambda x_hat, w, x: w * x_hat.to(x.dtype),
    "before, after": lambda x_hat, w, x: (x_hat.to(x.dtype) * w).to(x.dtype),
    "before, float, after": lambda x_hat, w, x: (x_hat.to(x.dtype).float() * w).type_as(x),
    "after": lambda x_hat, w, x: (x_hat * w).to(x.dtype),
    "to the weight's": lambda x_hat, w, x: w * x_hat.to(w.dtype),
    "never": lambda x_hat, w, x: x_hat * w,
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=name_of)
@pytest.mark.parametrize("parameter", [BF16, F16, F32], ids=name_of)
def test_bits_are_kept_wherever_the_model_casts(cast, factor, dtype, parameter):
    """The pass may replace the whole norm, a part of it, or nothing; the results stay equal."""

    def function(x, w):
        wide = x.float()
        x_hat = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        return CASTS[cast](x_hat, FACTORS[factor](w), x)

    x, w = random(3, N, dtype=dtype), random(N, dtype=parameter, seed=1)
    graph_module = make_fx(function)(x, w)
    report = replace_norms(graph_module)
    assert len(report.replaced) + len(report.left) == 1
    torch.testing.assert_close(graph_module(x, w), function(x, w), rtol=0, atol=0)


def test_float32_weight_with_16_bit_input_is_not_part_of_the_op(dynamo):
    """Llama's output is float32 here. The op without the weight returns the input's dtype."""
    module = model("Llama", F32, "cpu")
    x = random(2, 3, N, dtype=BF16)
    replaced = TRACERS["dynamo"](module, x)
    (node,) = calls(replaced.graph_module)
    assert node.args[3] is None
    got = replaced.run(x)
    assert got.dtype == F32
    assert torch.equal(got, module(x))


def test_cast_after_the_product_with_a_float32_weight_is_part_of_the_op(dynamo):
    """The model rounds before the product with the float32 weight, and again after it."""
    formula = FORMULAS["divided"]
    module = FormulaNorm(lambda x, w: formula(x, w).to(x.dtype))
    x = random(2, 3, N, dtype=BF16)
    replaced = TRACERS["dynamo"](module, x)
    (node,) = calls(replaced.graph_module)
    assert node.args[3] is not None
    assert node.args[9] == "early"
    torch.testing.assert_close(replaced.run(x), module(x), rtol=2**-7, atol=0)


def test_one_plus_a_16_bit_weight_is_still_rounded(dynamo):
    """1 + weight in 16 bits is not the op's offset, because the op adds in float32."""
    module = FormulaNorm(lambda x, w: FORMULAS["F.rms_norm"](x, 1 + w)).to(BF16)
    with torch.no_grad():
        module.weight.copy_(random(N, seed=1) / 64)
    x = random(2, 3, N, dtype=BF16)
    replaced = TRACERS["dynamo"](module, x)
    (node,) = calls(replaced.graph_module)
    assert node.args[7] == 0.0
    assert torch.equal(replaced.run(x), module(x))


def test_weights_per_head(dynamo):
    """A weight of shape (heads, N), and Qwen3's weight of shape (N,) for all heads."""
    for shape in ((4, N), (N,)):
        weight = random(*shape, dtype=BF16, seed=1)

        def function(x, weight=weight):
            x_hat = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
            return weight * x_hat.to(x.dtype)

        x = random(2, 3, 6, N, dtype=BF16)[:, :, 1:5]
        replaced = TRACERS["dynamo"](function, x)
        assert NORM in [node.target for node in replaced.graph_module.graph.nodes]
        assert torch.equal(replaced.run(x), function(x))


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
    leaves = [x.detach().requires_grad_() for _ in range(2)]
    dy = random(2, 4, 5, N, dtype=BF16, device=device, seed=2)
    run = by_dynamo(module, leaves[0]).run
    grads = [
        torch.autograd.grad(f(x), x, dy)[0] for f, x in zip((run, module), leaves, strict=True)
    ]
    torch.testing.assert_close(*grads, rtol=2**-6, atol=2**-5)
