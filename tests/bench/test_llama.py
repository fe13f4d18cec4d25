import pytest
import torch

from bench.llama import EPS, ROPE_THETA, Llama, Shape

SMALL = Shape(layers=2, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=50)
LENGTH = 12


def small(checkpointing=False, dtype=torch.float32):
    model = Llama(SMALL, LENGTH, checkpointing, device="cpu", dtype=dtype)
    model.reset(0)
    tokens = torch.randint(SMALL.vocab, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return model, tokens


def test_default_shape_has_the_parameters_of_llama_3_8b():
    shape = Shape()
    assert shape.layers * shape.layer_parameters + shape.other_parameters == 8_030_261_248


def test_counted_parameters_are_those_of_the_model():
    counted = SMALL.layers * SMALL.layer_parameters + SMALL.other_parameters
    assert counted == sum(p.numel() for p in small()[0].parameters())


NAMES = {
    "embedding": "model.embed_tokens",
    "blocks": "model.layers",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.output": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
    "head.norm": "model.norm",
    "head.output": "lm_head",
}


def theirs(name: str) -> str:
    for ours, other in NAMES.items():
        name = name.replace(f"{ours}.", f"{other}.")
    return name


def test_model_computes_the_same_as_llama_in_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=SMALL.hidden,
        intermediate_size=SMALL.ffn,
        num_hidden_layers=SMALL.layers,
        num_attention_heads=SMALL.heads,
        num_key_value_heads=SMALL.kv_heads,
        vocab_size=SMALL.vocab,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
    )
    model, tokens = small()
    other = transformers.LlamaForCausalLM(config)
    other.load_state_dict({theirs(name): value for name, value in model.state_dict().items()})
    model(tokens).backward()
    loss = other(input_ids=tokens, labels=tokens).loss
    # Both models predict each token except the first from the tokens before it.
    loss.backward()
    torch.testing.assert_close(model(tokens), loss)
    found = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, found[theirs(name)].grad, msg=name)


def test_token_does_not_see_later_tokens():
    model, tokens = small()
    seen = []
    model.head.register_forward_hook(lambda head, inputs, output: seen.append(inputs[0]))
    model(tokens)
    tokens[:, LENGTH // 2] += 1
    model(tokens % SMALL.vocab)
    before, after = (x[:, : LENGTH // 2] for x in seen)
    assert torch.equal(before, after)
    assert not torch.equal(seen[0][:, LENGTH // 2 :], seen[1][:, LENGTH // 2 :])


def test_checkpointing_does_not_change_the_bits():
    found = []
    for checkpointing in (False, True):
        model, tokens = small(checkpointing, torch.bfloat16)
        loss = model(tokens)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *found))


def test_reset_gives_equal_weights_for_equal_seeds():
    model, _ = small()
    start = [p.clone() for p in model.parameters()]
    model.reset(1)
    assert not torch.equal(model.embedding.weight, start[0])
    model.reset(0)
    assert all(map(torch.equal, start, model.parameters()))
