"""A training step: its settings, its model with the optimizer, and its inputs."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bench.models import Transformer, drawn_batch
from bench.shapes import LLAMA, MODELS, Shape

LEARNING_RATE = 1e-4


OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


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
    seed: int = 0
    device: str = "cuda"

    @classmethod
    def of(cls, fields: dict) -> "Settings":
        """What ``dataclasses.asdict`` made a dictionary of."""
        return cls(**fields | {"shape": Shape(**fields["shape"])})

    @property
    def tokens(self) -> int:
        """The tokens of a step."""
        return self.batch * self.length

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
        if self.shape.dropout:
            found.append(f"dropout {self.shape.dropout}")
        return found


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
        kind = OPTIMIZERS[given.optimizer]
        optimizer = kind(model.parameters(), LEARNING_RATE, fused=device != "cpu")
        sizes = given.shape, given.batch, given.length
        return cls(model, optimizer, drawn_batch(*sizes, given.seed, device, torch.bfloat16))

    def step(self, call: Callable[..., Tensor]) -> Tensor:
        """A whole step of the model, whose loss ``call`` computes."""
        loss = call(*self.inputs)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()
