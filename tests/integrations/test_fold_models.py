"""Hugging Face's models, compiled: which additions of gradients stay, and the gradients' bits."""

from typing import NamedTuple

import pytest
import torch
from torch import nn

import tilenorm
from tilenorm.integrations import joint
from tilenorm.integrations.fx import Folds

from ..ops.helpers import random
from .stepwise import sums

WIDTH, LAYERS = 64, 2
PATCHES = {"image_size": 32, "patch_size": 8}


class Expected(NamedTuple):
    """config: what differs from SIZES. before, after: additions of two gradients of rows, without
    and with folding. outputs: norms whose output is not saved with low memory. rounded: parts of
    the names of the parameters whose gradients are rounded once where dx and another are added.
    """

    config: dict
    before: int
    after: int
    outputs: int
    rounded: tuple[str, ...] = ("embed",)


SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 128,
    "pad_token_id": 0,
}
HEADS = {"num_key_value_heads": 2, "head_dim": 16}
MODELS = {
    "llama": Expected({"num_key_value_heads": 2}, 7, 0, 4),
    "qwen3": Expected(HEADS, 7, 0, 4),
    "gemma3_text": Expected(HEADS, 7, 0, 4),
    # The sum is the gradient of a norm's output and of what was added to this output.
    "olmo2": Expected({}, 10, 10, 0, ()),
    # Each layer adds the gradients of two norms of one input.
    "gpt_neox": Expected({}, 3, 0, 4, ("embed", "layers.0")),
    # Three terms come before the gradient of the embedding's norm, behind dropout.
    "bert": Expected({}, 9, 3, 3, ()),
    "gpt2": Expected({"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4}, 1, 0, 4, ("wte", "wpe")),
    "vit": Expected(PATCHES, 6, 0, 4),
    "dinov2": Expected(PATCHES, 5, 0, 4),
}


def model(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(name, **(SIZES | MODELS[name].config))
    torch.manual_seed(0)
    return transformers.AutoModel.from_config(config).bfloat16().train()


def gradients(name: str, **options) -> tuple[dict, object]:
    """The gradients of a compiled model's parameters, and the report."""
    torch._dynamo.reset()
    module = model(name)
    run = tilenorm.compile(module, where=lambda node: True, **options)
    if "image_size" in MODELS[name].config:
        inputs = {"pixel_values": random(2, 3, 32, 32, dtype=torch.bfloat16)}
    else:
        inputs = {"input_ids": torch.arange(32).view(2, 16) * 5 % 128}
    torch.manual_seed(1)  # for dropout
    y = run(**inputs)[0]
    y.backward(random(*y.shape, dtype=y.dtype, seed=2))
    named = module.named_parameters()
    return {n: p.grad for n, p in named if p.grad is not None}, run.tilenorm_report


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_sums_and_outputs_of_models(name, stepwise, monkeypatch):
    expected = MODELS[name]
    found, _ = gradients(name)
    assert len(sums(stepwise.backward[-1].graph, WIDTH)) == expected.after
    saved = stepwise.saved
    stepwise.forward.clear()
    low, report = gradients(name, memory="low")
    outputs = [kind for kind, _ in report.folded if kind == "output"]
    assert len(outputs) == expected.outputs
    output_bytes = 2 * (17 if "image_size" in expected.config else 16) * WIDTH * 2
    assert stepwise.saved == saved - expected.outputs * output_bytes
    monkeypatch.setattr(joint, "fold_sums", lambda graph, output: Folds())
    plain, _ = gradients(name)
    assert len(sums(stepwise.backward[-1].graph, WIDTH)) == expected.before
    for n, grad in plain.items():
        assert torch.equal(low[n], found[n]), n
        if not any(part in n for part in expected.rounded):
            assert torch.equal(found[n], grad), n
        torch.testing.assert_close(found[n], grad, rtol=2**-5, atol=2**-5 * grad.abs().max().item())
