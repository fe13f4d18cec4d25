"""QuantizedNormLinear: close to the norm and the linear, in both directions, and it keeps no y."""

import copy
from contextlib import nullcontext
from random import Random

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from tilenorm.nn import QuantizedNormLinear
from tilenorm.ops.quantized import product

from .helpers import random, through_pickle, through_save
from .pretended import pretended_gpu

SERVED = pytest.mark.parametrize("served", ["reference", "sm_90", "sm_100"])
NORMS = pytest.mark.parametrize("norm", ["rms", "layer"])
B, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SQNR = 28.0  # dB
COSINE = 0.999

pytestmark = pytest.mark.filterwarnings("ignore::tilenorm.ReferenceWarning")


def by(served: str):
    """A block in which the reference serves, or the interpreter for an architecture."""
    return nullcontext() if served == "reference" else pretended_gpu(served)


def made(*args, dtype=B, **options) -> QuantizedNormLinear:
    """A module with parameters that are not all ones and zeros."""
    module = QuantizedNormLinear(*args, dtype=dtype, **options)
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(module.named_parameters()):
            drawn = random(*parameter.shape, seed=seed)
            parameter.copy_(1 + drawn / 4 if name == "norm.weight" else drawn / 4)
    return module


def plain(module: QuantizedNormLinear, x: Tensor) -> Tensor:
    """The same norm and linear, without 8-bit floats."""
    return module.linear(module.norm(x).to(module.linear.weight.dtype)).to(x.dtype)


