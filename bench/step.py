"""A training step: its settings, its model with the optimizer, and its inputs."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from bench import diffusion, models
from bench.shapes import LLAMA, MODELS, Shape

LEARNING_RATE, SEED = 1e-4, 0


@dataclass(frozen=True)
class Settings:
    """All settings of a training step except its variant."""

    shape: Shape = field(default_factory=Shape)
    model: str = LLAMA
    whole: bool = False
    device: str = "cuda"
    fsdp: int = 1
    tp: int = 1
    deterministic: bool = False

    @classmethod
    def of(cls, fields: dict) -> "Settings":
        """What ``dataclasses.asdict`` made a dictionary of."""
        return cls(**fields | {"shape": Shape(**fields["shape"])})

    @property
    def gpus(self) -> int:
        return self.fsdp * self.tp

    @property
    def tokens(self) -> int:
        """The tokens of a step, of all processes. Each group of tp processes has its own batch."""
        return self.shape.batch * self.shape.length * self.fsdp

    @property
    def label(self) -> str:
        """The model, its layers and tokens, and how it is trained, where it is not layer by layer
        on one GPU. Steps of one label compare.
        """
        listed, given = MODELS[self.model], self.shape
        free = {name: getattr(listed, name) for name in ("layers", "batch", "length")}
        same = replace(given, **free) == listed
        words = [self.model if same else f"{self.model}'s form in other sizes"]
        words += [f"{given.layers} layers", f"{given.batch} x {given.length} tokens"]
        words += ["whole"] * self.whole
        words += [f"fsdp {self.fsdp}, tp {self.tp}"] * (self.gpus > 1)
        return ", ".join(words + ["deterministic"] * self.deterministic)


@dataclass
class Training:
    """A model with its optimizer, and the inputs of every step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: tuple[Tensor, ...]

    @classmethod
    def of(cls, given: Settings, model: Any, seed: int = SEED) -> "Training":
        fused = given.device != "cpu"
        optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=fused)
        return cls(model, optimizer, model.drawn(seed, given.device, torch.bfloat16))

    def step(self, call: Callable[..., Tensor]) -> Tensor:
        """A whole step of the model, whose loss ``call`` computes."""
        loss = call(*self.inputs)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def model_of(shape: Shape, **factory) -> nn.Module:
    """The model with random weights, the same at every call."""
    model = (diffusion.Diffusion if shape.adaptive else models.Transformer)(shape, **factory)
    models.reset(model, SEED)
    return model
