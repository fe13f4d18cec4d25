import functools
import json
from dataclasses import asdict, replace

import pytest
import torch

import tilenorm
from bench import train, worker
from bench.__main__ import main
from bench.llama import Llama, Shape
from bench.step import VARIANTS, Settings, measure, norm_kernels, prepared
from bench.train import fitting_layers
from tilenorm.launch.target import Target
from tilenorm.ops.registry import MAX_HIDDEN
from tilenorm.spec import NormSpec
from tilenorm.tools.precompile import training_calls

SHAPE = Shape(layers=3, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=40)
SETTINGS = Settings(SHAPE, batch=2, length=8, device="cpu", warm_up=2, steps=3)
OPTIONS = [f"--{name.replace('_', '-')}={value}" for name, value in vars(SHAPE).items()]
OPTIONS += ["--batch=2", "--length=8", "--warm-up=2", "--steps=3"]


def small() -> tuple[Llama, torch.Tensor]:
    model = Llama(SHAPE, SETTINGS.length, False, device="cpu", dtype=torch.bfloat16)
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
    monkeypatch.setattr(torch, "compile", lambda part: done.append("torch") or part)
    monkeypatch.setattr(
        tilenorm, "compile", lambda part: done.append("tilenorm") or part, raising=False
    )
    monkeypatch.setattr(tilenorm, "patch", lambda model: done.append("patch"), raising=False)
    patch = ["patch"] if variant in ("tilenorm", "tilenorm-compile") else []
    compiler = {"compile": "torch", "tilenorm-compile": "torch", "tilenorm-graph": "tilenorm"}
    parts = [compiler[variant]] if variant in compiler else []
    model, tokens = small()
    prepared(model, VARIANTS[variant], whole=False)(tokens)
    assert done == patch + parts * (SHAPE.layers + 1)
    done.clear()
    prepared(model, VARIANTS[variant], whole=True)(tokens)
    assert done == patch + parts


def test_one_compiled_layer_serves_all_layers(monkeypatch):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    model, tokens = small()
    call = prepared(model, VARIANTS["compile"], whole=False)
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
    reset = Llama.reset
    monkeypatch.setattr(Llama, "reset", lambda model, seed: reset(model, next(resets)))
    assert not measure("eager", asdict(SETTINGS))["same_bits"]


def test_more_memory_or_fewer_saved_elements_fit_more_layers():
    whole = Settings()
    sizes = [fitting_layers(whole, gib << 30) for gib in (1, 60, 80, 100, 1000)]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (1, whole.shape.layers)
    assert 1 < sizes[2] < whole.shape.layers
    for less in ({"checkpointing": True}, {"optimizer": "sgd"}, {"batch": 1}):
        assert fitting_layers(replace(whole, **less), 80 << 30) > sizes[2]


def test_kernels_of_norms_are_found_by_their_names():
    kernels = ("row_forward", "stream_forward", "shared_forward", "norm_forward", "norm_backward")
    norms = [
        *kernels,
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16>",
        "void at::native::(anonymous namespace)::layer_norm_grad_input_kernel_vectorized<float>",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float>",
        "triton_red_fused__fused_rms_norm__to_copy_add_mul_3",
        "triton_per_fused_add_mean_mul_pow_rsqrt_0",
        *sorted(kernels_of_tilenorm() - set(kernels)),
    ]
    others = ["nvjet_tst_192x192_64x4_h_bz", "flash_fwd_kernel", "triton_poi_fused_mul_silu_2"]
    others += ["void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>"]
    assert list(norm_kernels((name, 1.0) for name in norms + others)) == norms
    assert norm_kernels([("norm_forward", 1500.0), ("norm_forward", 500.0)]) == {
        "norm_forward": 2.0
    }


def kernels_of_tilenorm() -> set[str]:
    """The names of all kernels that tilenorm launches."""
    specs = [NormSpec.of("rms_norm", n, "bfloat16", weight="bfloat16") for n in (4096, MAX_HIDDEN)]
    calls = [call for spec in specs for call in training_calls(spec, Target.of("sm_90"))]
    return {call.kernel._pyfunc.__name__ for call in calls}


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
    with pytest.raises(SystemExit, match="give --layers"):
        train.main([])


@pytest.mark.parametrize("variant", ["eager", "tilenorm"])
def test_norm_kernels_of_a_step_are_found_on_the_gpu(gpu, variant):
    found = measure(variant, asdict(replace(SETTINGS, device=gpu)))
    assert sum(found["norm_kernels_ms"].values()) > 0
    assert found["peak_bytes"] > 0
