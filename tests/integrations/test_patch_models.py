"""Patched models of transformers with random weights: outputs, gradients and generated tokens.

The error of a patched model may be twice the error of the original model. Both errors are measured
against a run in float64.
"""

import copy
from functools import partial
from typing import NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import tilenorm
from tilenorm.integrations.models import PatchedNorm

from ..ops.helpers import EACH_DEVICE, NEEDS_GPU, name_of, random
from ..tolerance import TIMES_TORCH

pytestmark = pytest.mark.filterwarnings("ignore::tilenorm.ReferenceWarning")

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4}
TEXT = SIZES | {"vocab_size": 128, "max_position_embeddings": 64}
TEXT |= {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": None}
HEADS = TEXT | {"num_key_value_heads": 2, "head_dim": 16}
IMAGE = SIZES | {"image_size": 16, "patch_size": 4}


class Model(NamedTuple):
    """norms: the number of norms in two layers and at the end. how: their entry in the report."""

    cls: str
    config: str
    sizes: dict
    norms: int
    how: str
    options: dict = {}  # noqa: RUF012


EARLY = "rms_norm offset=0.0 rounding=early eps=1e-06 output_dtype=promote_types(input, weight)"
LATE = "rms_norm offset=0.0 rounding=late eps=1e-05"
OFFSET_1 = "rms_norm offset=1.0 rounding=late eps=1e-06"
LAYER = "layer_norm offset=0.0 rounding=late eps={}"
MODELS = {
    "llama": Model("LlamaForCausalLM", "LlamaConfig", HEADS, 5, EARLY),
    "mistral": Model("MistralForCausalLM", "MistralConfig", HEADS, 5, EARLY),
    "qwen2": Model("Qwen2ForCausalLM", "Qwen2Config", HEADS, 5, EARLY),
    "qwen3": Model("Qwen3ForCausalLM", "Qwen3Config", HEADS, 9, EARLY),
    "gemma2": Model("Gemma2ForCausalLM", "Gemma2Config", HEADS, 9, OFFSET_1),
    "gemma3": Model("Gemma3ForCausalLM", "Gemma3TextConfig", HEADS, 13, OFFSET_1),
    "olmo2": Model("Olmo2ForCausalLM", "Olmo2Config", HEADS, 9, LATE),
    "phi3": Model("Phi3ForCausalLM", "Phi3Config", HEADS, 5, EARLY.replace("06", "05")),
    "gpt-neox": Model("GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT, 5, LAYER.format(1e-5)),
    "bert": Model(
        "BertModel", "BertConfig", TEXT, 5, LAYER.format(1e-12), {"add_pooling_layer": False}
    ),
    "vit": Model(
        "ViTModel", "ViTConfig", IMAGE, 5, LAYER.format(1e-12), {"add_pooling_layer": False}
    ),
}
EACH_MODEL = pytest.mark.parametrize("name", MODELS)
CAUSAL = [name for name, model in MODELS.items() if "Causal" in model.cls]


def built(name: str) -> nn.Module:
    """A model whose norm weights and biases are not all ones and zeros."""
    model = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, model.config)(**model.sizes)
    module = getattr(transformers, model.cls)(config, **model.options).eval()
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            if parameter.dim() == 1:
                parameter += 0.3 * random(*parameter.shape, seed=seed)
    return module


def step(model: nn.Module, name: str, run=None) -> dict[str, Tensor]:
    """The outputs and the gradient of every parameter, by name."""
    parameter = next(model.parameters())
    if name == "vit":
        inputs = {"pixel_values": random(2, 3, 16, 16, dtype=torch.bfloat16).to(parameter)}
    else:
        inputs = {"input_ids": torch.arange(24, device=parameter.device).reshape(2, 12) * 5 % 128}
    if name in CAUSAL:
        inputs["use_cache"] = False
    y = (model if run is None else run)(**inputs)[0]
    dy = random(*y.shape, dtype=torch.bfloat16).to(y)
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(y, list(named.values()), dy)
    return {"outputs": y.detach(), **dict(zip(named, grads, strict=True))}


class InFloat64(TorchFunctionMode):
    """Turns every cast to float32 inside a model into a cast to float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        function = torch.Tensor.double if function is torch.Tensor.float else function
        args = [torch.float64 if a is torch.float32 else a for a in args]
        kwargs = {n: torch.float64 if a is torch.float32 else a for n, a in (kwargs or {}).items()}
        return function(*args, **kwargs)


def exact(model: nn.Module, name: str) -> dict[str, Tensor]:
    with InFloat64():
        return step(copy.deepcopy(model).cpu().double(), name)


def errors(results: dict[str, Tensor], truth: dict[str, Tensor], dtype) -> dict[str, float]:
    """The error of each tensor in the 2-norm, relative to the norm of the true tensor.

    The error of a gradient that is nearly zero is relative to the largest gradient's norm. The
    gradient of attention's key bias is such a gradient: its terms add up to 0.
    """
    gradients = max(t.norm() for n, t in truth.items() if n != "outputs")
    result = {}
    for name, tensor in truth.items():
        size = tensor.norm()
        if name != "outputs" and size < torch.finfo(dtype).eps * gradients:
            size = gradients
        result[name] = ((results[name].cpu() - tensor).norm() / size).item()
    return result


def assert_as_exact(patched, original, truth, dtype):
    """The budget of a gradient is twice the largest error of the original model's gradients."""
    patched_errors, original_errors = (errors(r, truth, dtype) for r in (patched, original))
    for names in (["outputs"], [n for n in truth if n != "outputs"]):
        budget = TIMES_TORCH * max(original_errors[n] for n in names)
        over = {n: patched_errors[n] for n in names if not patched_errors[n] <= budget}
        assert not over, f"errors over the budget of {budget:.2g}: {over}"


@EACH_MODEL
def test_every_norm_is_recognised(name):
    report = tilenorm.patch(built(name))
    assert [entry.how for entry in report.patched] == [MODELS[name].how] * MODELS[name].norms
    assert not report.left


def check(name, device, dtype, prepare=lambda model: model, autocast=False):
    """Compare a patched model with the original. prepare: maps the patched model to what runs."""
    model = built(name).to(device, dtype)
    truth = exact(model, name)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        original = step(model, name)
        tilenorm.patch(model)
        patched = step(model, name, prepare(model))
    assert {n: t.dtype for n, t in patched.items()} == {n: t.dtype for n, t in original.items()}
    assert_as_exact(patched, original, truth, dtype)


@EACH_DEVICE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@EACH_MODEL
def test_outputs_and_gradients(name, dtype, device):
    check(name, device, dtype)


@EACH_DEVICE
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt-neox"])
def test_outputs_and_gradients_under_autocast(name, device):
    check(name, device, torch.float32, autocast=True)


@NEEDS_GPU
@EACH_MODEL
def test_compiled(name, dynamo):
    check(name, "cuda", torch.bfloat16, partial(torch.compile, fullgraph=True))
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_compiled_without_a_gpu(dynamo):
    check(
        "qwen3", "cpu", torch.float32, partial(torch.compile, fullgraph=True, backend="aot_eager")
    )
    assert dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_saved_model_loads_unpatched(tmp_path):
    model = built("llama")
    tilenorm.patch(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert not isinstance(loaded.model.norm, PatchedNorm)
    assert all(torch.equal(loaded.get_parameter(n), p) for n, p in model.named_parameters())


@EACH_DEVICE
@pytest.mark.parametrize("name", CAUSAL)
def test_generates_the_same_tokens(name, device):
    model = built(name).to(device)
    prompt = torch.arange(8, device=device).reshape(2, 4) * 7 + 1
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(prompt, **options)
    tilenorm.patch(model)
    assert torch.equal(model.generate(prompt, **options), expected)
