"""RMSNorm as models spell it, traced in each way: one op, with the bits that the model had."""

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


class Spelled(nn.Module):
    """A norm by a formula of x and the weight."""

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
        module = Spelled(FORMULAS[name])
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
    """Of the CPU; on a GPU sums have another order, which may tip a rounding or two."""
    if device == "cpu":
        assert torch.equal(got, expected)
    else:
        eps = torch.finfo(got.dtype).eps
        torch.testing.assert_close(got, expected, rtol=max(2 * eps, 6e-7), atol=6e-7)


@EACH_DEVICE
@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=name_of)
@pytest.mark.parametrize("name", CLASSES)
def test_classes_of_transformers(device, tracer, dtype, name, dynamo):
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
def test_gradients_are_tilenorms(device, name, tracer, dynamo, gradients_made):
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
    module = Spelled(with_bias).to(device)
    x = random(5, N, device=device)
    replaced = TRACERS[tracer](module, x)
    assert len(calls(replaced.graph_module)) == 1
    tensors = {"input": x, "weight": module.weight, "bias": module.weight}
    output = {"output": expected_of(LAYER, tensors, [x])["output"]}
    assert_step({"output": replaced.run(x)}, output)


UNITS = {"weight": lambda w: w, "1 + weight": lambda w: 1 + w, "float": lambda w: 1.0 + w.float()}
ROUNDED = {
    "before": lambda x_hat, w, x: w * x_hat.to(x.dtype),
    "before, after": lambda x_hat, w, x: (x_hat.to(x.dtype) * w).to(x.dtype),
    "before, float, after": lambda x_hat, w, x: (x_hat.to(x.dtype).float() * w).type_as(x),
    "after": lambda x_hat, w, x: (x_hat * w).to(x.dtype),
    "to the weight's": lambda x_hat, w, x: w * x_hat.to(w.dtype),
    "never": lambda x_hat, w, x: x_hat * w,
}


@pytest.mark.parametrize("rounded", ROUNDED)
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=name_of)
@pytest.mark.parametrize("parameter", [BF16, F16, F32], ids=name_of)
def test_every_way_to_round(rounded, units, dtype, parameter):
    """Whether one op, a part of it or none of it, the bits and the dtype are those it had."""

    def function(x, w):
        wide = x.float()
        x_hat = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        return ROUNDED[rounded](x_hat, UNITS[units](w), x)

    x, w = random(3, N, dtype=dtype), random(N, dtype=parameter, seed=1)
    graph_module = make_fx(function)(x, w)
    report = replace_norms(graph_module)
    assert len(report.replaced) + len(report.left) == 1
    torch.testing.assert_close(graph_module(x, w), function(x, w), rtol=0, atol=0)


def test_a_float32_weight_stays_outside(dynamo):
    """Llama's output is float32 then; the norm without its weight has the input's dtype."""
    module = model("Llama", F32, "cpu")
    x = random(2, 3, N, dtype=BF16)
    replaced = TRACERS["dynamo"](module, x)
    (node,) = calls(replaced.graph_module)
    assert node.args[3] is None
    got = replaced.run(x)
    assert got.dtype == F32
    assert torch.equal(got, module(x))


def test_inside_a_cast_of_the_product(dynamo):
    """A float32 weight times what was rounded before it, rounded again."""
    formula = FORMULAS["divided"]
    module = Spelled(lambda x, w: formula(x, w).to(x.dtype))
    x = random(2, 3, N, dtype=BF16)
    replaced = TRACERS["dynamo"](module, x)
    (node,) = calls(replaced.graph_module)
    assert node.args[3] is not None
    assert node.args[9] == "early"
    torch.testing.assert_close(replaced.run(x), module(x), rtol=2**-7, atol=0)


def test_one_plus_a_weight_in_16_bits_is_rounded_as_it_was(dynamo):
    module = Spelled(lambda x, w: FORMULAS["F.rms_norm"](x, 1 + w)).to(BF16)
    with torch.no_grad():
        module.weight.copy_(random(N, seed=1) / 64)
    x = random(2, 3, N, dtype=BF16)
    replaced = TRACERS["dynamo"](module, x)
    (node,) = calls(replaced.graph_module)
    assert node.args[7] == 0.0
    assert torch.equal(replaced.run(x), module(x))


def test_by_heads(dynamo):
    """Weights of (heads, N), and Qwen3's, one for all heads."""
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
    """Gemma 3's: the rows are read where they are, and the output is laid out as it was."""
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
