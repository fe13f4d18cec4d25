"""patch on LayerNorm over the channels of images, (B, C, H, W), as vision models write it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.sam.modeling_sam import SamLayerNorm

import tilenorm
from tests.support.calls import random
from tilenorm.ops import functional

from .graphs import trained

N = 24


class Permuting(nn.LayerNorm):
    """timm's LayerNorm2d."""

    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class WrittenOut(nn.Module):
    """segment-anything's LayerNorm2d, in the neck of its image encoder."""

    def __init__(self, channels, eps=1e-6):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.ones(channels)),
            nn.Parameter(torch.zeros(channels)),
        )
        self.eps = eps

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


WrittenOut.__name__ = "LayerNorm2d"
NORMS = {
    "timm": lambda n=N: Permuting(n, eps=1e-6),
    "timm without parameters": lambda n=N: Permuting(n, elementwise_affine=False),
    "Hugging Face": lambda n=N: SamLayerNorm(n, data_format="channels_first"),
    "segment-anything": lambda n=N: WrittenOut(n),
}
IN_16_BITS = [name for name in NORMS if name != "segment-anything"]


def images(layout, *shape, dtype=torch.float32):
    x = random(*shape, dtype=dtype)
    if layout == "channels last":
        return x.contiguous(memory_format=torch.channels_last)
    return x.transpose(2, 3) if layout == "transposed" else x


@pytest.fixture
def rows(monkeypatch):
    """The inputs that tilenorm's function was called with."""
    inputs, original = [], functional.layer_norm

    def layer_norm(x, *args, **kwargs):
        inputs.append(x)
        return original(x, *args, **kwargs)

    monkeypatch.setattr(functional, "layer_norm", layer_norm)
    return inputs


@pytest.mark.parametrize(
    "layout, channels", [("channels last", N), ("contiguous", N), ("transposed", 1536)]
)
@pytest.mark.parametrize("name", NORMS)
def test_images_have_their_numbers_and_strides(name, layout, channels, rows):
    module = NORMS[name](channels)
    for seed, parameter in enumerate(module.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(seed))
    x = images(layout, 2, channels, 3, 5)
    expected = trained(module, x)
    report = tilenorm.patch(module)
    assert not report.left and "over the channels" in report.patched[0].how
    rows.clear()
    got = trained(module, x)
    assert len(rows) == 1
    if layout == "channels last":  # read in place
        assert rows[0].is_contiguous() and rows[0].shape == (2, 3, 5, channels)
    if layout != "transposed":
        assert got[0].stride() == expected[0].stride()
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)
    report.undo()
    assert all(map(torch.equal, trained(module, x), expected))


@pytest.mark.parametrize("name", NORMS)
def test_16_bits(name, rows):
    """A norm that rounds after each operation runs by itself in 16 bits, and the report says so."""
    dtype = torch.float16 if name == "timm" else torch.bfloat16
    module = NORMS[name]().to(dtype)
    x = images("channels last", 2, N, 3, 5, dtype=dtype)
    expected = module(x)
    (entry,) = tilenorm.patch(module).patched
    rows.clear()
    assert torch.equal(module(x), expected)
    assert len(rows) == (name in IN_16_BITS)
    assert ("or its own forward for 16 bits" in entry.how) == (name not in IN_16_BITS)


@pytest.mark.parametrize("name", NORMS)
def test_what_a_module_refuses_it_refuses_as_before(name):
    module = NORMS[name]()
    for x in (torch.ones(3, N, 5), torch.ones(2, N + 1, 3, 5), torch.ones(())):
        with pytest.raises(Exception) as before:
            module(x)
        report = tilenorm.patch(module)
        with pytest.raises(before.type) as after:
            module(x)
        assert str(after.value) == str(before.value)
        report.undo()


@pytest.mark.parametrize("name", ["timm", "Hugging Face"])
def test_model_is_compiled_and_exported(name, dynamo):
    module = nn.Sequential(nn.Conv2d(3, N, 2), NORMS[name]())
    x = images("contiguous", 2, 3, 5, 5)
    expected = module(x)
    tilenorm.patch(module)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    torch.testing.assert_close(torch.export.export(module, (x,)).module()(x), expected)


def test_sum_before_is_not_taken_for_one_of_rows():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = Permuting(N)

        def forward(self, x, y):
            x = x + y
            return self.norm(x)

    block, x = Block(), images("contiguous", 2, N, 3, N)  # the width could be taken for channels
    expected = block(x, x)
    tilenorm.patch(block, residual=True)
    torch.testing.assert_close(block(x, x), expected)