def results(function, module: nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
    """The output, and the gradients of x and of every parameter."""
    y = function(x)
    return [y, *torch.autograd.grad(y, [x, *module.parameters()], g.to(y.dtype))]


def sqnr(found: Tensor, expected: Tensor) -> float:
    found, expected = found.double(), expected.double()
    return (10 * (expected.square().sum() / (found - expected).square().sum()).log10()).item()


def cosine(found: Tensor, expected: Tensor) -> float:
    return F.cosine_similarity(found.double().flatten(), expected.double().flatten(), 0).item()


def check_close(found: list[Tensor], expected: list[Tensor]) -> None:
    assert sqnr(found[0], expected[0]) >= SQNR
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        assert cosine(mine, theirs) >= COSINE


@SERVED
@NORMS
def test_drawn_calls(norm, served):
    rng = Random(f"{norm} {served}")
    for scaling, dtype in (("row", B), ("block", F16), ("row", F32), ("block", B)):
        size, out = 128 * rng.choice((1, 2)), 16 * rng.choice((1, 3, 5))
        shape = rng.choice(((2, 65), (130,), (128,), (1, 37)))
        options = {"bias": rng.random() < 0.5, "offset": rng.choice((0.0, 1.0))}
        options["elementwise_affine"] = affine = rng.random() < 0.7
        options |= {"rounding": rng.choice(("late", "early")), "scaling": scaling}
        module = made(size, out, norm, dtype=rng.choice((dtype, F32)), **options)
        x = random(*shape, size + rng.choice((0, 8, 1)), dtype=dtype, seed=20)
        x, g = x[..., :size].requires_grad_(), random(*shape, out, dtype=dtype, seed=21)
        with by(served):
            found = results(module, module, x, g)
        assert len(found) == 3 + affine * (1 + (norm == "layer")) + options["bias"]
        check_close(found, results(lambda x, m=module: plain(m, x), module, x, g))


@pytest.mark.parametrize(
    "norm, scaling",
    [
        ("rms", "row"),
        ("layer", "block"),
        pytest.param("rms", "block", marks=pytest.mark.slow),
        pytest.param("layer", "row", marks=pytest.mark.slow),
    ],
)
def test_larger_matrices(norm, scaling):
    module = made(1024, 512, norm, bias=True, scaling=scaling)
    x = (random(500, 1024, dtype=B, seed=20) * 3).requires_grad_()
    g = random(500, 512, dtype=B, seed=21)
    check_close(results(module, module, x, g), results(lambda x: plain(module, x), module, x, g))


@NORMS
def test_the_weight_gradient_where_no_product_takes_blocks(norm, monkeypatch):
    monkeypatch.setattr(product, "refused", lambda blocks, device: "no blocks" * blocks or None)
    module, x = made(64, 32, norm), random(40, 64, dtype=B, seed=20).requires_grad_()
    g = random(40, 32, dtype=B, seed=21)
    found = results(module, module, x, g)
    expected = results(lambda x: plain(module, x), module, x, g)
    assert torch.equal(found[-1], expected[-1])


@SERVED
def test_no_rows(served):
    module, x = made(32, 16, bias=True), torch.empty(2, 0, 32, dtype=B, requires_grad=True)
    with by(served):
        y, *grads = results(module, module, x, torch.empty(2, 0, 16))
    assert y.shape == (2, 0, 16) and grads[0].shape == x.shape
    assert not any(g.count_nonzero() for g in grads)


@SERVED
def test_what_is_asked_for_alone(served):
    module, x = made(32, 16, "layer", bias=True), random(9, 32, dtype=B)
    with by(served):
        y = module(x.requires_grad_())
        every = torch.autograd.grad(y.sum(), [x, *module.parameters()], retain_graph=True)
        for i, t in enumerate([x, *module.parameters()]):
            assert torch.equal(torch.autograd.grad(y.sum(), t, retain_graph=True)[0], every[i])
        module.requires_grad_(False)
        assert torch.equal(torch.autograd.grad(module(x).sum(), x)[0], every[0])
        x.requires_grad_(False)
        assert torch.equal(module(x), y) and not module(x).requires_grad


@SERVED
@NORMS
def test_nothing_of_the_size_of_y_is_kept(norm, served):
    """Of the rows the module keeps x itself, and a number or two of each."""
    module, x = made(128, 16, norm), random(256, 128, dtype=B).requires_grad_()
    kept = []
    with by(served), saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        module(x)
    rows = [t for t in kept if t.shape[:1] == (256,)]
    assert sorted(t.numel() for t in rows) == [256] * (1 + (norm == "layer")) + [x.numel()]
    assert {t.data_ptr() for t in rows if t.numel() > 256} == {x.data_ptr()}
    assert sum(t.numel() for t in kept) == sum(t.numel() for t in [*rows, *module.parameters()])


def test_compiled_without_a_break_for_any_number_of_rows(dynamo):
    module = made(128, 32, "layer", bias=True, scaling="block")
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (5, 130):
        x, g = random(2, rows, 128, dtype=B).requires_grad_(), random(2, rows, 32, dtype=B)
        found = results(compiled, module, x, g)
        assert all(map(torch.equal, found, results(module, module, x, g)))
        with torch.no_grad():
            assert torch.equal(compiled(x), found[0])


def test_the_output_may_be_changed_in_place():
    module, x = made(32, 16), random(3, 5, 32, dtype=B).requires_grad_()
    (expected,) = torch.autograd.grad(module(x).mul(2).sum(), x)
    assert torch.equal(torch.autograd.grad(module(x).mul_(2).sum(), x)[0], expected)
    assert not module(x).detach_().requires_grad


def test_autocast():
    """The output has autocast's dtype, and the same numbers: no operand is cast before."""
    module, x = made(32, 16, dtype=F32), random(9, 32).requires_grad_()
    with torch.autocast("cpu", B):
        y, *grads = results(module, module, x, random(9, 16))
    assert y.dtype == B and torch.equal(y, module(x).to(B))
    assert {g.dtype for g in grads} == {F32}


def test_second_derivatives_are_refused():
    module, x = made(32, 16), random(3, 32, dtype=B).requires_grad_()
    with pytest.raises(RuntimeError, match="it takes no create_graph"):
        torch.autograd.grad(module(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="transforms"):
        torch.func.vmap(module)(x.detach())


MADE = [
    ({"scaling": "mx"}, ValueError, "'scaling' takes 'row' or 'block', got 'mx'"),
    ({"norm": "batch"}, ValueError, "'norm' takes 'rms' or 'layer', got 'batch'"),
    ({"in_features": 40}, ValueError, "'in_features' takes a multiple of 16 .*, got 40"),
    ({"scaling": "block"}, ValueError, "'in_features' takes a multiple of 128 .*, got 64"),
    ({"out_features": 0}, ValueError, "'out_features' takes a multiple of 16 .*, got 0"),
    ({"offset": "1"}, TypeError, "'offset' takes a float, got str"),
    ({"dtype": torch.int8}, RuntimeError, "'dtype' takes a floating-point dtype"),
]


@pytest.mark.parametrize("given, error, message", MADE)
def test_what_it_is_not_made_with(given, error, message):
    with pytest.raises(error, match=message):
        QuantizedNormLinear(**({"in_features": 64, "out_features": 32} | given))


def test_what_it_does_not_take():
    module = made(64, 32)
    with pytest.raises(RuntimeError, match=r"'input' takes a shape that ends in .*64.*got .*3, 32"):
        module(random(3, 32, dtype=B))
    with pytest.raises(NotImplementedError, match=r"'input' takes float16, .*got torch.float64"):
        module(random(3, 64, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"QuantizedNormLinear\(norm='rms'\): .* a Tensor, got int"):
        module(3)
    module.linear.double()
    with pytest.raises(NotImplementedError, match=r"'linear.weight' takes .* got torch.float64"):
        module(random(3, 64, dtype=B))


def test_state_dicts_and_copies():
    module, x = made(32, 16, "layer", bias=True), random(3, 32, dtype=B)
    names = ["norm.weight", "norm.bias", "linear.weight", "linear.bias"]
    assert list(module.state_dict()) == names
    parts = nn.ModuleDict({"norm": nn.LayerNorm(32, dtype=B), "linear": nn.Linear(32, 16, dtype=B)})
    parts.load_state_dict(module.state_dict())
    other = QuantizedNormLinear(32, 16, "layer", bias=True, dtype=B)
    other.load_state_dict(parts.state_dict())
    for copied in (other, copy.deepcopy(module), through_pickle(module), through_save(module)):
        assert torch.equal(copied(x), module(x))
    assert "scaling='row'" in repr(module)
