"""The measurement of one variant of a training step. It runs in a worker process."""

import itertools
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from bench import kernels, parallel
from bench.models import Transformer, drawn_batch
from bench.shapes import LLAMA, MODELS, Shape
from bench.timing import Timer, summarize
from bench.variants import VARIANTS, prepared

LEARNING_RATE = 1e-4
RANKS_WAIT_S = 120.0  # for each other, at the longest


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
class Settings:
    """All settings of a training step except its variant."""

    shape: Shape = field(default_factory=Shape)
    model: str = LLAMA
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

    @classmethod
    def of(cls, fields: dict) -> "Settings":
        """What ``dataclasses.asdict`` made a dictionary of."""
        return cls(**fields | {"shape": Shape(**fields["shape"])})

    @property
    def tokens(self) -> int:
        """The tokens of a step: with FSDP2 each rank has a batch of its own."""
        return self.batch * self.length * (self.ranks if self.parallel == "fsdp" else 1)

    @property
    def name(self) -> str:
        """The settings as text. Two measurements are comparable if their names are equal.

        The form of a model stands in front, but not Llama 3's, which earlier records do not name.
        """
        shape = self.shape
        form = "" if self.model == LLAMA else f"{self.model}'s form: "
        sizes = [
            f"{form}{shape.layers} layers of {shape.hidden} with {shape.heads} heads",
            f"{shape.kv_heads} of keys",
            f"ffn {shape.ffn}",
            f"{shape.vocab} classes" if shape.images else f"vocabulary {shape.vocab}",
            f"{self.batch} x {self.length} tokens",
            f"{self.optimizer} in bfloat16",
        ]
        return ", ".join([*sizes, *self._options])

    @property
    def label(self) -> str:
        """The model with its layers and tokens. What else differs from the model's row is said."""
        listed = MODELS[self.model].shape
        said = {name: getattr(listed, name) for name in ("layers", "dropout")}
        given = replace(self.shape, **said)
        parts = [self.model if given == listed else f"{self.model}'s form in other sizes"]
        parts += [f"{self.shape.layers} layers", f"{self.batch} x {self.length} tokens"]
        return ", ".join([*parts, *self._options])

    @property
    def _options(self) -> list[str]:
        found = [name for name in ("checkpointing", "deterministic", "whole") if vars(self)[name]]
        if self.parallel:
            where = "CPU" if self.device == "cpu" else "GPU"
            found.append(f"{self.parallel} on {self.ranks} ranks, one {where} each")
        if self.shape.dropout:
            found.append(f"dropout {self.shape.dropout}")
        return found


def measure(variant: str, settings: dict) -> dict:
    """The fields of a record's Step for one variant.

    At the end the first ``warm_up`` steps run once more from the same start, to find out whether
    the losses and weights have the same bits.
    """
    given = Settings.of(settings)
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
    device = given.device
    model = made(given)
    parallel.cut_layers(model, given.parallel, device)
    call = prepared(model, VARIANTS[variant], given.whole).call
    parallel.shard(model, given.parallel, device)
    training = Training.of(model, given)

    def step() -> Tensor:
        return training.step(call)

    model.reset(given.seed)
    start = time.perf_counter()
    losses = [step().item()]
    first_s = time.perf_counter() - start
    losses += [step().item() for _ in range(given.warm_up - 1)]
    bits = losses[:], fingerprint(model)
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    times, timed = _timed(step, given.steps, Timer(device))
    peak = torch.cuda.max_memory_allocated() if device != "cpu" else None
    if given.parallel and device == "cpu":
        peak = parallel.resident_peak()
    found = kernels.norms_of_step(step) if device != "cpu" else {}
    model.reset(given.seed)
    training.optimizer.state.clear()
    again = [step().item() for _ in range(given.warm_up)], fingerprint(model)
    result = summarize(times, "")
    return {
        "median_us": result.median_us,
        "spread": result.spread,
        "samples": result.samples,
        "first_s": first_s,
        "norm_kernels_ms": found,
        "peak_bytes": peak,
        "losses": losses + timed,
        "same_bits": bits == again,
    }


def made(given: Settings) -> Transformer:
    """The model, without values. Where the settings ask for it, PyTorch is deterministic then."""
    if given.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS reads it when CUDA starts
        torch.use_deterministic_algorithms(True)
        settings: Any = torch.utils.deterministic  # whose properties no checker knows
        settings.fill_uninitialized_memory = False
    factory = {"device": given.device, "dtype": torch.bfloat16}
    return Transformer(given.shape, given.length, given.checkpointing, **factory)


@dataclass
class Training:
    """A model with its optimizer, and the inputs of every step."""

    model: Transformer
    optimizer: torch.optim.Optimizer
    inputs: tuple[Tensor, ...]

    @classmethod
    def of(cls, model: Transformer, given: Settings) -> "Training":
        device = given.device
        optimizer = OPTIMIZERS[given.optimizer].make(model.parameters(), device != "cpu")
        seed = given.seed + (parallel.rank() if given.parallel == "fsdp" else 0)
        sizes = given.shape, given.batch, given.length
        return cls(model, optimizer, drawn_batch(*sizes, seed, device, torch.bfloat16))

    def step(self, call: Callable[..., Tensor]) -> Tensor:
        """A whole step of the model, whose loss ``call`` computes."""
        loss = call(*self.inputs)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


@torch.no_grad()
def fingerprint(model: nn.Module) -> list[int]:
    """For each parameter, or this rank's part, the sum of its bit patterns read as integers."""
    parts = (p.to_local() if hasattr(p, "to_local") else p for p in model.parameters())
    return [int(p.view(torch.int16).sum(dtype=torch.int64)) for p in parts]


def _timed(step: Callable, steps: int, timer: Timer) -> tuple[list[float], list[float]]:
    """The microseconds and the loss of each step. The host runs ahead of the GPU."""
    losses, marks = [], [timer.mark()]
    for _ in range(steps):
        losses.append(step())
        marks.append(timer.mark())
    losses = [loss.item() for loss in losses]
    timer.wait(marks[-1])
    return [timer.between(*pair) for pair in itertools.pairwise(marks)], losses
