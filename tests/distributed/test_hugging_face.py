"""Hugging Face's own tensor parallelism, before and after tilenorm.patch."""

import os
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import tilenorm

from .placing import counted
from .world import device, on_every_rank

pytestmark = pytest.mark.skipif(not find_spec("transformers"), reason="needs transformers")
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 32}
SIZES |= {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": None}
SIZES |= {"tie_word_embeddings": False}  # a plan is for models whose weights are not tied yet
# How many norms each has. The plan of the first replaces the forward of its q and k norms, which
# normalise a rank's own heads; those of OLMo 2 normalise all heads, gathered.
MODELS = {"Qwen3": 5, "Olmo2": 5}


def model_of(name: str, parallel: bool):
    """A model with the same random weights everywhere, alone or by its class's plan."""
    import transformers
    from transformers.distributed import DistributedConfig

    config = getattr(transformers, f"{name}Config")(**SIZES)
    cls = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(0)
    model = cls(config).to(device())
    if not parallel:
        return model
    # What from_pretrained(tp_plan="auto") calls, which needs the package accelerate.
    how = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
    with mock.patch.dict(os.environ, LOCAL_RANK=os.environ.get("LOCAL_RANK", str(dist.get_rank()))):
        how, _, meshes = cls.prepare_distribute_model(how)
    return cls.maybe_distribute_model(model, how, meshes)


def trained(model) -> tuple[dict, dict]:
    """Logits and gradients, and the collectives that they took."""
    ids = torch.arange(12, device=device()).view(2, 6)

    def step():
        logits = model(ids).logits
        logits.float().square().sum().backward()
        return logits

    logits, collectives = counted(step)
    found = {"logits": logits.detach()}
    for n, p in model.named_parameters():
        found[n] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
    return found, collectives


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@on_every_rank
def test_patch_after_its_plan(name):
    """The collectives and gradients of the model that is not patched, and those of one process."""
    model = model_of(name, True)
    report = tilenorm.patch(model)
    assert len(report.patched) == MODELS[name] and not report.left, str(report)
    if name != "Olmo2":
        assert any("q_norm" in n for n in model.config.base_model_tp_plan)
    found, collectives = trained(model)
    expected, others = trained(model_of(name, True))
    assert collectives == others and sum(others.values())
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found, trained(model_of(name, False))[0], rtol=1e-4, atol=1e-4)
    assert len(tilenorm.unpatch(model)) == MODELS[name]
    model.zero_grad()
    torch.testing.assert_close(trained(model)[0], expected, rtol=0, atol=0)
