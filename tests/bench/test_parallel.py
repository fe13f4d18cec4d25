"""bench train --parallel: the step on several ranks, and the command under torchrun."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from bench import parallel, record, report
from bench.shapes import Shape
from bench.step import Settings, _measured
from bench.train import main
from bench.train_arguments import SIZES, fitting_layers

from ..distributed.conftest import world  # noqa: F401 (a fixture)
from ..distributed.world import device

ROOT = Path(__file__).parents[2]
SHAPE = Shape(layers=2, hidden=32, heads=8, kv_heads=4, ffn=48, vocab=40)
SETTINGS = Settings(SHAPE, batch=2, length=8, device="cpu", warm_up=2, steps=3)
OPTIONS = [f"--{name.replace('_', '-')}={getattr(SHAPE, name)}" for name in SIZES]
OPTIONS += ["--batch=2", "--length=8", "--warm-up=2", "--steps=2"]


def measured(kind: str, variant: str):
    alone = replace(SETTINGS, device=device())
    settings = replace(alone, parallel=kind, ranks=dist.get_world_size())
    where = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(settings.ranks)}
    with mock.patch.dict(os.environ, where):
        found = _measured(variant, settings)
        assert len(parallel.of_each_rank(found)) == settings.ranks
    losses = found["losses"]
    assert found["same_bits"] and losses[-1] < losses[0]
    assert found["peak_bytes"] > 0
    if kind == "tp" or dist.get_rank() == 0:  # the other ranks of FSDP2 have tokens of their own
        number = 5 if kind == "tp" else 1
        expected = _measured(variant, alone)["losses"]
        assert losses[:number] == pytest.approx(expected[:number], rel=1e-2)


@pytest.mark.filterwarnings("ignore::tilenorm.ReferenceWarning")
@pytest.mark.parametrize("variant", ["eager", "patch"])
@pytest.mark.parametrize("kind", parallel.KINDS)
def test_losses_are_those_of_one_process(world, kind, variant):  # noqa: F811
    world.run(measured, kind, variant)


@pytest.mark.slow
@pytest.mark.parametrize("kind", parallel.KINDS)
def test_the_command(tmp_path, kind):
    """Two ranks, of which the first writes the record. A compiler takes most of the time."""
    path = tmp_path / "run.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "-m", "bench", "train"]
    command += ["--parallel", kind, *OPTIONS, "--out", str(path)]
    variants = ["eager", "patch-compile"]
    command += ["--variant", *variants]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run, *steps = [json.loads(line) for line in path.read_text().splitlines()]
    assert run["command"].startswith(
        f"torchrun --nproc-per-node 2 -m bench train --parallel {kind}"
    )
    assert [(s["variant"], s["status"], s["error"]) for s in steps] == [
        (variant, "ok", "") for variant in variants
    ]
    for step in steps:
        assert len(step["ranks"]) == 2 and f"{kind} on 2 ranks" in step["model"]
        assert step["median_us"] == max(rank["median_us"] for rank in step["ranks"])
        assert step["tokens"] == (32 if kind == "fsdp" else 16)
    assert report.render(record.load([path])) in done.stdout


def refused(capsys, *options: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main([*OPTIONS, *options])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_without_torchrun_it_says_how_to_start(monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert "start it by torchrun --nproc-per-node 2" in refused(capsys, "--parallel", "tp")


@pytest.mark.parametrize(
    "options, message",
    [
        (["--parallel", "tp"], "--heads: got 8, takes a multiple of the number of ranks, 3"),
        (["--parallel", "fsdp", "--whole"], "--whole: one graph"),
        (["--parallel", "fsdp", "--variant", "eager", "eager"], "takes each once"),
        (["--parallel", "fsdp", "--pair", "eager", "patch"], "--pair: is for a single process"),
        (["--parallel", "fsdp", "--model", "Qwen3 8B"], "--model: got Qwen3 8B, takes Llama 3"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(monkeypatch, capsys, options, message):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert message in refused(capsys, *options)


def test_more_ranks_fit_more_layers():
    whole, memory = Settings(), 60 << 30
    alone = fitting_layers(whole, memory)
    for kind in parallel.KINDS:
        assert fitting_layers(replace(whole, parallel=kind, ranks=4), memory) > alone
