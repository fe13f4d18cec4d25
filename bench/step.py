"""The measurement of one variant of a training step. It runs in a worker process."""

import itertools
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench import parallel
from bench.llama import Llama, Shape
from bench.timing import summarize

LEARNING_RATE = 1e-4
RANKS_WAIT_S = 120.0  # for each other, at the longest
# Names of kernels that compute norms, in PyTorch, Inductor and tilenorm. Inductor names a kernel
# after the ops that it fuses. norm_forward is in records of earlier versions of tilenorm.
NORM_KERNEL = re.compile(
    r"rms_?norm|layer_?norm|RowwiseMoments|GammaBeta|rsqrt"
    r"|(row|stream|shared|norm)_forward|norm_backward|column_sum|clear_slots",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Optimizer:
    """``bytes_per_parameter`` counts the weight, the gradient and the state, all in bfloat16."""

    make: Callable[[Iterable[nn.Parameter], bool], torch.optim.Optimizer]
    bytes_per_parameter: int


OPTIMIZERS = {
    "adamw": Optimizer(lambda p, fused: torch.optim.AdamW(p, LEARNING_RATE, fused=fused), 8),
    "sgd": Optimizer(lambda p, fused: torch.optim.SGD(p, LEARNING_RATE, fused=fused), 4),
}


@dataclass(frozen=True)
class Variant:
    """Whether ``tilenorm.patch`` replaces the norms, and which ``compile`` gets the model."""

    patched: bool = False
    compiler: str | None = None  # "torch" or "tilenorm"


VARIANTS = {
    "eager": Variant(),
    "compile": Variant(compiler="torch"),
    "tilenorm": Variant(patched=True),
    "tilenorm-compile": Variant(patched=True, compiler="torch"),
    "tilenorm-graph": Variant(compiler="tilenorm"),  # replaces norms in the graph, not in the model
}


@dataclass(frozen=True)
class Settings:
    """All settings of a training step except its variant."""

    shape: Shape = field(default_factory=Shape)
    batch: int = 2
    length: int = 4096
    optimizer: str = "adamw"
    checkpointing: bool = False
    whole: bool = False
    deterministic: bool = False
    warm_up: int = 2
    steps: int = 8
    seed: int = 0
    device: str = "cuda"
    parallel: str = ""  # one of parallel.KINDS, or a single process
    ranks: int = 1

    @property
    def tokens(self) -> int:
        """The tokens of a step: with FSDP2 each rank has a batch of its own."""
        return self.batch * self.length * (self.ranks if self.parallel == "fsdp" else 1)

    @property
    def name(self) -> str:
        """The settings as text. Two measurements are comparable if their names are equal."""
        shape = self.shape
        options = [name for name in ("checkpointing", "deterministic", "whole") if vars(self)[name]]
        if self.parallel:
            where = "CPU" if self.device == "cpu" else "GPU"
            options.append(f"{self.parallel} on {self.ranks} ranks, one {where} each")
        sizes = [
            f"{shape.layers} layers of {shape.hidden} with {shape.heads} heads",
            f"{shape.kv_heads} of keys",
            f"ffn {shape.ffn}",
            f"vocabulary {shape.vocab}",
            f"{self.batch} x {self.length} tokens",
            f"{self.optimizer} in bfloat16",
        ]
        return ", ".join([*sizes, *options])


def measure(variant: str, settings: dict) -> dict:
    """The fields of a record's Step for one variant.

    At the end the first ``warm_up`` steps run once more from the same start, to find out whether
    the losses and weights have the same bits.
    """
    given = Settings(**settings | {"shape": Shape(**settings["shape"])})
    if not given.parallel:
        return _measured(variant, given)
    with parallel.group(variant, given.device, RANKS_WAIT_S) as device:
        found = _measured(variant, replace(given, device=device))
        everywhere = parallel.of_each_rank(found)
    largest = {name: max(rank[name] for rank in everywhere) for name in ("median_us", "peak_bytes")}
    ranks = [{name: rank[name] for name in largest} for rank in everywhere]
    same = all(rank["same_bits"] for rank in everywhere)
    return found | largest | {"same_bits": same, "ranks": ranks}


def _measured(variant: str, given: Settings) -> dict:
    device, seed = given.device, given.seed
    if given.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS reads it when CUDA starts
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    factory = {"device": device, "dtype": torch.bfloat16}
    model = Llama(given.shape, given.length, given.checkpointing, **factory)
    parallel.cut_layers(model, given.parallel, device)
    call = prepared(model, VARIANTS[variant], given.whole)
    parallel.shard(model, given.parallel, device)
    optimizer = OPTIMIZERS[given.optimizer].make(model.parameters(), device != "cpu")
    batch = parallel.rank() if given.parallel == "fsdp" else 0
    make = torch.Generator(device).manual_seed(seed + batch)
    size = given.batch, given.length + 1
    tokens = torch.randint(given.shape.vocab, size, generator=make, device=device)

    def step() -> Tensor:
        loss = call(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    model.reset(seed)
    start = time.perf_counter()
    losses = [step().item()]
    first_s = time.perf_counter() - start
    losses += [step().item() for _ in range(given.warm_up - 1)]
    bits = losses[:], fingerprint(model)
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    times, timed = _timed(step, given.steps, device)
    peak = torch.cuda.max_memory_allocated() if device != "cpu" else None
    if given.parallel and device == "cpu":
        peak = parallel.resident_peak()
    kernels = _norm_kernels(step) if device != "cpu" else {}
    model.reset(seed)
    optimizer.state.clear()
    again = [step().item() for _ in range(given.warm_up)], fingerprint(model)
    result = summarize(times, "")
    return {
        "median_us": result.median_us,
        "spread": result.spread,
        "samples": result.samples,
        "first_s": first_s,
        "norm_kernels_ms": kernels,
        "peak_bytes": peak,
        "losses": losses + timed,
        "same_bits": bits == again,
    }


def prepared(model: Llama, variant: Variant, whole: bool) -> Callable[[Tensor], Tensor]:
    """The model of a variant: its norms are replaced, and its layers are compiled, in place."""
    import tilenorm

    if variant.patched:
        tilenorm.patch(model)
    if variant.compiler is None:
        return model
    compiler = {"torch": torch, "tilenorm": tilenorm}[variant.compiler].compile
    if whole:
        return compiler(model)
    model.blocks = nn.ModuleList(map(compiler, model.blocks))
    model.head = compiler(model.head)
    return model


@torch.no_grad()
def fingerprint(model: nn.Module) -> list[int]:
    """For each parameter, or this rank's part, the sum of its bit patterns read as integers."""
    parts = (p.to_local() if hasattr(p, "to_local") else p for p in model.parameters())
    return [p.view(torch.int16).sum(dtype=torch.int64).item() for p in parts]


def _timed(step: Callable, steps: int, device: str) -> tuple[list[float], list[float]]:
    """The microseconds and the loss of each step. The host runs ahead of the GPU."""

    def mark():
        if device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(start, end) -> float:
        return (end - start) * 1e6 if device == "cpu" else start.elapsed_time(end) * 1e3

    losses, marks = [], [mark()]
    for _ in range(steps):
        losses.append(step())
        marks.append(mark())
    losses = [loss.item() for loss in losses]
    if device != "cpu":
        torch.cuda.synchronize()
    return [between(*pair) for pair in itertools.pairwise(marks)], losses


def _norm_kernels(step: Callable) -> dict[str, float]:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    kernels = [e for e in profiler.events() if e.device_type == DeviceType.CUDA]
    return norm_kernels((e.name, e.device_time_total) for e in kernels)


def norm_kernels(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The milliseconds of each kernel that computes a norm, given (name, microseconds) pairs."""
    found = {}
    for name, us in kernels:
        if NORM_KERNEL.search(name):
            found[name[:100]] = found.get(name[:100], 0.0) + us / 1e3
    return found
