"""The hand-written linear in 8-bit floats, and the modules that take the place of a NormLinear."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench import rows
from bench.models import NormLinear, Transformer
from bench.shapes import LLAMA, MODELS, Shape, tiny
from bench.variants import VARIANTS, prepared, put_in_place, twin

pytestmark = pytest.mark.filterwarnings("ignore::tilenorm.ReferenceWarning")
LINEARS = {name: variant.linear for name, variant in VARIANTS.items() if variant.linear}
SHAPE = Shape(layers=1, hidden=256, heads=4, kv_heads=2, ffn=512, vocab=64, fused=True)
SQNR = 28.0  # dB
COSINE = 0.999


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def results(module, x: Tensor, g: Tensor) -> list[Tensor]:
    """The output, and the gradients of x and of every parameter, in float32."""
    x = x.detach().requires_grad_()
    y = module(x)
    grads = torch.autograd.grad(y, [x, *module.parameters()], g.to(y.dtype))
    return [tensor.detach().float() for tensor in (y, *grads)]


@pytest.mark.parametrize("name", LINEARS)
def test_output_and_gradients_are_close_to_those_in_float32(name):
    whole = NormLinear(SHAPE, 384)
    with torch.no_grad():
        whole.norm.weight.copy_(1 + drawn(256, seed=0) / 4)
        whole.linear.weight.copy_(drawn(384, 256, seed=1) / 16)
        for parameter in whole.parameters():
            parameter.copy_(parameter.bfloat16())  # the two modules have equal parameters
    low = NormLinear(SHAPE, 384, dtype=torch.bfloat16)
    low.load_state_dict(whole.state_dict())
    x, g = drawn(2, 64, 256, seed=2).bfloat16(), drawn(2, 64, 384, seed=3).bfloat16()
    found = results(LINEARS[name](low), x, g)
    expected = results(whole, x.float(), g.float())
    error = (found[0] - expected[0]).square().sum()
    assert 10 * (expected[0].square().sum() / error).log10() >= SQNR
    assert error > 0  # the product is one of 8-bit floats
    for mine, theirs in zip(found, expected, strict=True):
        assert F.cosine_similarity(mine.flatten(), theirs.flatten(), 0) >= COSINE


def test_factors_of_a_product_have_the_layouts_that_a_gpu_takes(monkeypatch):
    """Tensors without values have the layouts that those of a GPU have."""
    given = []
    monkeypatch.setattr(
        torch, "_scaled_mm", lambda *a, f=torch._scaled_mm, **o: given.append(a) or f(*a, **o)
    )
    like = {"device": "meta", "dtype": torch.bfloat16}
    y, weight, g = (torch.empty(*size, **like) for size in ((48, 32), (64, 32), (48, 64)))
    assert rows.product(y, weight).shape == (48, 64)
    assert rows.product(g.t(), y.t()).shape == (64, 32)
    assert len(given) == 2
    for a, b, scale_a, scale_b in given:
        assert a.stride() == (a.shape[1], 1) and b.stride() == (1, b.shape[0])
        assert (scale_a.shape, scale_b.shape) == ((a.shape[0], 1), (1, b.shape[1]))


def test_rows_of_zeros_are_products_of_zero():
    zeros, ones = torch.zeros(16, 32).bfloat16(), torch.ones(16, 32).bfloat16()
    assert torch.equal(rows.product(zeros, ones), torch.zeros(16, 16).bfloat16())


@pytest.mark.parametrize("name", LINEARS)
def test_the_module_in_its_place_has_the_same_parameters(name):
    shape = Shape(**vars(tiny(MODELS[LLAMA]).shape) | {"fused": True})
    model = Transformer(shape, 8, False, device="cpu", dtype=torch.bfloat16)
    other = twin(model)
    put_in_place(other, LINEARS[name])
    assert not any(isinstance(module, NormLinear) for module in other.modules())
    assert sum(isinstance(module, NormLinear) for module in model.modules()) == 2 * shape.layers
    assert other.blocks[0].ffn.gate_up.norm.eps == shape.eps
    ours, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    assert list(ours) == list(theirs)
    for key, parameter in ours.items():
        assert theirs[key] is parameter, key


def test_the_place_is_taken_before_the_layers_are_compiled(monkeypatch):
    seen = []

    def compiled(part):
        seen.append(any(isinstance(module, rows.RowsNormLinear) for module in part.modules()))
        return part

    monkeypatch.setattr(torch, "compile", compiled)
    shape = Shape(**vars(tiny(MODELS[LLAMA]).shape) | {"fused": True})
    model = Transformer(shape, 8, False, device="cpu", dtype=torch.bfloat16)
    prepared(model, VARIANTS["rows-compile"], whole=False)
    assert seen == [True] * shape.layers + [False]
