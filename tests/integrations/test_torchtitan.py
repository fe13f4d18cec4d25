"""tilenorm's overrides of torchtitan's norms: with a stand-in, and in torchtitan's trainer."""

import json
import subprocess
import sys
from dataclasses import dataclass, fields
from importlib import import_module, util
from pathlib import Path

import pytest
import torch
from torch import nn

import tilenorm
from tests.support.calls import random

from .stand_in_vllm import linked

ROOT = Path(__file__).parents[2]
NAME = "tilenorm.integrations.torchtitan"


@pytest.fixture
def overrides(monkeypatch):
    """tilenorm's module, with a stand-in for what it imports, and what was registered."""
    registered = {}

    @dataclass(kw_only=True, slots=True)
    class OfNorm:
        normalized_shape: int
        eps: float = 1e-5
        elementwise_affine: bool = True
        sharding_config: object = None

        def build(self):
            return self._owner(self)

    class Norm:
        def __init__(self, config):
            super().__init__(config.normalized_shape, config.eps, config.elementwise_affine)

        def __init_subclass__(cls):
            cls.Config._owner = cls

    class RMSNorm(Norm, nn.RMSNorm):
        @dataclass(kw_only=True, slots=True)
        class Config(OfNorm):
            pass

    class LayerNorm(Norm, nn.LayerNorm):
        @dataclass(kw_only=True, slots=True)
        class Config(OfNorm):
            pass

    def override(*, target, exact, description):
        def decorated(function):
            registered[f"{function.__module__}.{function.__name__}"] = target, exact
            return function

        return decorated

    def derive(source, target, **changes):
        shared = {f.name for f in fields(source)} & {f.name for f in fields(target)}
        return target(**{name: getattr(source, name) for name in shared} | changes)

    contents = {
        name: {} for name in ("torchtitan", "torchtitan.models", "torchtitan.models.common")
    }
    contents["torchtitan.config"] = {"derive": derive, "override": override}
    norms = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
    contents["torchtitan.models.common.nn_modules"] = norms
    for name, module in linked(contents).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield import_module(NAME), registered, norms
    sys.modules.pop(NAME, None)
    vars(tilenorm.integrations).pop("torchtitan", None)


@pytest.mark.parametrize("rounding", ("late", "early"))
@pytest.mark.parametrize("affine", (True, False))
def test_rms_norm(rounding, affine, overrides):
    module, registered, norms = overrides
    assert registered[f"{NAME}.rms_norm"] == (norms["RMSNorm"].Config, True)
    sharding = object()
    config = norms["RMSNorm"].Config(
        normalized_shape=64, eps=1e-6, elementwise_affine=affine, sharding_config=sharding
    )
    replaced = module.rms_norm(config, rounding=rounding)
    assert replaced.sharding_config is sharding
    norm = replaced.build().bfloat16()
    assert isinstance(norm, norms["RMSNorm"]) and norm.eps == 1e-6
    if affine:
        norm.weight.data = random(64, dtype=torch.bfloat16, seed=1)
    x = random(3, 64, dtype=torch.bfloat16)
    assert torch.equal(norm(x), tilenorm.rms_norm(x, (64,), norm.weight, 1e-6, rounding=rounding))


def test_layer_norm(overrides):
    module, registered, norms = overrides
    assert registered[f"{NAME}.layer_norm"] == (norms["LayerNorm"].Config, True)
    norm = module.layer_norm(norms["LayerNorm"].Config(normalized_shape=64)).build()
    norm.weight.data, norm.bias.data = random(64, seed=1), random(64, seed=2)
    x = random(3, 64)
    assert torch.equal(norm(x), tilenorm.layer_norm(x, (64,), norm.weight, norm.bias))


RMS_NORM = ("--override.imports", f"{NAME}.rms_norm")
PARALLEL = ("--parallelism.tensor_parallel_degree", "2")
# torchtitan's default for several processes takes a newer FSDP than that of PyTorch 2.13.
PARALLEL = *PARALLEL, "--parallelism.spmd_backend", "partial_dtensor"


def run(folder: Path, processes: int, *options: str) -> dict:
    """What titan_run prints, of a Llama of 6 layers."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), "-m", "tests.integrations.titan_run"]
    command += [str(folder), "--module", "llama3", "--config", "llama3_debugmodel", *options]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(not util.find_spec("torchtitan"), reason="needs torchtitan")
@pytest.mark.parametrize(
    "processes, options", ((1, ()), (2, PARALLEL)), ids=("FSDP", "tensor and sequence parallel")
)
def test_torchtitans_trainer(processes, options, tmp_path):
    """Under FSDP2 and activation checkpointing, losses are those of torchtitan's own norms."""
    theirs = run(tmp_path, processes, *options)
    ours = run(tmp_path, processes, *options, *RMS_NORM)
    assert sum(theirs["norms"].values()) == 13 and not theirs["ran"]
    assert ours["norms"] == {"TileRMSNorm": 12, "FSDPTileRMSNorm": 1}
    # Each of 13 norms in 4 steps, and 48 times once more in the backward pass.
    assert ours["ran"] == {"rms_norm": 100, "rms_norm backward": 52}
    torch.testing.assert_close(ours["losses"], theirs["losses"], rtol=0, atol=2e-3)
