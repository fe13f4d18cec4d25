"""Tiny models of Hugging Face, and what their norms give, to compare an engine's with."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
OF_LLAMA = SIZES | {"intermediate_size": 512, "num_key_value_heads": 2, "head_dim": 64}
OF_LLAMA |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False}
OF_GEMMA = OF_LLAMA | {"tie_word_embeddings": True, "query_pre_attn_scalar": 64}
OF_OPT = SIZES | {"ffn_dim": 512, "word_embed_proj_dim": 256, "dropout": 0.0}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**OF_LLAMA)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**OF_LLAMA)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**OF_GEMMA)),
    "opt": lambda: OPTForCausalLM(OPTConfig(**OF_OPT)),
}


def random_model(name: str) -> PreTrainedModel:
    """In bfloat16. The norms' parameters are random too, or a wrong offset would not show."""
    torch.manual_seed(0)
    model = MODELS[name]()
    for key, parameter in model.named_parameters():
        if "norm" in key:
            center = 0.0 if name == "gemma3" or key.endswith("bias") else 1.0
            parameter.data.normal_(center, 0.2)
        elif parameter.dim() > 1:
            parameter.data.normal_(0, 0.06)
    return model.to(torch.bfloat16)


def assert_equal_bits(module: nn.Module, inputs: tuple, outputs: tuple) -> None:
    """A trainer's norm, fused with the sum or not, has the bits that an engine's norm gave.

    inputs: x and perhaps a residual. outputs: y and perhaps their sum.
    """
    x, *residual = (t for t in inputs if isinstance(t, Tensor))
    y, *total = outputs
    if residual:
        assert torch.equal(residual[0] + x, total[0]), "sum"
        x = residual[0] + x
    with torch.no_grad():
        assert torch.equal(module(x).view_as(y), y), "y"
