"""tilenorm's plugin of SGLang, with a stand-in for SGLang."""

import sys
from functools import partial
from random import Random
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    Olmo2Config,
    PretrainedConfig,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import tilenorm
from tests.support.calls import random
from tilenorm.integrations import engines
from tilenorm.integrations import sglang as plugin

from . import stand_in_sglang
from .rounding_models import MODELS
from .stand_in_sglang import RAN


@pytest.fixture
def sglang(monkeypatch):
    """The stand-in. `load` registers the plugin, as SGLang does at its start, and loads a model."""
    modules = stand_in_sglang.modules()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("TILENORM_ROUNDING", "SGLANG_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TILENORM_ENGINES", "1")
    RAN.clear()
    registry = modules["sglang.srt.plugins.hook_registry"].HookRegistry

    def start():
        plugin.register()
        registry.apply_hooks()
        assert not registry.failed

    def load(config, **norms) -> engines.Report:
        model = nn.Module()
        for name, norm in norms.items():
            setattr(model, name, norm)
        model_config = SimpleNamespace(hf_config=config, dtype=torch.bfloat16)
        modules["sglang.srt.model_executor.model_runner"].ModelRunner(
            model, model_config
        ).load_model()
        return getattr(model, "tilenorm_report", None)

    return SimpleNamespace(
        layers=modules["sglang.srt.layers.layernorm"],
        comm=modules["sglang.srt.layers.flashinfer_comm_fusion"],
        heads=modules["sglang.kernels.ops.layernorm.norm"],
        registry=registry,
        start=start,
        load=load,
    )


# SGLang's layer for a norm of each model.
LAYERS = {"llama": "RMSNorm", "qwen3": "RMSNorm", "olmo2": "RMSNorm"}
LAYERS |= {"gemma2": "GemmaRMSNorm", "gemma3": "Gemma3RMSNorm"}
# A configuration, Hugging Face's class, and SGLang's layer.
NORMS: dict[str, tuple] = {name: (*of, LAYERS[name]) for name, of in MODELS.items()}
NORMS["opt"] = (partial(PretrainedConfig, model_type="opt"), nn.LayerNorm, "LayerNorm")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", NORMS)
def test_a_layer_has_the_bits_of_the_models_class(name, seed, sglang):
    """Drawn: sizes, heads or rows, a residual and what is added to it, and the forward called."""
    rng = Random(f"{name} {seed}")
    config, cls, layer = NORMS[name]
    sglang.start()
    hidden, eps = rng.choice((64, 96, 256, 1000)), rng.choice((1e-5, 1e-6))
    dtype = rng.choice((torch.bfloat16, torch.float16))
    norm, theirs = getattr(sglang.layers, layer)(hidden, eps), cls(hidden, eps=eps)
    norm = norm if layer == "LayerNorm" else norm.to(dtype)
    for seeded, (name, parameter) in enumerate(theirs.named_parameters()):
        parameter.data = random(hidden, dtype=dtype, seed=seeded + 5)
        getattr(norm, name).data = parameter.data.to(getattr(norm, name).dtype)
    sglang.load(config(), norm=norm)
    x = random(*rng.choice(((5,), (3, 2))), hidden, dtype=dtype)
    call = getattr(norm, rng.choice(("forward", "forward_native", "forward_cuda")))
    with torch.no_grad():
        if layer != "LayerNorm" and rng.random() < 0.7:
            added = [random(*x.shape, dtype=dtype, seed=1)]
            if layer != "Gemma3RMSNorm" and rng.random() < 0.5:
                added.append(random(*x.shape, dtype=dtype, seed=2))
            y, total = call(x, *added)
            x = x + (added[0] if len(added) == 1 else added[0] + added[1])
            assert torch.equal(total, x)
        else:
            y = call(x)
        assert torch.equal(y, theirs(x))
    assert not RAN, "SGLang's own code ran"


@pytest.mark.parametrize("scale_shift", (0.0, 1.0))
def test_gemma_4(scale_shift, sglang, monkeypatch):
    monkeypatch.setenv("TILENORM_ROUNDING", "late")
    sglang.start()
    norm = sglang.layers.Gemma4RMSNorm(64, scale_shift=scale_shift)
    bare = sglang.layers.Gemma4RMSNorm(64, scale_shift=scale_shift, with_scale=False)
    norm.weight.data = bare.weight.data = random(64, seed=1)
    sglang.load(LlamaConfig(), norm=norm, bare=bare)
    x = random(3, 64)
    expected = tilenorm.rms_norm(x, (64,), norm.weight, norm.eps, offset=scale_shift)
    assert torch.equal(norm(x), expected)
    assert torch.equal(bare(x), tilenorm.rms_norm(x, (64,), None, norm.eps))
    assert not RAN


def test_the_layers_own_rounding_and_dtypes(sglang):
    """rl_on_policy_target: the layer rounds early, whatever the model, and float32 goes on."""
    sglang.start()
    norm = sglang.layers.RMSNorm(
        64,
        cast_x_before_out_mul=True,
        weight_dtype=torch.float32,
        override_orig_dtype=torch.float32,
        fp32_residual=True,
    )
    norm.weight.data = random(64, seed=1)
    report = sglang.load(Olmo2Config(), norm=norm)
    assert report.ran[0].how == "rounding=early, as the engine's layer has it"
    x, residual = (random(3, 64, dtype=torch.bfloat16, seed=n) for n in (0, 1))
    y, total = norm(x, residual)
    assert torch.equal(total, x.float() + residual.float())
    assert torch.equal(y, LlamaRMSNorm(64).requires_grad_(False).forward(total) * norm.weight)
    assert not RAN


