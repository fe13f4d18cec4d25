"""tilenorm's plugin of vLLM, with a stand-in for vLLM. test_vllm_engine.py runs vLLM itself."""

import logging
import sys
from random import Random
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    LlamaConfig,
    Olmo2Config,
    OPTConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3NextConfig,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from tests.support.calls import random
from tilenorm.integrations import engines
from tilenorm.integrations import vllm as plugin

from . import stand_in_vllm
from .rounding_models import MODELS
from .stand_in_vllm import RAN


@pytest.fixture
def vllm(monkeypatch):
    """The stand-in, with tilenorm asked for and not yet registered."""
    modules = stand_in_vllm.modules()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("TILENORM_ROUNDING", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TILENORM_ENGINES", "1")
    plugin.layers.cache_clear()
    RAN.clear()
    yield SimpleNamespace(
        layers=modules["vllm.model_executor.layers.layernorm"],
        registry=modules["vllm.model_executor.custom_op"].op_registry_oot,
        loaders=modules["vllm.model_executor.model_loader"],
        factors=modules["vllm.envs"].environment_variables,
    )
    plugin.layers.cache_clear()


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


def loaded(vllm, model: nn.Module, config, loader: str = "BaseModelLoader") -> engines.Report:
    """What a loader of vLLM does with a model."""
    model_config = SimpleNamespace(hf_config=config, dtype=torch.bfloat16)
    getattr(vllm.loaders, loader)().load_model(SimpleNamespace(model=model), model_config)
    return model.tilenorm_report


# vLLM's layer for a norm of each model.
LAYERS = {"llama": "RMSNorm", "qwen3": "RMSNorm", "olmo2": "RMSNorm"}
LAYERS |= {"gemma2": "GemmaRMSNorm", "gemma3": "GemmaRMSNorm"}
# A configuration, Hugging Face's class, and vLLM's layer.
NORMS: dict[str, tuple] = {name: (*of, LAYERS[name]) for name, of in MODELS.items()}
NORMS["opt"] = (OPTConfig, nn.LayerNorm, "LayerNorm")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", NORMS)
def test_a_layer_has_the_bits_of_the_models_class(name, seed, vllm):
    """Drawn: sizes, strided heads or rows, a residual, and which forward the engine calls."""
    rng = Random(f"{name} {seed}")
    config, cls, layer = NORMS[name]
    plugin.register()
    hidden, eps = rng.choice((64, 96, 256, 1000)), rng.choice((1e-5, 1e-6))
    dtype = rng.choice((torch.bfloat16, torch.float16))
    norm, theirs = getattr(vllm.layers, layer)(hidden, eps), cls(hidden, eps=eps)
    for seeded, parameters in enumerate(zip(norm.parameters(), theirs.parameters(), strict=True)):
        for parameter in parameters:
            parameter.data = random(hidden, dtype=dtype, seed=seeded + 5)
    loaded(vllm, Block(norm=norm), config())
    rows = rng.randint(1, 9)
    heads = rng.choice((None, None, 3))
    if heads:
        x = random(rows, 2 * heads * hidden, dtype=dtype)[:, : heads * hidden]
        x = x.unflatten(-1, (heads, hidden))
    else:
        x = random(rows, hidden, dtype=dtype)
    takes_sum = layer != "LayerNorm" and not heads and rng.random() < 0.7
    call = getattr(norm, rng.choice(("forward", "forward_native", "forward_cuda")))
    with torch.no_grad():
        if takes_sum:
            residual = random(rows, hidden, dtype=dtype, seed=1)
            y, total = call(x, residual)
            x = x + residual
            assert torch.equal(total, x)
        else:
            y = call(x)
        assert torch.equal(y, theirs(x))
    assert not RAN, "vLLM's own code ran"


@pytest.mark.parametrize("seed", range(3))
def test_a_gate_has_the_rounding_of_the_models_class(seed, vllm):
    rng = Random(seed)
    plugin.register()
    hidden = rng.choice((64, 128))
    norm = vllm.layers.RMSNormGated(hidden, norm_before_gate=True).bfloat16()
    theirs = Qwen3NextRMSNormGated(hidden, eps=norm.eps).bfloat16()
    norm.weight.data = theirs.weight.data = random(hidden, dtype=torch.bfloat16, seed=2)
    report = loaded(vllm, Block(norm=norm), Qwen3NextConfig())
    assert "Qwen3NextRMSNormGated" in report.ran[0].how
    x, gate = (random(5, hidden, dtype=torch.bfloat16, seed=n) for n in (0, 1))
    with torch.no_grad():
        assert torch.equal(norm(x, gate), theirs(x, gate))
    assert not RAN


def test_groups_of_a_gated_norm(vllm):
    """Each has its part of the weight, and is normalised by itself."""
    plugin.register()
    norm = vllm.layers.RMSNormGated(96, group_size=32, norm_before_gate=True).bfloat16()
    norm.weight.data = random(96, dtype=torch.bfloat16, seed=2)
    one = vllm.layers.RMSNormGated(32, norm_before_gate=True).bfloat16()
    loaded(vllm, Block(norm=norm, one=one), Qwen3NextConfig())
    x, gate = (random(5, 96, dtype=torch.bfloat16, seed=n) for n in (0, 1))
    parts = []
    for number, (rows, gates) in enumerate(zip(x.split(32, -1), gate.split(32, -1), strict=True)):
        one.weight.data = norm.weight.data[32 * number : 32 * number + 32]
        parts.append(one(rows, gates))
    assert torch.equal(norm(x, gate), torch.cat(parts, -1))
    assert not RAN


def test_a_residual_of_another_dtype(vllm):
    """The sum has the input's dtype, as vLLM's, and the norm is that of the rounded sum."""
    plugin.register()
    norm, theirs = vllm.layers.RMSNorm(64).bfloat16(), LlamaRMSNorm(64).bfloat16()
    loaded(vllm, Block(norm=norm), LlamaConfig())
    x, residual = random(5, 64, dtype=torch.bfloat16), random(5, 64, seed=1)
    y, total = norm(x, residual)
    assert total.dtype == torch.bfloat16 and torch.equal(total, (x + residual).bfloat16())
    assert torch.equal(y, theirs(total))


def test_what_is_left_runs_vllms_code_once(vllm):
    """Also where its forward_cuda calls self.forward_native, which is tilenorm's."""
    plugin.register()
    norms = {
        "partial": vllm.layers.RMSNorm(64, var_hidden_size=32),
        "unknown": vllm.layers.GemmaRMSNorm(64),
        "served": vllm.layers.RMSNorm(64),
        "other": nn.RMSNorm(64),
    }
    report = loaded(vllm, Block(**norms), LlamaConfig())
    assert {e.name: e.how for e in report.left} == {
        "partial": "normalises by a part of the row",
        "unknown": "Hugging Face's code of llama has no such norm; TILENORM_ROUNDING=early or late"
        " decides",
        "other": "is not a layer that tilenorm replaces",
    }
    x = random(3, 64)
    for name, key in (("partial", "RMSNorm"), ("unknown", "GemmaRMSNorm")):
        for method in ("forward_cuda", "forward_native"):
            RAN.clear()
            getattr(norms[name], method)(x)
            assert {(key, "native"): 1} == RAN
    RAN.clear()
    norms["served"](x.double())  # no kernel takes it
    assert RAN == {("RMSNorm", "native"): 1}


def test_batch_invariant_mode(vllm):
    """tilenorm's layer serves it; what is left runs vLLM's batch-invariant code."""
    plugin.register()
    served, left = vllm.layers.RMSNorm(64), vllm.layers.RMSNorm(64, var_hidden_size=32)
    loaded(vllm, Block(served=served, left=left), LlamaConfig())
    vllm.layers.envs.VLLM_BATCH_INVARIANT = True
    served(random(3, 64))
    assert not RAN
    left(random(3, 64))
    assert RAN == {("RMSNorm", "batch-invariant"): 1}


def test_a_model_without_one_rounding_is_left(vllm, monkeypatch):
    """Its parts round differently, or Hugging Face has no code of it. TILENORM_ROUNDING decides."""
    config = LlamaConfig()
    config.vision_config = Olmo2Config()
    plugin.register()
    texts = {}
    for name, one in {"parts": config, "none": PretrainedConfig()}.items():
        report = loaded(vllm, Block(norm=vllm.layers.RMSNorm(64)), one)
        texts[name] = str(report)
        assert not report.ran
    assert "LlamaRMSNorm (early) and Olmo2RMSNorm (late)" in texts["parts"]
    assert "0 of 1 norms of Block run tilenorm\n  left: TileRMSNorm Hugging" in texts["none"]
    for rounding in ("early", "late"):
        monkeypatch.setenv("TILENORM_ROUNDING", rounding)
        report = loaded(vllm, Block(norm=vllm.layers.RMSNorm(64)), config)
        assert report.ran[0].how == f"rounding={rounding}, as TILENORM_ROUNDING says"


def test_a_norm_without_a_weight_has_no_rounding_to_choose(vllm):
    plugin.register()
    norms = {
        "rms": vllm.layers.RMSNorm(64, has_weight=False),
        "layer": vllm.layers.LayerNorm(64, elementwise_affine=False),
    }
    report = loaded(vllm, Block(**norms), PretrainedConfig())
    assert [e.name for e in report.ran] == ["rms", "layer"] and "left: none" in str(report)
    for norm in norms.values():
        norm(random(2, 64))
    assert not RAN


def test_the_report(vllm, caplog):
    caplog.set_level(logging.INFO)
    plugin.register()
    model = Block(
        a=Reading(q_norm=vllm.layers.RMSNorm(64)),
        b=Block(q_norm=vllm.layers.RMSNorm(64)),
        c=Block(q_norm=vllm.layers.RMSNorm(64)),
        d=nn.Linear(2, 2),
    )
    loaded(vllm, model, Qwen3Config())
    text = plugin.report(model)
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
        plugin.report(model.d)


@pytest.mark.parametrize("loader", ("BaseModelLoader", "TensorizerLoader"))
def test_every_loader_prepares(loader, vllm):
    plugin.register()
    report = loaded(vllm, Block(norm=vllm.layers.RMSNorm(64)), LlamaConfig(), loader)
    assert len(report.ran) == 1


def test_register_twice(vllm):
    plugin.register()
    registry, names = dict(vllm.registry), {n: c.name for n, c in vllm.registry.items()}
    load = vllm.loaders.BaseModelLoader.load_model
    plugin.register()
    assert vllm.registry == registry and vllm.loaders.BaseModelLoader.load_model is load
    # custom_ops=["+rms_norm"] finds a layer by the name that vLLM's own has.
    assert names["RMSNorm"] == "rms_norm" and names["GemmaRMSNorm"] == "gemma_rms_norm"


ASKED = {
    "TILENORM_ENGINES=1": True,
    "VLLM_PLUGINS=tilenorm": True,
    "VLLM_PLUGINS=other, tilenorm": True,
    "VLLM_PLUGINS=other": False,
    "TILENORM_ENGINES=0": False,
    "TILENORM_ENGINES=": False,
}


@pytest.mark.parametrize("setting", ASKED)
def test_it_does_nothing_until_it_is_asked_for(setting, vllm, monkeypatch):
    monkeypatch.delenv("TILENORM_ENGINES")
    monkeypatch.setenv(*setting.split("=", 1))
    plugin.register()
    assert bool(vllm.registry) == bool(vllm.factors) == ASKED[setting]


def test_the_key_of_compiled_models(vllm, monkeypatch):
    """A rounding is another key, and so are other files of tilenorm."""
    keys = set()
    for rounding in ("", "early", "late"):
        monkeypatch.setenv("TILENORM_ROUNDING", rounding)
        plugin.register()
        keys.add(vllm.factors["TILENORM"]())
    monkeypatch.setattr(plugin, "code_digest", lambda: "others")
    plugin.register()
    keys.add(vllm.factors["TILENORM"]())
    assert len(keys) == 4


def test_a_plugin_that_fails_stops_vllm(vllm, monkeypatch):
    class Other:
        pass

    vllm.registry["RMSNorm"] = Other
    with pytest.raises(RuntimeError, match=r"plugin of vLLM failed; .*another plugin replaces"):
        plugin.register()
    del vllm.registry["RMSNorm"], vllm.layers.GemmaRMSNorm
    plugin.layers.cache_clear()
    with pytest.raises(RuntimeError, match=r"plugin of vLLM failed; .*GemmaRMSNorm"):
        plugin.register()
    monkeypatch.setenv("TILENORM_ROUNDING", "down")
    with pytest.raises(ValueError, match="TILENORM_ROUNDING takes late or early, got 'down'"):
        plugin.register()


def test_warming_runs_each_kind_for_few_and_many_rows(vllm, monkeypatch):
    """Once for each, with and without a residual."""
    plugin.register()
    model = Block(
        a=vllm.layers.RMSNorm(64),
        b=vllm.layers.RMSNorm(64),
        c=vllm.layers.RMSNorm(128),
        d=vllm.layers.LayerNorm(64),
        left=vllm.layers.GemmaRMSNorm(64),
    ).bfloat16()
    config = AutoConfig.for_model("llama")
    config.vision_config = OPTConfig()
    loaded(vllm, model, config)
    ran = []
    monkeypatch.setattr(engines, "MANY_BYTES", 1 << 12)

    def run(layer, x, residual):
        if residual is not None and "LayerNorm" in type(layer).__name__:
            return plugin._run(layer, x, residual)  # does nothing
        ran.append((type(layer).__name__, tuple(x.shape), x.dtype, residual is not None))
        plugin._run(layer, x, residual)

    engines.warm(model, torch.bfloat16, torch.device("cpu"), run)
    assert sorted(ran) == sorted(
        (name, (rows, width), torch.bfloat16, with_residual)
        for name, width in (("TileRMSNorm", 64), ("TileRMSNorm", 128), ("TileLayerNorm", 64))
        for rows in (8, (1 << 12) // (2 * width))
        for with_residual in ((False,) if name == "TileLayerNorm" else (False, True))
    )
    assert not RAN
