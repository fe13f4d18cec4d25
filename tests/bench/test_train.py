"""bench train: the alternation of steps, tiny models on the CPU, the command and its tables."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import count, repeat

import pytest
import torch
from torch import nn

import tilenorm
from bench import norms, pair, parallel, record, train, worker
from bench.__main__ import main
from bench.pair import Settings, model_of
from bench.shapes import LLAMA, MODELS, tiny
from bench.timing import Timer
from tests.support.calls import slow

pytestmark = pytest.mark.filterwarnings("ignore::tilenorm.ReferenceWarning")
FOREVER = float("inf")
COMPILED = [
    (("compile", "tilenorm-compile"), False),
    (("patch-compile", "tilenorm-compile"), True),
]

MODULATED = {
    "Modulated": "the modulation of norm",
    "Stream": "the sum before ffn_norm and the modulation of ffn_norm",
    "AdaptiveHead": "the modulation of norm",
}


class Clock(Timer):
    """A timer whose time passes when a step says so. ``waited`` has the marks that it awaited."""

    def __init__(self):
        super().__init__("cpu")
        self.now, self.order, self.waited = 0.0, [], []

    def mark(self):
        return self.now

    def wait(self, mark):
        self.waited.append(mark)

    def between(self, start, end):
        return end - start

    def steps(self, **us):
        """The steps A and B. ``us`` has the times of each."""

        def step(name):
            self.order.append(name)
            self.now += next(us[name])

        return [partial(step, "A"), partial(step, "B")]


def test_each_variant_is_first_in_every_second_pair_and_times_are_its_own():
    clock = Clock()
    steps = clock.steps(A=count(100), B=count(500))
    found, peaks = pair.alternated(steps, 5, clock, FOREVER)
    assert "".join(clock.order) == "ABBAABBAAB"
    assert (found, peaks) == ([[100 + i, 500 + i] for i in range(5)], [None, None])


def test_host_is_at_most_one_pair_ahead_and_no_pair_starts_after_the_deadline(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(pair.time, "time", lambda: clock.now)
    found, _ = pair.alternated(clock.steps(A=repeat(2.0), B=repeat(3.0)), 40, clock, 17.0)
    assert found == [[2.0, 3.0]] * 4
    assert clock.waited == [5.0, 10.0, 15.0, 20.0]  # the last wait is for the last pair
    assert pair.alternated([None, None], 40, clock, 0.0) == ([], [None, None])


def test_peak_of_each_variant_is_that_of_its_own_steps(monkeypatch):
    clock, peak = Clock(), [0]
    clock.on_cpu = False
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peak.__setitem__(0, 0))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak[0])
    needs = {"A": iter((7, 3, 3)), "B": iter((1, 2, 4))}
    steps = [lambda n=n: peak.__setitem__(0, max(peak[0], next(needs[n]))) for n in needs]
    assert pair.alternated(steps, 3, clock, FOREVER)[1] == [7, 4]


def settings_of(name=LLAMA):
    return Settings(tiny(MODELS[name]), name, device="cpu")


@pytest.mark.parametrize("name", ["Qwen3 8B", *slow("OLMo 2 7B", "BERT-base", "Flux")])
def test_both_variants_train_the_same_weights(name):
    found = pair.measure(["eager", "patch"], settings_of(name), 3, FOREVER)
    assert len(found["pairs_us"]) == 3
    assert all(us > 0 for times in found["pairs_us"] for us in times)
    assert found["gradient_change"] < 0.02
    assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-3)
    modules = model_of(tiny(MODELS[name]), device="cpu").modules()
    norms = sum(isinstance(module, (nn.RMSNorm, nn.LayerNorm)) for module in modules)
    assert found["reports"][0] == ""
    assert found["reports"][1].startswith(f"{norms} modules patched, 0 not patched")


@pytest.mark.parametrize(
    ("name", "variant", "replaced"),
    [
        ("Qwen3 8B", "patch-rotation", {"QwenAttention": "the rotation of q_norm and k_norm"}),
        ("DiT-XL/2", "patch-modulation", MODULATED),
        *slow(("OLMo 2 7B", "patch-rotation", {"OLMoAttention": "the rotation of q_norm"})),
        *slow(("Flux", "patch-modulation", MODULATED)),
    ],
)
def test_patch_computes_more_in_the_pass_of_the_norms(name, variant, replaced):
    found = pair.measure(["eager", variant], settings_of(name), 1, FOREVER)
    assert found["gradient_change"] < 0.1
    for module, what in replaced.items():
        assert f"  {module} runs {what}" in found["reports"][1]


def test_compiled_rotations_are_one_op_with_their_norms(graphs):
    model = model_of(tiny(MODELS["Qwen3 8B"]), device="cpu", dtype=torch.float32)
    call, reports = pair.prepared(model, "tilenorm-compile-rotation", whole=False)
    call(*model.drawn(0, "cpu", torch.float32))
    assert pair.said(reports).count(": rms_norm_rope") == 2  # of q and k, in a layer


@pytest.mark.parametrize(("names", "whole"), COMPILED)
def test_compiled_variants_share_a_process_and_compile_once_each(graphs, names, whole):
    found = pair.measure(names, replace(settings_of(), whole=whole), 2, FOREVER)
    each = 1 if whole else 2  # a layer, which serves all layers, and the head
    ours = [any("tilenorm" in str(n.target) for n in graph.graph.nodes) for graph in graphs]
    assert ours == [name != "compile" for name in names for _ in range(each)]
    for name, report in zip(names, found["reports"], strict=True):
        if not name.startswith("patch"):  # each compiled code says it once
            assert report.count("graph 0: ") == (each if "tilenorm" in name else 0)


@pytest.mark.parametrize("name", ["ViT-L", *slow("OLMo 2 7B", "DiT-XL/2")])
def test_modules_take_the_places_of_all_norms_with_their_parameters(name):
    found = pair.measure(["eager", "modules"], settings_of(name), 2, FOREVER)
    model = model_of(tiny(MODELS[name]), device="cpu")
    before = dict(model.named_parameters())
    said = norms.replace(model, "tilenorm")
    count = sum(isinstance(m, (tilenorm.RMSNorm, tilenorm.LayerNorm)) for m in model.modules())
    assert found["reports"] == ["", said] == ["", f"{count} norms are modules of tilenorm"]
    assert not any(type(m) in (nn.RMSNorm, nn.LayerNorm) for m in model.modules())
    assert all(p is before[key] for key, p in model.named_parameters())


@pytest.mark.parametrize("name", ["BERT-base", "OLMo 2 7B"])
def test_liger_is_asked_for_what_pytorch_computes(liger, name):
    model = model_of(tiny(MODELS[name]), device="cpu")
    norms.replace(model, "liger")
    assert model.head.norm.asked in (
        {"eps": 1e-12, "bias": True},
        {"eps": 1e-6, "casting_mode": "gemma", "in_place": False},
    )


def test_low_variant_asks_for_less_memory(monkeypatch):
    asked = []
    monkeypatch.setattr(tilenorm, "compile", lambda part, **options: asked.append(options))
    pair.prepared(nn.Identity(), "tilenorm-compile-low", whole=True)
    assert asked == [{"memory": "low"}]


def test_variant_with_a_wrong_gradient_is_not_timed(monkeypatch):
    class QuarterOfTheGradient(nn.RMSNorm):
        def forward(self, x):
            return super().forward(x.detach() * 0.75 + x * 0.25)

    def patch(model):
        model.head.norm.__class__ = QuarterOfTheGradient

    monkeypatch.setattr(tilenorm, "patch", patch)
    found = pair.measure(["eager", "patch"], settings_of(), 2, FOREVER)
    assert found["status"] == "wrong" and "pairs_us" not in found
    assert found["losses"][0] == found["losses"][1]
    assert found["error"].startswith(f"the gradient of {found['gradient']} changes by ")


PAIR, ALONE = ["--pair", "eager", "patch"], ["--parallel", "fsdp=1"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([*PAIR, "--layers", "0"], "--layers: got 0, takes at least 1"),
        ([*PAIR, "--parallel", "fsdp=2,pp=2"], "takes fsdp=N,tp=N or one of them, got fsdp=2,pp=2"),
        ([*PAIR, "--parallel", "fsdp=4,tp=2"], "start 8 processes: torchrun --nproc-per-node 8"),
        ([*PAIR, *ALONE, "--whole"], "--whole is for one process"),
        ([*PAIR], "there is no GPU, so give --tiny"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(without_gpu, options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        train.main(options)
    assert message in f"{stopped.value} {capsys.readouterr().err}"


def test_command_prints_the_same_from_its_record(inline, without_gpu, again):
    command = ["train", "--tiny", "--pairs", "6", "--pair", "eager", "patch-add"]
    found, out, err = again([*command, "--model", "Llama 3.2 1B", "ViT-L", "--layers", "1"])
    assert err.count("6 of 6 pairs") == 2
    assert found.runs[0]["command"].endswith("--layers 1 --out run.jsonl")
    assert "Block runs the sum" in found.pairs[0].reports[1]
    for line, name in zip(found.pairs, ("Llama 3.2 1B", "ViT-L"), strict=True):
        assert line.label.startswith(f"{name}'s form in other sizes, 1 layers")
        assert len(line.pairs_us) == line.asked == 6 and len(line.step_losses) == 2 * (2 + 6)
        median, low, high = line.difference_us
        assert low <= median <= high
        assert f"{low / 1e3:+.2f} to {high / 1e3:+.2f}" in out


def test_tensor_parallelism_is_for_three_models(monkeypatch):
    monkeypatch.setattr(parallel, "PROCESSES", 2)
    asked = parallel.sizes("tp=2")
    served = [n for n in MODELS if not parallel.unserved(MODELS[n], asked, False)]
    assert served == [LLAMA, "Qwen3 8B", "OLMo 2 7B"]
    assert all(n in parallel.unserved(MODELS["GPT-2"], asked, False) for n in served)
    assert not any(parallel.unserved(m, {"fsdp": 2, "tp": 1}, False) for m in MODELS.values())


@pytest.mark.slow
def test_command_under_torchrun(tmp_path):
    path = tmp_path / "run.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
    command += ["bench", "train", "--tiny", "--pairs", "2", "--parallel", "tp=2"]
    command += ["--pair", "eager", "patch-add", "--out", str(path)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = record.load([path])
    (line,) = found.pairs
    assert len(line.pairs_us) == line.gpus == len(line.ranks) == 2
    assert line.label.endswith("2 x 8 tokens, fsdp 1, tp 2")
    assert done.stdout.count("pairs of training steps") == 1  # by one process
    assert "tokens/s are of one of 2 GPUs" in done.stdout


def test_pairs_that_fail_or_have_no_time_left_are_shown(monkeypatch, without_gpu, capsys):
    now, limits = [0.0], []
    monkeypatch.setattr(train.time, "time", lambda: now[0])

    def run(function, timeout_s, names, pairs, deadline, places, given):
        assert (function, places, deadline) == (pair.measure, {}, 100.0)
        limits.append(timeout_s)
        now[0] += 35.0
        if names[1] == "compile":
            raise worker.WorkerError("OutOfMemoryError: CUDA out of memory")
        made = 3 if now[0] > deadline else pairs
        return {"pairs_us": [[2e3, 1e3]] * made, "peak_bytes": [None, None]}

    monkeypatch.setattr(worker, "run", run)
    command = ["train", "--tiny", "--pair", "eager", "compile", *PAIR, "--max-seconds", "100"]
    assert main([*command, "--model", "Llama 3 8B", "ViT-L"]) == 0
    out, err = capsys.readouterr()
    assert limits == [left + worker.GRACE_S for left in (100, 65, 30)]
    said = [line.split(" ")[0] for line in err.splitlines() if line.endswith("of 40 pairs")]
    assert said == ["0", "40", "0", "0"]
    assert "eager, compile: failed: OutOfMemoryError: CUDA out of memory" in out
    assert "eager patch 40 2.00 / 1.00 -1.00 (-1.00 to -1.00)" in " ".join(out.split())
    assert "ViT-L's form in other sizes, 2 layers, 2 x 8 tokens, eager, patch: skipped" in out


def test_kernels_of_a_step_on_the_gpu(gpu):
    x = torch.zeros(64, 1024, device=gpu, dtype=torch.bfloat16, requires_grad=True)

    def step():
        tilenorm.rms_norm(x, (1024,)).sum().backward()

    step()
    found = {line["name"]: line for line in pair.kernels_of(step)}
    assert found["norm_backward"]["calls"] == 1
    times = [line["ms"] for line in found.values()]
    assert all(ms > 0 for ms in times) and times == sorted(times, reverse=True)
