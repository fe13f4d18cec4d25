"""tilenorm's plugins of vLLM and of SGLang, with stand-ins for these engines.

test_vllm_engine.py runs vLLM itself.
"""

import logging
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    Olmo2Config,
    OPTConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3NextConfig,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

import tilenorm
from tests.support.calls import random
from tilenorm.integrations import engines
from tilenorm.integrations import sglang as of_sglang
from tilenorm.integrations import vllm as of_vllm

from . import stand_in_sglang, stand_in_vllm
from .rounding_models import MODELS


@dataclass
class Engine:
    """A stand-in, with tilenorm asked for and not yet registered."""

    name: str
    plugin: ModuleType
    modules: dict[str, Any]
    layers: Any  # the module of its layers
    own: Counter  # calls of the engine's own code, by class and method
    start: Callable[[], None]  # registers the plugin, as the engine does at its start
    load: Callable[..., None]  # loads a model, of a configuration of Hugging Face
    is_registered: Callable[[], bool]


class Block(nn.Module):
    """A part of a model: it holds norms."""

    def __init__(self, **norms):
        super().__init__()
        for name, norm in norms.items():
            setattr(self, name, norm)


class Reading(Block):
    """A part that passes a norm's weight to a kernel of its own."""

    def forward(self, x):
        return x * self.q_norm.weight


def install(monkeypatch, modules: dict, own: Counter) -> None:
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("TILENORM_ROUNDING", "VLLM_PLUGINS", "SGLANG_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TILENORM_ENGINES", "1")
    own.clear()


@pytest.fixture
def vllm(monkeypatch):
    modules = stand_in_vllm.modules()
    install(monkeypatch, modules, stand_in_vllm.RAN)
    of_vllm.layers.cache_clear()
    registry = modules["vllm.model_executor.custom_op"].op_registry_oot
    factors = modules["vllm.envs"].environment_variables
    loaders = modules["vllm.model_executor.model_loader"]

    def load(model, config, loader="BaseModelLoader"):
        model_config = SimpleNamespace(hf_config=config, dtype=torch.bfloat16)
        getattr(loaders, loader)().load_model(SimpleNamespace(model=model), model_config)

    def is_registered():
        assert bool(registry) == bool(factors)
        return bool(registry)

    layers = modules["vllm.model_executor.layers.layernorm"]
    own = stand_in_vllm.RAN
    yield Engine("vllm", of_vllm, modules, layers, own, of_vllm.register, load, is_registered)
    of_vllm.layers.cache_clear()


@pytest.fixture
def sglang(monkeypatch):
    modules = stand_in_sglang.modules()
    install(monkeypatch, modules, stand_in_sglang.RAN)
    registry = modules["sglang.srt.plugins.hook_registry"].HookRegistry

    def start():
        of_sglang.register()
        registry.apply_hooks()
        assert not registry.failed

    def load(model, config):
        model_config = SimpleNamespace(hf_config=config, dtype=torch.bfloat16)
        runner = modules["sglang.srt.model_executor.model_runner"].ModelRunner
        runner(model, model_config).load_model()

    layers = modules["sglang.srt.layers.layernorm"]
    own = stand_in_sglang.RAN
    return Engine(
        "sglang", of_sglang, modules, layers, own, start, load, lambda: bool(registry.hooks)
    )


@pytest.fixture(params=["vllm", "sglang"])
def engine(request) -> Engine:
    return request.getfixturevalue(request.param)


def loaded(engine: Engine, config, **norms) -> engines.Report:
    """What is told of a model of these norms that an engine has loaded."""
    model = Block(**norms)
    engine.load(model, config)
    return model.tilenorm_report


# Of both engines.

