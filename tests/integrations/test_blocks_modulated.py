"""patch(modulation=True): blocks that modulate in the pass of the norm."""

import copy
import functools
import pickle
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

import tilenorm
from tilenorm.ops import functional

from ..ops.helpers import name_of, random
from .modulations import BATCH, MODELS, TOKENS, N, model_and_inputs, norm_of
from .test_fx_modulated import assert_no_less_accurate

pytestmark = pytest.mark.filterwarnings("ignore::tilenorm.ReferenceWarning")
BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture
def passes():
    """How many calls normalise and modulate in one pass."""
    calls = []

    def counted(function, *args, **options):
        calls.append(function)
        return function(*args, **options)

    names = ("modulated_rms_norm", "modulated_layer_norm")
    both = {name: partial(counted, getattr(functional, name)) for name in names}
    with mock.patch.multiple(functional, **both):
        yield calls


COUNTS = {"DiT": 5, "Flux single": 3, "PixArt": 4, "Wan": 5, "Wan by token": 2, "Lumina": 2}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
@pytest.mark.parametrize("name", MODELS)
def test_blocks_as_diffusers_spells_them(name, dtype, passes):
    module, x, emb = model_and_inputs(name, dtype)
    patched = copy.deepcopy(module)
    report = tilenorm.patch(patched, modulation=True)
    assert "the modulation of" in str(report) and not report.left
    x.requires_grad_()
    got, expected, exact = (
        [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], dy)]
        for model, x, emb, dy in [
            (m, t.detach().to(d).requires_grad_(), emb.to(d), random(*x.shape, dtype=dtype).to(d))
            for m, t, d in (
                (patched, x, dtype),
                (module, x, dtype),
                (copy.deepcopy(module).double(), x, torch.float64),
            )
        ]
        for y in [model(x, emb)]
    )
    assert len(passes) == COUNTS[name]
    if name.startswith("Wan"):  # whose casts leave no float64
        for a, b in zip(got, expected, strict=True):
            unit = 2**-5 if dtype == BF16 else 1e-5
            torch.testing.assert_close(a, b, rtol=unit, atol=unit * b.abs().max().item())
    else:
        assert_no_less_accurate(got, expected, exact, name)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.last = norm_of(affine=True), nn.RMSNorm(N)

    def forward(self, x, scale, shift):
        y = shift + (scale + 1.0) * self.norm(x)
        z = self.last(y)
        z = z * (1 + scale)
        return y, z


class Apart(Block):
    """The norm's output is used besides, or is that of another tensor."""

    def forward(self, x, scale, shift):
        z = self.norm(x)
        y = z * (1 + scale) + shift
        z = self.last(z)
        z = z * (1 + z)
        return y, z


def made():
    """A block with patched norms, the same patched itself, and inputs."""
    x = random(BATCH, TOKENS, N, dtype=BF16)
    scale, shift = (random(BATCH, 1, N, dtype=BF16, seed=seed) for seed in (1, 2))
    return *copy.deepcopy(_made()), x, scale, shift


@functools.cache
def _made():
    block = Block().bfloat16()
    for number, parameter in enumerate(block.parameters()):
        parameter.data.copy_(random(N, seed=number))
    patched = copy.deepcopy(block)
    tilenorm.patch(patched, modulation=True)
    tilenorm.patch(block)
    return block, patched


# What one pass does not give runs as before, with the same bits and the same errors.
AS_BEFORE = {
    "not by group": lambda norm, x, a, b: (x, random(1, TOKENS, N, dtype=BF16), b),
    "two shapes": lambda norm, x, a, b: (x, a, b[:1]),
    "promoted": lambda norm, x, a, b: (x, a.float(), b),
    "number": lambda norm, x, a, b: (x, 0.5, 2.0),
    "of other rows": lambda norm, x, a, b: (x[:, :BATCH], a[:, 0], b[:, 0]),
    "parameters": lambda norm, x, a, b: norm.double() and (x.double(), a.double(), b.double()),
    "hook": lambda norm, x, a, b: norm.register_forward_hook(lambda *_: None) and (x, a, b),
}


@pytest.mark.parametrize("change", AS_BEFORE.values(), ids=AS_BEFORE)
def test_what_one_pass_does_not_give_runs_as_before(change, passes):
    block, patched, *tensors = made()
    for norm in (block.norm, patched.norm):
        given = change(norm, *tensors)
    got, expected = patched(*given)[0], block(*given)[0]
    assert got.dtype == expected.dtype and torch.equal(got, expected)
    assert functional.modulated_layer_norm.args[0] not in passes


@pytest.mark.parametrize("shape", [(BATCH, 1), (BATCH, TOKENS), (1, 1), ()])
def test_rows_that_lie_by_group(shape, passes):
    block, patched, x, *_ = made()
    tensors = [t.float() for t in (x, random(*shape, N, seed=1), random(*shape, N, seed=2))]
    for got, expected in zip(patched.float()(*tensors), block.float()(*tensors), strict=True):
        torch.testing.assert_close(got, expected)
    assert len(passes) == 2


def test_a_norm_whose_output_is_used_besides_stays():
    block = Apart()
    report = tilenorm.patch(block, modulation=True)
    assert type(block) is Apart
    ((_, cls, reason),) = report.left
    assert cls is Apart and reason == "no modulation stands right behind a patched norm"


class Added(Block):
    """As Flux and HunyuanVideo do."""

    def forward(self, x, h, scale, shift):
        x = x + h
        y = self.norm(x)
        y = y * (1 + scale) + shift
        return y, x


@pytest.mark.parametrize("alike", [True, False])
def test_the_sum_before_in_the_same_pass(alike, passes):
    """With residual=True; the sum has the same bits. Terms of two shapes are added as before."""
    block, (_, _, x, scale, shift) = Added().bfloat16(), made()
    h = random(*x.shape, dtype=BF16, seed=5)
    h = h if alike else h[:1]
    patched = copy.deepcopy(block)
    report = tilenorm.patch(patched, modulation=True, residual=True)
    assert "the sum before norm and the modulation of norm with the norm" in str(report)
    (y, s), (like, total) = patched(x, h, scale, shift), block(x, h, scale, shift)
    assert torch.equal(s, total) and s.dtype == total.dtype and y.dtype == like.dtype
    torch.testing.assert_close(y, like, rtol=2**-6, atol=2**-5)
    assert len(passes) == 1


def test_with_sums_undone_copied_and_pickled(passes):
    block, _, x, scale, shift = made()
    tilenorm.unpatch(block)
    report = tilenorm.patch(block, modulation=True, residual=True)
    assert "the modulation of norm and last with the norm" in str(report)
    for again in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert type(again) is type(block)
        assert all(map(torch.equal, again(x, scale, shift), block(x, scale, shift)))
    report.undo()
    assert type(block) is Block


def test_compiled_in_one_graph(dynamo, passes):
    _, patched, *tensors = made()
    compiled = torch.compile(patched, backend="aot_eager", fullgraph=True)
    for got, expected in zip(compiled(*tensors), patched(*tensors), strict=True):
        assert torch.equal(got, expected)


def test_the_option_takes_a_bool():
    with pytest.raises(TypeError, match="argument 'modulation' takes a bool, got int"):
        tilenorm.patch(Block(), modulation=1)
