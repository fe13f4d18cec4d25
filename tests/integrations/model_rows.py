"""Small models of transformers and of diffusers, a row each: their sizes and their inputs."""

from typing import NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.support.calls import random

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 4}
TEXT = SIZES | {"vocab_size": 128, "max_position_embeddings": 64}
TEXT |= {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": None}
HEADS = TEXT | {"num_key_value_heads": 2, "head_dim": 16}
IDS = {"input_ids": torch.arange(24).reshape(2, 12) * 5 % 128}
CAUSAL_IDS = IDS | {"use_cache": False}


class Model(NamedTuple):
    """A model of transformers, or of diffusers if there is no config.

    sizes: the arguments of the config, or of the model of diffusers. options: other arguments of
    the model of transformers. inputs: the arguments of forward; a tuple is the shape of a tensor of
    random numbers.
    """

    cls: str
    sizes: dict
    inputs: dict
    config: str | None = None
    options: dict = {}  # noqa: RUF012


def causal(name: str, sizes: dict) -> Model:
    return Model(f"{name.removesuffix('Text')}ForCausalLM", sizes, CAUSAL_IDS, f"{name}Config")


TRANSFORMERS = {
    "llama": causal("Llama", HEADS),
    "qwen3": causal("Qwen3", HEADS),
    "gemma2": causal("Gemma2", HEADS),
    "gemma3_text": causal("Gemma3Text", HEADS),
    "olmo2": causal("Olmo2", HEADS),
    "gpt_neox": causal("GPTNeoX", TEXT),
    "bert": Model("BertModel", TEXT, IDS, "BertConfig", {"add_pooling_layer": False}),
}

# Two heads of 16 elements. An image has 4 channels, 8 x 8 pixels and patches of 2 x 2 pixels. A
# prompt has five tokens of 24 elements, and one vector of 20.
ROPE = (4, 6, 6)
TIME = {"timestep": torch.tensor([3, 700])}
PROMPT = {"encoder_hidden_states": (2, 5, 24)}
MASK = {"encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()}
DIFFUSERS = {
    "flux": Model(
        "FluxTransformer2DModel",
        {"num_attention_heads": 2, "attention_head_dim": 16, "joint_attention_dim": 24}
        | {"in_channels": 16, "num_layers": 1, "num_single_layers": 1}
        | {"pooled_projection_dim": 20, "axes_dims_rope": ROPE},
        TIME
        | PROMPT
        | {"hidden_states": (2, 16, 16), "pooled_projections": (2, 20)}
        | {"img_ids": torch.arange(48).reshape(16, 3) % 4, "txt_ids": torch.zeros(5, 3).long()},
    ),
    "lumina2": Model(
        "Lumina2Transformer2DModel",
        {"sample_size": 8, "in_channels": 4, "hidden_size": 32, "num_layers": 1}
        | {"num_refiner_layers": 1, "num_attention_heads": 2, "num_kv_heads": 1, "multiple_of": 16}
        | {"axes_dim_rope": ROPE, "axes_lens": (16, 16, 16), "cap_feat_dim": 24},
        TIME | PROMPT | MASK | {"hidden_states": (2, 4, 8, 8)},
    ),
    "wan": Model(
        "WanTransformer3DModel",
        {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4}
        | {"text_dim": 24, "freq_dim": 32, "ffn_dim": 48, "num_layers": 1, "rope_max_seq_len": 16},
        TIME | PROMPT | {"hidden_states": (2, 4, 1, 8, 8)},
    ),
}
MODELS = TRANSFORMERS | DIFFUSERS


def built(name: str) -> nn.Module:
    """A model whose norm weights and biases are not all ones and zeros."""
    model = MODELS[name]
    torch.manual_seed(0)
    if model.config:
        config = getattr(transformers, model.config)(**model.sizes)
        module = getattr(transformers, model.cls)(config, **model.options).eval()
    else:
        module = getattr(pytest.importorskip("diffusers"), model.cls)(**model.sizes).eval()
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            if parameter.dim() == 1:
                parameter += 0.3 * random(*parameter.shape, seed=seed)
    return module


def arguments(model: nn.Module, name: str) -> dict:
    """The arguments of forward. The tensors of random numbers require gradients."""
    parameter = next(model.parameters())
    given = {}
    for seed, (argument, value) in enumerate(MODELS[name].inputs.items()):
        if isinstance(value, tuple):
            value = random(*value, dtype=torch.bfloat16, seed=seed).to(parameter).requires_grad_()
        elif isinstance(value, Tensor):
            value = value.to(parameter.device)
        given[argument] = value
    return given


def step(model: nn.Module, name: str, run=None) -> dict[str, Tensor]:
    """The outputs and the gradient of every parameter and input, by name."""
    given = arguments(model, name)
    y = (model if run is None else run)(**given)[0]
    dy = random(*y.shape, dtype=torch.bfloat16).to(y)
    leaves = {n: t for n, t in given.items() if isinstance(t, Tensor) and t.requires_grad}
    leaves |= model.named_parameters()
    grads = torch.autograd.grad(y, list(leaves.values()), dy, materialize_grads=True)
    return {"outputs": y.detach(), **dict(zip(leaves, grads, strict=True))}