# A configuration, Hugging Face's class, and the engines' layer for a norm of each model.
LAYERS = {"gemma2": "GemmaRMSNorm", "gemma3": "GemmaRMSNorm"}
NORMS: dict[str, tuple] = {n: (*of, LAYERS.get(n, "RMSNorm")) for n, of in MODELS.items()}
NORMS["opt"] = (OPTConfig, nn.LayerNorm, "LayerNorm")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", NORMS)
def test_a_layer_has_the_bits_of_the_models_class(name, seed, engine):
    """Drawn: sizes, strided heads or rows, a residual, and which forward the engine calls. SGLang
    adds another tensor to a residual.
    """
    rng = Random(f"{name} {seed}")
    config, cls, layer = NORMS[name]
    adds = engine.name == "sglang"
    layer = "Gemma3RMSNorm" if adds and name == "gemma3" else layer
    engine.start()
    hidden, eps = rng.choice((64, 96, 256, 1000)), rng.choice((1e-5, 1e-6))
    dtype = rng.choice((torch.bfloat16, torch.float16))
    norm, theirs = getattr(engine.layers, layer)(hidden, eps), cls(hidden, eps=eps)
    wide = adds and layer == "LayerNorm"  # of SGLang's dtype, float32
    for seeded, (key, parameter) in enumerate(theirs.named_parameters()):
        parameter.data = random(hidden, dtype=dtype, seed=seeded + 5)
        getattr(norm, key).data = parameter.data.float() if wide else parameter.data
    loaded(engine, config(), norm=norm)
    rows, heads = rng.randint(1, 9), rng.choice((None, None, 3))
    if heads:
        x = random(rows, 2 * heads * hidden, dtype=dtype)[:, : heads * hidden]
        x = x.unflatten(-1, (heads, hidden))
    else:
        x = random(rows, hidden, dtype=dtype)
    call = getattr(norm, rng.choice(("forward", "forward_native", "forward_cuda")))
    with torch.no_grad():
        if layer != "LayerNorm" and not heads and rng.random() < 0.7:
            count = 1 + (adds and layer != "Gemma3RMSNorm" and rng.random() < 0.5)
            added = [random(rows, hidden, dtype=dtype, seed=1 + i) for i in range(count)]
            y, total = call(x, *added)
            x = x + (added[0] if count == 1 else added[0] + added[1])
            assert torch.equal(total, x)
        else:
            y = call(x)
        assert torch.equal(y, theirs(x))
    assert not engine.own, "the engine's own code ran"


ASKED = {
    "TILENORM_ENGINES=1": True,
    "PLUGINS=tilenorm": True,
    "PLUGINS=other, tilenorm": True,
    "PLUGINS=other": False,
    "TILENORM_ENGINES=0": False,
    "TILENORM_ENGINES=": False,
}


@pytest.mark.parametrize("setting", ASKED)
def test_it_does_nothing_until_it_is_asked_for(setting, engine, monkeypatch):
    monkeypatch.delenv("TILENORM_ENGINES")
    name, value = setting.split("=", 1)
    name = f"{engine.name.upper()}_PLUGINS" if name == "PLUGINS" else name
    monkeypatch.setenv(name, value)
    engine.plugin.register()
    assert engine.is_registered() == ASKED[setting]


def test_register_twice(engine):
    engine.plugin.register()
    engine.start()
    norm, theirs = engine.layers.RMSNorm(64), LlamaRMSNorm(64)
    loaded(engine, LlamaConfig(), norm=norm)
    assert torch.equal(norm(random(3, 64)), theirs(random(3, 64))) and not engine.own


def test_a_plugin_that_fails_stops_the_engine(engine, monkeypatch):
    """SGLang only logs an exception, and a target that is not there."""
    stops = (RuntimeError, ValueError) if engine.name == "vllm" else SystemExit
    del engine.layers.GemmaRMSNorm
    with pytest.raises(stops, match=r"plugin of (vLLM|SGLang) failed; .*GemmaRMSNorm"):
        engine.plugin.register()
    monkeypatch.setenv("TILENORM_ROUNDING", "down")
    with pytest.raises(stops, match="TILENORM_ROUNDING takes late or early, got 'down'"):
        engine.plugin.register()