def test_what_is_left_runs_sglangs_code_once(sglang):
    class Own(sglang.layers.RMSNorm):
        def forward_cuda(self, x):
            RAN["Own", "cuda"] += 1
            return super().forward_cuda(x)

    sglang.start()
    norms = {
        "partial": sglang.layers.RMSNorm(64, var_hidden_size=32),
        "own": Own(64),
        "unknown": sglang.layers.Gemma3RMSNorm(64),
        "other": nn.RMSNorm(64),
    }
    quantizes, served = sglang.layers.RMSNorm(64), sglang.layers.RMSNorm(64)
    quantizes._quant_linear = object()
    report = sglang.load(LlamaConfig(), **norms, quantizes=quantizes, served=served)
    assert {e.name: e.how.split(";")[0] for e in report.left} == {
        "partial": "normalises by a part of the row",
        "own": "has a forward_cuda of its own",
        "unknown": "Hugging Face's code of llama has no such norm",
        "other": "is not a layer that tilenorm replaces",
    }
    x = random(3, 64)
    ran = {"partial": ("RMSNorm", "native"), "own": ("RMSNorm", "cuda")}
    ran |= {"unknown": ("Gemma3RMSNorm", "native"), "quantizes": ("RMSNorm", "cuda")}
    for name, key in ran.items():
        RAN.clear()
        (norms | {"quantizes": quantizes})[name](x)
        assert RAN[key] == 1 and sum(RAN.values()) == (2 if name == "own" else 1)
    for rows in (x[:0], x.double()):
        RAN.clear()
        served(rows)
        assert RAN == {("RMSNorm", "cuda"): 1}
    RAN.clear()
    sglang.layers.RMSNorm.forward_cuda(served, x, None, None, object())  # for a projection
    assert RAN == {("RMSNorm", "cuda"): 1}


def test_kernels_beside_the_layers_decline(sglang):
    assert sglang.heads.can_use_fused_inplace_qknorm(64, torch.bfloat16)
    sglang.start()
    reduced = sglang.comm.flashinfer_allreduce_residual_rmsnorm
    assert reduced(input_tensor=None, eps=1e-6) == (None, None)
    assert not sglang.heads.can_use_fused_inplace_qknorm(64, torch.bfloat16)


def test_a_layer_norm_that_would_round_its_input(sglang):
    """SGLang's rounds x to the layer's dtype first."""
    sglang.start()
    norm = sglang.layers.LayerNorm(64, dtype=torch.bfloat16)
    sglang.load(PretrainedConfig(model_type="opt"), norm=norm)
    norm(random(3, 64))
    assert RAN == {("LayerNorm", "native"): 1}


@pytest.mark.parametrize("setting", ("SGLANG_PLUGINS=tilenorm", "TILENORM_ENGINES=1", "A=1"))
def test_it_does_nothing_until_it_is_asked_for(setting, sglang, monkeypatch):
    monkeypatch.delenv("TILENORM_ENGINES")
    monkeypatch.setenv(*setting.split("="))
    plugin.register()
    assert bool(sglang.registry.hooks) == (setting != "A=1")


def test_register_twice(sglang):
    plugin.register()
    sglang.start()
    norm, theirs = sglang.layers.RMSNorm(64), LlamaRMSNorm(64)
    sglang.load(LlamaConfig(), norm=norm)
    assert torch.equal(norm(random(3, 64)), theirs(random(3, 64))) and not RAN


def test_a_plugin_that_fails_stops_sglang(sglang, monkeypatch):
    """SGLang only logs an exception, and a target that is not there."""
    del sglang.layers.Gemma4RMSNorm
    with pytest.raises(SystemExit, match=r"plugin of SGLang failed; .*Gemma4RMSNorm"):
        plugin.register()
    monkeypatch.setenv("TILENORM_ROUNDING", "down")
    with pytest.raises(SystemExit, match="TILENORM_ROUNDING takes late or early"):
        plugin.register()


def test_warming(sglang, monkeypatch):
    sglang.start()
    norms = {"a": sglang.layers.RMSNorm(64), "b": sglang.layers.LayerNorm(64)}
    model = nn.ModuleDict(norms)
    config = LlamaConfig()
    config.vision_config = PretrainedConfig(model_type="opt")
    sglang.load(config, **norms)
    ran = []
    monkeypatch.setattr(engines, "MANY_BYTES", 1 << 12)

    def run(layer, x, residual):
        if residual is not None and "LayerNorm" in type(layer).__name__:
            return plugin._run(layer, x, residual)  # does nothing
        ran.append((type(layer).__name__, len(x), residual is not None))
        plugin._run(layer, x, residual)

    engines.warm(model, torch.bfloat16, torch.device("cpu"), run)
    assert sorted(ran) == [
        (name, rows, with_residual)
        for name in ("LayerNorm", "RMSNorm")
        for rows in (8, 32)
        for with_residual in ((False,) if name == "LayerNorm" else (False, True))
    ]
    assert not RAN
