"""A training step: its settings, its model, what tilenorm and a compiler do to that, its inputs."""

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
        return ", ".join(words)


@dataclass(frozen=True)
class Variant:
    """``patch``: the options of ``tilenorm.patch``, or None for a model that is not patched.

    ``compiler``: "torch" or "tilenorm", whose ``compile`` gets the model with ``options``.
    """

    patch: dict | None = None
    compiler: str | None = None
    options: dict = field(default_factory=dict)


VARIANTS = {
    "eager": Variant(),
    "compile": Variant(compiler="torch"),
    "patch": Variant(patch={}),
    "patch-add": Variant(patch={"residual": True}),
    "patch-compile": Variant(patch={}, compiler="torch"),
    "tilenorm-compile": Variant(compiler="tilenorm"),  # replaces norms in the graph
    "tilenorm-compile-low": Variant(compiler="tilenorm", options={"memory": "low"}),
}


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


def prepared(model: nn.Module, variant: Variant, whole: bool) -> tuple[Callable, list]:
    """What to call, and the reports of what tilenorm replaced. The norms of the model are replaced,
    and its layers are compiled, in place.
    """
    import tilenorm

    reports = []
    if variant.patch is not None:
        reports.append(tilenorm.patch(model, **variant.patch))
    if variant.compiler is None:
        return model, reports
    compiler = {"torch": torch, "tilenorm": tilenorm}[variant.compiler].compile

    def compiled(part: nn.Module) -> nn.Module:
        run = compiler(part, **variant.options)
        reports.append(getattr(run, "tilenorm_report", None))
        return run

    if whole:
        return compiled(model), reports
    model.blocks = nn.ModuleList(map(compiled, model.blocks))
    model.head = compiled(model.head)
    return model, reports


def said(reports: list) -> str:
    """The reports that say anything. Layers that share compiled code have one report."""
    return "\n".join(str(r) for r in reports if r is not None and getattr(r, "graphs", True))


def share(model: nn.Module, other: nn.Module) -> None:
    """Give a model the parameters of another, whose layers may be compiled or not."""

    def plain(name: str) -> str:
        return name.replace("_orig_mod.", "")

    given = {plain(name): tensor for name, tensor in other.state_dict(keep_vars=True).items()}
    named = {name: given[plain(name)] for name in model.state_dict()}
    model.load_state_dict(named, assign=True)