def test_warming_runs_each_kind_for_few_and_many_rows(engine, monkeypatch):
    """Once for each, with and without a residual."""
    engine.start()
    model = Block(
        a=engine.layers.RMSNorm(64),
        b=engine.layers.RMSNorm(64),
        c=engine.layers.RMSNorm(128),
        d=engine.layers.LayerNorm(64),
        left=engine.layers.GemmaRMSNorm(64),
    ).bfloat16()
    config = LlamaConfig()
    config.vision_config = OPTConfig()
    engine.load(model, config)
    ran = []
    monkeypatch.setattr(engines, "MANY_BYTES", 1 << 12)

    def run(layer, x, residual):
        name = type(layer).__name__.removeprefix("Tile")
        if residual is None or name != "LayerNorm":  # _run does nothing with both
            ran.append((name, tuple(x.shape), x.dtype, residual is not None))
        engine.plugin._run(layer, x, residual)

    engines.warm(model, torch.bfloat16, torch.device("cpu"), run)
    assert sorted(ran) == sorted(
        (name, (rows, width), torch.bfloat16, with_residual)
        for name, width in (("RMSNorm", 64), ("RMSNorm", 128), ("LayerNorm", 64))
        for rows in (8, (1 << 12) // (2 * width))
        for with_residual in ((False,) if name == "LayerNorm" else (False, True))
    )
    assert not engine.own


# Of vLLM alone.


@pytest.mark.parametrize("seed", range(2))
def test_a_gate_has_the_rounding_of_the_models_class(seed, vllm):
    rng = Random(seed)
    vllm.start()
    hidden = rng.choice((64, 128))
    norm = vllm.layers.RMSNormGated(hidden, norm_before_gate=True).bfloat16()
    theirs = Qwen3NextRMSNormGated(hidden, eps=norm.eps).bfloat16()
    norm.weight.data = theirs.weight.data = random(hidden, dtype=torch.bfloat16, seed=2)
    report = loaded(vllm, Qwen3NextConfig(), norm=norm)
    assert "Qwen3NextRMSNormGated" in report.ran[0].how
    x, gate = (random(5, hidden, dtype=torch.bfloat16, seed=n) for n in (0, 1))
    with torch.no_grad():
        assert torch.equal(norm(x, gate), theirs(x, gate))
    assert not vllm.own


def test_groups_of_a_gated_norm(vllm):
    """Each has its part of the weight, and is normalised by itself."""
    vllm.start()
    norm = vllm.layers.RMSNormGated(96, group_size=32, norm_before_gate=True).bfloat16()
    norm.weight.data = random(96, dtype=torch.bfloat16, seed=2)
    one = vllm.layers.RMSNormGated(32, norm_before_gate=True).bfloat16()
    loaded(vllm, Qwen3NextConfig(), norm=norm, one=one)
    x, gate = (random(5, 96, dtype=torch.bfloat16, seed=n) for n in (0, 1))
    parts = []
    for number, (rows, gates) in enumerate(zip(x.split(32, -1), gate.split(32, -1), strict=True)):
        one.weight.data = norm.weight.data[32 * number : 32 * number + 32]
        parts.append(one(rows, gates))
    assert torch.equal(norm(x, gate), torch.cat(parts, -1))
    assert not vllm.own


def test_a_residual_of_another_dtype(vllm):
    """The sum has the input's dtype, as vLLM's, and the norm is that of the rounded sum."""
    vllm.start()
    norm, theirs = vllm.layers.RMSNorm(64).bfloat16(), LlamaRMSNorm(64).bfloat16()
    loaded(vllm, LlamaConfig(), norm=norm)
    x, residual = random(5, 64, dtype=torch.bfloat16), random(5, 64, seed=1)
    y, total = norm(x, residual)
    assert total.dtype == torch.bfloat16 and torch.equal(total, (x + residual).bfloat16())
    assert torch.equal(y, theirs(total))


def test_what_is_left_runs_vllms_code_once(vllm):
    """Also where its forward_cuda calls self.forward_native, which is tilenorm's."""
    vllm.start()
    norms = {
        "partial": vllm.layers.RMSNorm(64, var_hidden_size=32),
        "unknown": vllm.layers.GemmaRMSNorm(64),
        "served": vllm.layers.RMSNorm(64),
        "other": nn.RMSNorm(64),
    }
    report = loaded(vllm, LlamaConfig(), **norms)
    assert {e.name: e.how for e in report.left} == {
        "partial": "normalises by a part of the row",
        "unknown": "Hugging Face's code of llama has no such norm; TILENORM_ROUNDING=early or late"
        " decides",
        "other": "is not a layer that tilenorm replaces",
    }
    x = random(3, 64)
    for name, key in (("partial", "RMSNorm"), ("unknown", "GemmaRMSNorm")):
        for method in ("forward_cuda", "forward_native"):
            vllm.own.clear()
            getattr(norms[name], method)(x)
            assert {(key, "native"): 1} == vllm.own
    vllm.own.clear()
    norms["served"](x.double())  # no kernel takes it
    assert vllm.own == {("RMSNorm", "native"): 1}


def test_batch_invariant_mode(vllm):
    """tilenorm's layer serves it; what is left runs vLLM's batch-invariant code."""
    vllm.start()
    served, left = vllm.layers.RMSNorm(64), vllm.layers.RMSNorm(64, var_hidden_size=32)
    loaded(vllm, LlamaConfig(), served=served, left=left)
    vllm.layers.envs.VLLM_BATCH_INVARIANT = True
    served(random(3, 64))
    assert not vllm.own
    left(random(3, 64))
    assert vllm.own == {("RMSNorm", "batch-invariant"): 1}


def test_a_model_without_one_rounding_is_left(vllm, monkeypatch):
    """Its parts round differently, or Hugging Face has no code of it. TILENORM_ROUNDING decides."""
    config = LlamaConfig()
    config.vision_config = Olmo2Config()
    vllm.start()
    texts = {}
    for name, one in {"parts": config, "none": PretrainedConfig()}.items():
        report = loaded(vllm, one, norm=vllm.layers.RMSNorm(64))
        texts[name] = str(report)
        assert not report.ran
    assert "LlamaRMSNorm (early) and Olmo2RMSNorm (late)" in texts["parts"]
    assert "0 of 1 norms of Block run tilenorm\n  left: TileRMSNorm Hugging" in texts["none"]
    for rounding in ("early", "late"):
        monkeypatch.setenv("TILENORM_ROUNDING", rounding)
        report = loaded(vllm, config, norm=vllm.layers.RMSNorm(64))
        assert report.ran[0].how == f"rounding={rounding}, as TILENORM_ROUNDING says"


def test_a_norm_without_a_weight_has_no_rounding_to_choose(vllm):
    vllm.start()
    norms = {
        "rms": vllm.layers.RMSNorm(64, has_weight=False),
        "layer": vllm.layers.LayerNorm(64, elementwise_affine=False),
    }
    report = loaded(vllm, PretrainedConfig(), **norms)
    assert [e.name for e in report.ran] == ["rms", "layer"] and "left: none" in str(report)
    for norm in norms.values():
        norm(random(2, 64))
    assert not vllm.own


def test_the_report(vllm, caplog):
    caplog.set_level(logging.INFO)
    vllm.start()
    model = Block(
        a=Reading(q_norm=vllm.layers.RMSNorm(64)),
        b=Block(q_norm=vllm.layers.RMSNorm(64)),
        c=Block(q_norm=vllm.layers.RMSNorm(64)),
        d=nn.Linear(2, 2),
    )
    vllm.load(model, Qwen3Config())
    text = of_vllm.report(model)
    assert text == (
        "3 of 3 norms of Block run tilenorm; left: none\n"
        "  TileRMSNorm rounding=early, as Qwen3RMSNorm of Hugging Face: a.q_norm, 1 others and"
        " c.q_norm\n"
        "  TileRMSNorm may be passed by in Reading, which reads its weight: a.q_norm"
    )
    [record] = caplog.records
    assert record.levelno == logging.WARNING and text in record.message
    assert "fingerprint " in record.message
    with pytest.raises(RuntimeError, match="was not asked for when Linear was loaded"):
        of_vllm.report(model.d)


def test_every_loader_prepares(vllm):
    vllm.start()
    model = Block(norm=vllm.layers.RMSNorm(64))
    vllm.load(model, LlamaConfig(), "TensorizerLoader")
    assert len(model.tilenorm_report.ran) == 1


def test_a_layer_has_the_name_of_vllms_own(vllm):
    """By which custom_ops=["+rms_norm"] finds it."""
    vllm.start()
    registry = vllm.modules["vllm.model_executor.custom_op"].op_registry_oot
    assert registry["RMSNorm"].name == "rms_norm"
    assert registry["GemmaRMSNorm"].name == "gemma_rms_norm"


def test_the_key_of_compiled_models(vllm, monkeypatch):
    """A rounding is another key, and so are other files of tilenorm."""
    keys, factors = set(), vllm.modules["vllm.envs"].environment_variables
    for rounding in ("", "early", "late"):
        monkeypatch.setenv("TILENORM_ROUNDING", rounding)
        vllm.start()
        keys.add(factors["TILENORM"]())
    monkeypatch.setattr(of_vllm, "code_digest", lambda: "others")
    vllm.start()
    keys.add(factors["TILENORM"]())
    assert len(keys) == 4


def test_beside_another_plugin_that_replaces_a_layer(vllm):
    vllm.modules["vllm.model_executor.custom_op"].op_registry_oot["RMSNorm"] = Block
    with pytest.raises(RuntimeError, match=r"plugin of vLLM failed; .*another plugin replaces"):
        vllm.start()


# Of SGLang alone.


@pytest.mark.parametrize("scale_shift", (0.0, 1.0))
def test_gemma_4(scale_shift, sglang, monkeypatch):
    monkeypatch.setenv("TILENORM_ROUNDING", "late")
    sglang.start()
    norm = sglang.layers.Gemma4RMSNorm(64, scale_shift=scale_shift)
    bare = sglang.layers.Gemma4RMSNorm(64, scale_shift=scale_shift, with_scale=False)
    norm.weight.data = bare.weight.data = random(64, seed=1)
    loaded(sglang, LlamaConfig(), norm=norm, bare=bare)
    x = random(3, 64)
    expected = tilenorm.rms_norm(x, (64,), norm.weight, norm.eps, offset=scale_shift)
    assert torch.equal(norm(x), expected)
    assert torch.equal(bare(x), tilenorm.rms_norm(x, (64,), None, norm.eps))
    assert not sglang.own


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
    report = loaded(sglang, Olmo2Config(), norm=norm)
    assert report.ran[0].how == "rounding=early, as the engine's layer has it"
    x, residual = (random(3, 64, dtype=torch.bfloat16, seed=n) for n in (0, 1))
    y, total = norm(x, residual)
    assert torch.equal(total, x.float() + residual.float())
    assert torch.equal(y, LlamaRMSNorm(64).requires_grad_(False).forward(total) * norm.weight)
    assert not sglang.own


def test_what_is_left_runs_sglangs_code_once(sglang):
    class Own(sglang.layers.RMSNorm):
        def forward_cuda(self, x):
            sglang.own["Own", "cuda"] += 1
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
    report = loaded(sglang, LlamaConfig(), **norms, quantizes=quantizes, served=served)
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
        sglang.own.clear()
        (norms | {"quantizes": quantizes})[name](x)
        assert sglang.own[key] == 1 and sum(sglang.own.values()) == (2 if name == "own" else 1)
    for rows in (x[:0], x.double()):
        sglang.own.clear()
        served(rows)
        assert sglang.own == {("RMSNorm", "cuda"): 1}
    sglang.own.clear()
    sglang.layers.RMSNorm.forward_cuda(served, x, None, None, object())  # for a projection
    assert sglang.own == {("RMSNorm", "cuda"): 1}


def test_kernels_beside_the_layers_decline(sglang):
    heads = sglang.modules["sglang.kernels.ops.layernorm.norm"]
    assert heads.can_use_fused_inplace_qknorm(64, torch.bfloat16)
    sglang.start()
    fusion = sglang.modules["sglang.srt.layers.flashinfer_comm_fusion"]
    reduced = fusion.flashinfer_allreduce_residual_rmsnorm
    assert reduced(input_tensor=None, eps=1e-6) == (None, None)
    assert not heads.can_use_fused_inplace_qknorm(64, torch.bfloat16)


def test_a_layer_norm_that_would_round_its_input(sglang):
    """SGLang's rounds x to the layer's dtype first."""
    sglang.start()
    norm = sglang.layers.LayerNorm(64, dtype=torch.bfloat16)
    loaded(sglang, PretrainedConfig(model_type="opt"), norm=norm)
    norm(random(3, 64))
    assert sglang.own == {("LayerNorm", "native"): 1}
