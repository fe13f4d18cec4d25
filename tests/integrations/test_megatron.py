"""Norms of Megatron-Core's layer specs: on specs of its kind, and on Megatron-Core itself."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tilenorm
from tests.support.calls import random
from tilenorm.integrations import megatron
from tilenorm.integrations.megatron import EarlyNorm, Norm, with_tilenorm

CONFIG = {
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": False,
    "sequence_parallel": False,
    "memory_efficient_layer_norm": False,
}


def config(**fields) -> SimpleNamespace:
    return SimpleNamespace(**CONFIG | fields)


@pytest.mark.parametrize("kind, parallel", [(Norm, False), (EarlyNorm, True)])
@pytest.mark.parametrize("normalization, centered", [("RMSNorm", True), ("LayerNorm", False)])
def test_a_norm_is_what_the_configuration_says(kind, normalization, centered, parallel):
    fields = {"layernorm_zero_centered_gamma": centered, "sequence_parallel": parallel}
    norm = kind(config=config(normalization=normalization, **fields), hidden_size=64, eps=1e-6)
    assert isinstance(norm, getattr(tilenorm, normalization)) and norm.eps == 1e-6
    assert all(p.sequence_parallel is parallel for p in norm.parameters())
    assert len([*norm.parameters()]) == (1 if normalization == "RMSNorm" else 2)
    x = random(3, 64, dtype=torch.bfloat16)
    norm.bfloat16()
    plain = getattr(tilenorm, normalization)(64, 1e-6, dtype=torch.bfloat16)
    assert torch.equal(norm(x), plain(x)), "as it is initialised, it does not scale"
    with torch.no_grad():
        norm.weight.copy_(random(64, seed=1))
    function = getattr(tilenorm, "rms_norm" if normalization == "RMSNorm" else "layer_norm")
    options = {"offset": float(centered), "rounding": kind.rounding}
    assert torch.equal(norm(x), function(x, (64,), norm.weight, eps=1e-6, **options))


@pytest.mark.parametrize(
    "fields, text",
    (
        ({"normalization": "L2Norm"}, "takes RMSNorm or LayerNorm, got L2Norm"),
        ({"memory_efficient_layer_norm": True}, "memory_efficient_layer_norm is not served"),
    ),
)
def test_a_configuration_that_is_not_served(fields, text):
    with pytest.raises(ValueError, match=text):
        Norm(config(**fields), 64)


class WrappedTorchNorm:
    """Stands for Megatron's."""


class L2Norm:
    """Stands for Megatron's, which stays."""


@dataclass
class Submodules:
    norm: Any = None
    q_layernorm: Any = L2Norm
    attention: Any = None
    mlp: Any = None
    layer_specs: Any = ()
    params: dict = field(default_factory=dict)


def test_a_spec_with_its_norms_replaced():
    """In fields, in specs inside of specs, in lists and in functions with submodules."""
    inner = Submodules(norm=WrappedTorchNorm)
    mlp = partial(print, 1, submodules=inner, flag=True)
    plain = Submodules()
    spec = Submodules(WrappedTorchNorm, attention=inner, mlp=mlp, layer_specs=[inner, plain])
    for rounding, kind in (("late", Norm), ("early", EarlyNorm)):
        changed = with_tilenorm(spec, rounding)
        assert changed.norm is changed.attention.norm is changed.layer_specs[0].norm is kind
        assert changed.mlp.keywords["submodules"].norm is kind
        assert (changed.mlp.func, changed.mlp.args) == (print, (1,))
        assert changed.mlp.keywords["flag"] and changed.layer_specs[1] is plain
        assert changed.q_layernorm is L2Norm
    assert spec.norm is inner.norm is WrappedTorchNorm, "the spec was changed"


def test_a_spec_without_norms_and_another_rounding():
    with pytest.raises(ValueError, match="has none of Megatron's norms"):
        with_tilenorm(Submodules())
    with pytest.raises(ValueError, match="rounding takes 'late' or 'early', got 'up'"):
        with_tilenorm(Submodules(WrappedTorchNorm), "up")


def test_it_needs_no_megatron_until_it_builds_a_norm():
    assert not [name for name in vars(megatron) if name == "core"]


@pytest.fixture
def parallel(monkeypatch):
    """Megatron-Core's groups of one process, without a GPU."""
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    from megatron.core import parallel_state, tensor_parallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    monkeypatch.setattr(tensor_parallel.get_cuda_rng_tracker(), "fork", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")  # of attention's buffer
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("normalization", ("RMSNorm", "LayerNorm"))
def test_megatrons_local_spec(normalization, parallel):
    """Losses and gradients are those of Megatron's own norms, with weights around one and around
    zero. Queries and keys are normalised too.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig, transformer_block
    from megatron.core.transformer.torch_norm import WrappedTorchNorm as Own

    def block(with_own: bool, **fields) -> nn.Module:
        whole = TransformerConfig(
            num_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            normalization=normalization,
            use_cpu_initialization=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            **fields,
        )
        layer = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
        spec = transformer_block.TransformerBlockSubmodules([layer] * 2, layer_norm=Own)
        return transformer_block.TransformerBlock(whole, spec if with_own else with_tilenorm(spec))

    torch.manual_seed(0)
    theirs, ours = block(True), block(False)
    centered = block(False, layernorm_zero_centered_gamma=True)
    kinds = [type(m) for m in ours.modules() if "Norm" in type(m).__name__]
    assert kinds == [getattr(tilenorm, normalization)] * 9  # 2 in a layer, of q and k, the last
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.2)
            ours.get_parameter(name).copy_(parameter)
            of_norm = "norm" in name and name.endswith("weight")
            centered.get_parameter(name).copy_(parameter - 1 if of_norm else parameter)
    x, mask = random(8, 2, 64), torch.ones(1, 1, 8, 8).triu(1).bool()
    results = []
    for model in (theirs, ours, centered):
        y = model(x.clone().requires_grad_(), mask)
        y.square().mean().backward()
        results.append((y, {name: p.grad for name, p in model.named_parameters()}))
    (expected, expected_grads), *others = results
    for y, grads in others:
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
        for name, grad in expected_grads.items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-3, atol=1e-5)
