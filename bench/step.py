"""A training step: its settings, its model with the optimizer, and its inputs."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

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
    batch: int = 2
    length: int = 4096
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
    def tokens(self) -> int:
        """The tokens of a step, of all processes. Each group of tp processes has its own batch."""
        return self.batch * self.length * self.fsdp

    @property
    def how(self) -> list[str]:
        """How the model is trained, where it is not layer by layer on one GPU."""
        words = ["whole"] * self.whole
        if self.fsdp * self.tp > 1:
            words += [f"fsdp {self.fsdp}, tp {self.tp}"]
        return words + ["deterministic"] * self.deterministic

    @property
    def label(self) -> str:
        """The model, its layers and tokens, and how it is trained. Steps of one label compare."""
        listed = MODELS[self.model].shape
        given = replace(self.shape, layers=listed.layers)
        parts = [self.model if given == listed else f"{self.model}'s form in other sizes"]
        parts += [f"{self.shape.layers} layers", f"{self.batch} x {self.length} tokens"]
        return ", ".join([*parts, *self.how])


@dataclass
class Training:
    """A model with its optimizer, and the inputs of every step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: tuple[Tensor, ...]

    @classmethod
    def of(cls, given: Settings, model: nn.Module, seed: int = SEED) -> "Training":
        fused = given.device != "cpu"
        optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=fused)
        factory = {"device": given.device, "dtype": torch.bfloat16}
        module = diffusion if given.shape.adaptive else models
        inputs = module.drawn_batch(given.shape, given.batch, given.length, seed, **factory)
        return cls(model, optimizer, inputs)

    def step(self, call: Callable[..., Tensor]) -> Tensor:
        """A whole step of the model, whose loss ``call`` computes."""
        loss = call(*self.inputs)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def model_of(given: Settings) -> nn.Module:
    """The model with random weights, the same at every call."""
    factory = {"device": given.device, "dtype": torch.bfloat16}
    kind = diffusion.Diffusion if given.shape.adaptive else models.Transformer
    model = kind(given.shape, given.length, **factory)
    models.reset(model, SEED)
    return model
