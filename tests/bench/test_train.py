import functools
import json
from dataclasses import asdict, replace

import pytest
import torch

import tilenorm
from bench import train, worker
from bench.__main__ import main
from bench.models import Transformer
from bench.shapes import Shape
from bench.step import Settings, measure
from bench.train_arguments import SIZES, fitting_layers
from bench.variants import VARIANTS, prepared

SHAPE = Shape(layers=3, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=40)
SETTINGS = Settings(SHAPE, batch=2, length=8, device="cpu", warm_up=2, steps=3)
OPTIONS = [f"--{name.replace('_', '-')}={getattr(SHAPE, name)}" for name in SIZES]
OPTIONS += ["--batch=2", "--length=8", "--warm-up=2", "--steps=3"]


def small() -> tuple[Transformer, torch.Tensor]:
    model = Transformer(SHAPE, SETTINGS.length, False, device="cpu", dtype=torch.bfloat16)
    return model, torch.zeros(1, SETTINGS.length + 1, dtype=torch.int64)


@pytest.mark.slow
def test_command_prints_the_same_from_its_record(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = str(tmp_path / "run.jsonl")
    assert main(["train", *OPTIONS, "--variant", "eager", "--out", path]) == 0
    out = capsys.readouterr().out
    assert "rms_norm training, bfloat16: ms" in out
    assert f"training step of Llama 3's form: {SETTINGS.name}" in out
    row = next(line.split() for line in out.splitlines() if line.split()[:1] == ["eager"])
    assert row[-2:] == ["0", "yes"]
    with open(path) as file:
        lines = [json.loads(line) for line in file]
    (step,) = (line for line in lines if line["record"] == "step")
    assert len(step["losses"]) == 5
    assert step["losses"][-1] < step["losses"][0]
    assert (step["samples"], step["tokens"]) == (3, 16)
    assert main(["--from", path]) == 0
    assert capsys.readouterr().out == out


@pytest.mark.filterwarnings("ignore::tilenorm.ReferenceWarning")
def test_failed_variant_is_shown_and_the_next_variant_runs(monkeypatch, capsys):
    def run(function, timeout_s, **arguments):
        if arguments.get("variant") == "compile":
            raise worker.WorkerError("OutOfMemoryError: CUDA out of memory")
        return function(**arguments)

    monkeypatch.setattr(worker, "run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    main(["train", *OPTIONS, "--variant", "compile", "eager"])
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[1] for line in lines if line.strip()}
    assert rows["compile"] == "failed"
    assert "compile: OutOfMemoryError: CUDA out of memory" in lines
    assert float(rows["eager"]) > 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_patches_and_compiles_the_right_parts(monkeypatch, variant):
    done = []

    def does(what: str):
        return lambda part, **options: done.append((what, options)) or part

    monkeypatch.setattr(torch, "compile", does("torch"))
    monkeypatch.setattr(tilenorm, "compile", does("tilenorm"))
    monkeypatch.setattr(tilenorm, "patch", does("patch"))
    patch = {"patch": {}, "patch-add": {"residual": True}, "patch-compile": {}}
    expected = [("patch", patch[variant])] if variant in patch else []
    compiler = {"compile": ("torch", {}), "patch-compile": ("torch", {})}
    compiler |= {"tilenorm-compile": ("tilenorm", {})}
    compiler |= {"tilenorm-compile-low": ("tilenorm", {"memory": "low"})}
    parts = [compiler[variant]] if variant in compiler else []
    model, tokens = small()
    prepared(model, VARIANTS[variant], whole=False).call(tokens)
    assert done == expected + parts * (SHAPE.layers + 1)
    done.clear()
    prepared(model, VARIANTS[variant], whole=True).call(tokens)
    assert done == expected + parts


def test_one_compiled_layer_serves_all_layers(graphs):
    model, tokens = small()
    call = prepared(model, VARIANTS["compile"], whole=False).call
    call(tokens).backward()
    assert len(graphs) == 2  # a layer, and the head


def test_compiled_losses_are_close_to_eager_and_weights_repeat(monkeypatch):
    torch._dynamo.reset()
    compiler = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compiler)
    eager, compiled = (measure(variant, asdict(SETTINGS)) for variant in ("eager", "compile"))
    assert compiled["same_bits"]
    assert compiled["losses"] == pytest.approx(eager["losses"], rel=1e-2)


def test_different_weights_after_the_same_steps_are_not_same_bits(monkeypatch):
    resets = iter((0, 1))
    reset = Transformer.reset
    monkeypatch.setattr(Transformer, "reset", lambda model, seed: reset(model, next(resets)))
    assert not measure("eager", asdict(SETTINGS))["same_bits"]


def test_more_memory_or_fewer_saved_elements_fit_more_layers():
    whole = Settings()
    sizes = [fitting_layers(whole, gib << 30) for gib in (1, 60, 80, 100, 1000)]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (1, whole.shape.layers)
    assert 1 < sizes[2] < whole.shape.layers
    for less in ({"checkpointing": True}, {"optimizer": "sgd"}, {"batch": 1}):
        assert fitting_layers(replace(whole, **less), 80 << 30) > sizes[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hidden=30", "--heads=4"], "--hidden: got 30, takes a multiple of --heads, 4"),
        (["--heads=6", "--hidden=36", "--kv-heads=4"], "--heads: got 6, takes a multiple of"),
        (["--layers=0"], "--layers: got 0, takes at least 1"),
        (["--steps=1"], "--steps: got 1, takes at least 2"),
    ],
)
def test_bad_sizes_are_refused_before_anything_runs(options, message, capsys):
    with pytest.raises(SystemExit):
        train.main(options)
    assert message in capsys.readouterr().err


def test_without_a_gpu_layers_is_required(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="give --tiny, or --layers"):
        train.main([])


@pytest.mark.parametrize("variant", ["eager", "patch"])
def test_norm_kernels_of_a_step_are_found_on_the_gpu(gpu, variant):
    found = measure(variant, asdict(replace(SETTINGS, device=gpu)))
    assert sum(found["norm_kernels_ms"].values()) > 0
    assert found["peak_bytes"] > 0
