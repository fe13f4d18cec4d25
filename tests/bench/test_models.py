from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from bench import models
from bench.pair import model_of
from bench.shapes import LLAMA, MODELS, Shape, tiny

LENGTH = 10  # for ViT a class token, and an image of 3 x 3 patches
# As Hugging Face counts them, for ViT-L without a pooler; for BERT without the types of tokens, the
# norm of the embedding, and the projection and the bias of the logits.
PARAMETERS = {
    "Llama 3 8B": 8_030_261_248,
    "Llama 3.2 1B": 1_235_814_400,
    "Qwen3 8B": 8_190_735_360,
    "OLMo 2 7B": 7_298_617_344,
    "ViT-L": 304_715_752,
    "GPT-2": 124_439_808,
    # Of DiT without the embeddings of positions and classes. Flux has a projection of 256 features
    # twice and one of 768 in place of the one here.
    "DiT-XL/2": 675_129_632 - (256 + 1001) * 1152,
    "Flux": 11_901_408_320 - 256 * 3072 - 2 * (3072 + 3072 * 3072 + 3072),
    "BERT-base": 109_514_298 - 2 * 768 - 2 * 768 - (768 + 1) * 768 - 30522,
}
each_model = pytest.mark.parametrize("name", MODELS)


def small(name=LLAMA, dtype=torch.float32):
    """A tiny model with the stages of a listed one, and its inputs."""
    model = model_of(replace(tiny(MODELS[name]), length=LENGTH), device="cpu", dtype=dtype)
    return model, model.drawn(1, "cpu", dtype)


@each_model
def test_shape_has_the_parameters_of_the_model(name):
    shape = MODELS[name]
    with FakeTensorMode():  # whose memory is not needed
        model = model_of(shape, device="cpu", dtype=torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    assert 4096 <= shape.batch * shape.length <= 16384
    assert not shape.learned or shape.learned >= shape.length


def of_transformers(name: str, shape: Shape):
    """The model of Hugging Face with these sizes."""
    transformers = pytest.importorskip("transformers")
    family = {"Qwen3 8B": "Qwen3", "OLMo 2 7B": "Olmo2"}.get(name, "Llama")
    config = getattr(transformers, f"{family}Config")(
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head,
        vocab_size=shape.vocab,
        rms_norm_eps=shape.eps,
        tie_word_embeddings=shape.tied,
        rope_parameters={"rope_type": "default", "rope_theta": shape.theta},
        **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None},
    )
    return getattr(transformers, f"{family}ForCausalLM")(config)


def attentions(ours, theirs, names: str) -> list[tuple]:
    """Pairs of modules: theirs have names in the order of ours, some of which a model may lack."""
    pairs = zip(("q", "k", "v", "q_norm", "k_norm", "output"), names.split(), strict=False)
    return [(getattr(ours, a), theirs.get_submodule(b)) for a, b in pairs if hasattr(ours, a)]


def same_weights(ours, theirs, pairs: list[tuple]) -> None:
    """Gives their modules the weights of ours, which are all that they have."""
    for own, other in pairs:
        other.load_state_dict(own.state_dict())
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize("name", [n for n, m in MODELS.items() if not (m.learned or m.adaptive)])
def test_decoder_computes_the_same_as_the_one_in_transformers(name):
    model, (tokens,) = small(name)
    shape = tiny(MODELS[name])
    other = of_transformers(name, shape)
    norms = ("input_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")
    norms = norms[1:] if shape.norm_after else norms[:2]
    pairs = [(model.embedding, other.model.embed_tokens), (model.head.norm, other.model.norm)]
    pairs += [(model.head.output, other.lm_head)]
    for block, layer in zip(model.blocks, other.model.layers, strict=True):
        names = "q_proj k_proj v_proj q_norm k_norm o_proj"
        pairs += attentions(block.attention, layer.self_attn, names)
        pairs += [(block.ffn.gate, layer.mlp.gate_proj), (block.ffn.up, layer.mlp.up_proj)]
        pairs += [(block.ffn.output, layer.mlp.down_proj)]
        both = block.attention_norm, block.ffn_norm
        pairs += zip(both, map(layer.get_submodule, norms), strict=True)
    same_weights(model, other, pairs)
    model(tokens).backward()
    # Both models predict each token except the first from the tokens before it.
    loss = other(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.testing.assert_close(model(tokens), loss)
    for ours, theirs in pairs:
        for own, its in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(own.grad, its.grad)


@pytest.mark.parametrize("kind", ["Joint", "Single"])
def test_layers_of_flux_compute_the_same_as_those_in_diffusers(kind):
    flux = pytest.importorskip("diffusers.models.transformers.transformer_flux")
    shape = replace(tiny(MODELS["Flux"]), ffn=128)
    layer = getattr(models, kind)(shape)
    models.reset(layer, 0)
    make = torch.Generator().manual_seed(1)
    text, image, c = (torch.randn(2, *n, 32, generator=make) for n in ((1,), (8,), ()))
    angles = torch.rand(9, shape.head // 2, generator=make).repeat_interleave(2, -1)
    tables = angles.cos(), angles.sin()
    if kind == "Joint":
        other = flux.FluxTransformerBlock(32, 4, 8)
        pairs = [(layer.text.attention_norm.modulation[1], other.norm1_context.linear)]
        pairs += [(layer.image.attention_norm.modulation[1], other.norm1.linear)]
        for stream, ff in ((layer.text, other.ff_context), (layer.image, other.ff)):
            pairs += [(stream.ffn.up, ff.net[0].proj), (stream.ffn.output, ff.net[2])]
        names = "add_q_proj add_k_proj add_v_proj norm_added_q norm_added_k to_add_out"
        pairs += attentions(layer.text.attention, other.attn, names)
        names = "to_q to_k to_v norm_q norm_k to_out.0"
        pairs += attentions(layer.image.attention, other.attn, names)
    else:
        other = flux.FluxSingleTransformerBlock(32, 4, 8)
        pairs = [(layer.norm.modulation[1], other.norm.linear)]
        pairs += [(layer.up, other.proj_mlp), (layer.output, other.proj_out)]
        pairs += attentions(layer.attention, other.attn, "to_q to_k to_v norm_q norm_k")
    same_weights(layer, other, pairs)
    expected = other(image, text, c, tables)
    if kind == "Joint":
        torch.testing.assert_close(layer(text, image, c, *tables), expected)
    else:
        torch.testing.assert_close(
            layer(torch.cat((text, image), 1), c, *tables), torch.cat(expected, 1)
        )


@pytest.mark.parametrize("name", [n for n, m in MODELS.items() if not m.adaptive])
def test_token_sees_later_tokens_unless_attention_is_causal(name):
    model, (given, *labels) = small(name)
    seen = []
    model.head.register_forward_hook(lambda head, inputs, output: seen.append(inputs[0]))
    model(given, *labels)
    given[:, LENGTH // 2] += 1
    model(given if labels else given % tiny(MODELS[name]).vocab, *labels)
    before, after = (x[:, : LENGTH // 2] for x in seen)
    assert torch.equal(before, after) == MODELS[name].causal
    assert not torch.equal(seen[0][:, LENGTH // 2 :], seen[1][:, LENGTH // 2 :])


def test_weights_are_those_of_a_seed_with_norms_of_one_and_biases_of_zero():
    both = (dict(small("ViT-L")[0].named_parameters()) for _ in range(2))
    for (name, first), again in zip(next(both).items(), next(both).values(), strict=True):
        assert torch.equal(first, again), name
        if first.ndim == 1:
            assert (first == (0.0 if name.endswith("bias") else 1.0)).all(), name
