"""patch(rotation=True): attention that rotates queries and keys in the pass of their norms."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.olmo2 import modeling_olmo2 as olmo2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

import tilenorm
from tilenorm.ops import functional_rotated

from ..ops.helpers import name_of, random
from .rotations import BATCH, HEADS, KEYS, TOKENS, D
from .test_fx_modulated import assert_no_less_accurate

pytestmark = pytest.mark.filterwarnings("ignore::tilenorm.ReferenceWarning")
BF16, F32 = torch.bfloat16, torch.float32
apply_rotary_pos_emb, rotate_olmo = qwen3.apply_rotary_pos_emb, olmo2.apply_rotary_pos_emb


class Attention(nn.Module):
    """As Qwen 3 spells it, up to the scores."""

    NORM, SPANS_TOKEN = qwen3.Qwen3RMSNorm, False

    def __init__(self):
        super().__init__()
        sizes = (HEADS * D, KEYS * D) if self.SPANS_TOKEN else (D, D)
        self.q_norm, self.k_norm = map(self.NORM, sizes)

    def forward(self, qkv, position_embeddings):
        q, k, v = qkv.split([HEADS * D, KEYS * D, KEYS * D], -1)
        q = self.q_norm(q.view(BATCH, TOKENS, -1, D)).transpose(1, 2)
        k = self.k_norm(k.view(BATCH, TOKENS, -1, D)).transpose(1, 2)
        v = v.view(BATCH, TOKENS, -1, D).transpose(1, 2)
        cos, sin = position_embeddings
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q, k, v


class Gemma3(Attention):
    NORM = Gemma3RMSNorm

    def forward(self, qkv, position_embeddings):
        q, k, v = qkv.split([HEADS * D, KEYS * D, KEYS * D], -1)
        q = q.view(BATCH, TOKENS, -1, D).transpose(1, 2)
        k = k.view(BATCH, TOKENS, -1, D).transpose(1, 2)
        q = self.q_norm(q)
        k = self.k_norm(k)
        cos, sin = position_embeddings
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q, k, v


class Olmo2(Attention):
    NORM, SPANS_TOKEN = olmo2.Olmo2RMSNorm, True

    def forward(self, qkv, position_embeddings):
        q, k, v = qkv.split([HEADS * D, KEYS * D, KEYS * D], -1)
        q = self.q_norm(q)
        k = self.k_norm(k)
        q = q.view(BATCH, TOKENS, -1, D).transpose(1, 2)
        k = k.view(BATCH, TOKENS, -1, D).transpose(1, 2)
        cos, sin = position_embeddings
        q, k = rotate_olmo(q, k, cos, sin)
        return q, k, v


@pytest.fixture
def passes():
    with mock.patch.object(
        functional_rotated, "rms_norm_rope", side_effect=functional_rotated.rms_norm_rope
    ) as called:
        yield called


def made(cls, dtype):
    module = cls()
    for number, parameter in enumerate(module.parameters()):
        parameter.data.copy_(random(*parameter.shape, seed=number))
    qkv = random(BATCH, TOKENS, (HEADS + 2 * KEYS) * D, dtype=dtype, seed=5)
    angles = random(1, TOKENS, D // 2, seed=6).repeat(1, 1, 2)
    return module.to(dtype), qkv, tuple(t.to(dtype) for t in (angles.cos(), angles.sin()))


def step(module, qkv, tables):
    leaves = [qkv.detach().requires_grad_(), *module.parameters()]
    q, k, _ = module(leaves[0], tables)
    dys = [random(*y.shape, seed=8 + i).to(y.dtype) for i, y in enumerate((q, k))]
    return [q.detach(), k.detach(), *torch.autograd.grad((q, k), leaves, dys)]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
@pytest.mark.parametrize("cls", [Attention, Gemma3, Olmo2])
def test_attention_as_hugging_face_spells_it(cls, dtype, passes):
    module, qkv, tables = made(cls, dtype)
    patched = copy.deepcopy(module)
    report = tilenorm.patch(patched, rotation=True)
    assert "the rotation of q_norm and k_norm with the norm" in str(report) and not report.left
    double = copy.deepcopy(module).double(), qkv.double(), tuple(t.double() for t in tables)
    got, expected = step(patched, qkv, tables), step(module, qkv, tables)
    assert passes.call_count == 1
    assert_no_less_accurate(got, expected, step(*double), cls.__name__)
    wide = tuple(table.float() for table in tables)
    patched(qkv, wide)
    casts = cls is Olmo2 and dtype == BF16  # its function gives q's dtype with wide tables too
    assert passes.call_count == 1 + (casts or dtype == F32)
    if cls is Attention and dtype == BF16:
        assert all(torch.equal(a, b) for a, b in zip(got[:2], expected[:2], strict=True))
    tilenorm.unpatch(patched)
    assert type(patched) is cls


# What one pass does not give runs as before.
AS_BEFORE = {
    "hook": lambda m, t: m.k_norm.register_forward_hook(lambda *_: None) and t,
    "another eps": lambda m, t: (
        [setattr(m.k_norm, name, 1e-2) for name in ("eps", "variance_epsilon")] and t
    ),
    "wide tables": lambda m, t: tuple(table.double() for table in t),
    "tables with gradients": lambda m, t: tuple(table.requires_grad_() for table in t),
    "tables of half a head": lambda m, t: tuple(table[..., :1] for table in t),
}


@pytest.mark.parametrize("change", AS_BEFORE.values(), ids=AS_BEFORE)
@pytest.mark.parametrize("cls", [Attention, Gemma3, Olmo2])
def test_what_one_pass_does_not_give_runs_as_before(cls, change, passes):
    module, qkv, tables = made(cls, F32)
    patched = copy.deepcopy(module)
    tilenorm.patch(patched, rotation=True)
    tilenorm.patch(module)
    found = [m(qkv, change(m, tables)) for m in (patched, module)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not passes.called


class Used(Attention):
    """A norm's output is used besides."""

    def forward(self, qkv, position_embeddings):
        q, k, v = qkv.split([HEADS * D, KEYS * D, KEYS * D], -1)
        q = self.q_norm(q.view(BATCH, TOKENS, -1, D)).transpose(1, 2)
        k = self.k_norm(k.view(BATCH, TOKENS, -1, D)).transpose(1, 2)
        v = k + 1
        cos, sin = position_embeddings
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q, k, v


def turned(q, k, cos, sin):
    return q * cos[:, None], k * sin[:, None]


class Other(Attention):
    """The function is no rotation."""

    def forward(self, qkv, position_embeddings):
        q, k, v = qkv.split([HEADS * D, KEYS * D, KEYS * D], -1)
        q = self.q_norm(q.view(BATCH, TOKENS, -1, D)).transpose(1, 2)
        k = self.k_norm(k.view(BATCH, TOKENS, -1, D)).transpose(1, 2)
        cos, sin = position_embeddings
        q, k = turned(q, k, cos, sin)
        return q, k, v


@pytest.mark.parametrize("cls", [Used, Other])
def test_what_is_no_rotation_of_norms_stays(cls):
    module, *_ = made(cls, F32)
    report = tilenorm.patch(module, rotation=True)
    ((_, left, reason),) = report.left
    assert left is cls is type(module)
    assert reason == "no rotation stands behind patched norms of queries and keys"
