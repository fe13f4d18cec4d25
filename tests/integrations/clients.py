"""Prints what patch does with models of other packages.

    pip install -e ".[clients]"
    python -m tests.integrations.clients > .github/clients.md

test_clients.py compares the outputs and the gradients of these models before and after patch.
"""

import platform
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn

import tilenorm
from tilenorm.integrations.patch.models import Left, Report

FILE = Path(__file__).parents[2] / ".github" / "clients.md"
HEAD = """# Models of other packages

This table says what `tilenorm.patch(model, residual=True)` does with models of other packages.
A norm is patched if tilenorm computes it. A block is patched if tilenorm computes its sums together
with its norms. `tests/integrations/test_clients.py` holds that outputs and gradients stay the same
and that `undo` takes everything back. [families.md](families.md) has the models of transformers and
of diffusers.

`python -m tests.integrations.clients > .github/clients.md` writes this file. It was last run with
PyTorch {torch} and Python {python}.

| package | model | norms patched | blocks patched | norms left |
| :-- | :-- | --: | --: | :-- |
"""


class Client(NamedTuple):
    """A model of a package. build(module) makes the model and an input, module being `module` of
    the package, which PyPI names `package`. A model on the meta device has no input.
    """

    package: str
    module: str
    build: Callable[[ModuleType], tuple[nn.Module, Tensor | None]]
    norms: int  # how many norms are patched
    blocks: int  # how many blocks are patched
    left: str = ""  # a part of the reason why the other norms are left


class Called(nn.Module):
    """A model that takes one tensor, in place of one whose forward takes more."""

    def __init__(self, model: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]):
        super().__init__()
        self.model, self.call = model, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.model, x)


def images(side: int = 32) -> Tensor:
    return torch.randn(2, 3, side, side)


def of_timm(model: str, timm: ModuleType, **options):
    sizes = {"img_size": 32, "patch_size": 16, "embed_dim": 32, "depth": 2, "num_heads": 2}
    return getattr(timm.models, model)(**sizes, **options), images()


def convnext(timm: ModuleType):
    return timm.models.ConvNeXt(depths=(1, 1, 1, 1), dims=(16, 24, 32, 40)), images(64)


def clip(open_clip: ModuleType):
    vision = {"image_size": 32, "patch_size": 16, "width": 64, "layers": 2, "head_width": 32}
    text = {"context_length": 8, "vocab_size": 50, "width": 64, "heads": 2, "layers": 2}
    tokens = torch.randint(1, 50, (2, 8))

    def call(model, x):
        return model.encode_image(x) @ model.encode_text(tokens).T

    return Called(open_clip.CLIP(32, vision, text), call), images()


def encoder(x_transformers: ModuleType, **options):
    return x_transformers.Encoder(dim=32, depth=2, heads=2, **options), torch.randn(2, 5, 32)


def gpt(litgpt: ModuleType, name: str):
    """A model that reads embeddings in the place of tokens, so that the input has a gradient."""
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_query_groups": 2, "head_size": 16}
    config = litgpt.Config.from_name(
        name, **sizes, intermediate_size=64, block_size=16, padded_vocab_size=50
    )
    model = litgpt.GPT(config)
    model.transformer.wte = nn.Identity()
    return Called(model, lambda gpt, x: gpt(x)), torch.randn(2, 5, 32)


def of_torchtitan(models: ModuleType, configs: str):
    """A model of 8 billion parameters, on the meta device."""
    with torch.device("meta"):
        return getattr(models, configs)["8B"](attn_backend="flex").build(), None


CLIENTS = {
    "VisionTransformer": Client("timm", "timm", partial(of_timm, "VisionTransformer"), 5, 2),
    "Eva": Client("timm", "timm", partial(of_timm, "Eva"), 5, 2),
    "ConvNeXt": Client("timm", "timm", convnext, 9, 0),
    "CLIP": Client("open_clip_torch", "open_clip", clip, 11, 4),
    "Encoder": Client("x-transformers", "x_transformers", encoder, 5, 0),
    "Encoder(use_rmsnorm=True)": Client(
        "x-transformers", "x_transformers", partial(encoder, use_rmsnorm=True), 0, 0, "F.normalize"
    ),
    "Llama 3": Client("litgpt", "litgpt", partial(gpt, name="Llama-3-8B"), 5, 2),
    "Gemma 2": Client("litgpt", "litgpt", partial(gpt, name="Gemma-2-9b"), 9, 2),
    "Qwen 3": Client("litgpt", "litgpt", partial(gpt, name="Qwen3-8B"), 9, 2),
    "Pythia": Client("litgpt", "litgpt", partial(gpt, name="pythia-14m"), 5, 2),
    "Llama 3 8B": Client(
        "torchtitan",
        "torchtitan.models.llama3",
        partial(of_torchtitan, configs="llama3_configs"),
        65,
        32,
    ),
    "Qwen 3 8B": Client(
        "torchtitan",
        "torchtitan.models.qwen3",
        partial(of_torchtitan, configs="qwen3_configs"),
        145,
        36,
    ),
}


def imported(name: str) -> ModuleType:
    """A module of a client.

    PyPI's torchvision is built for CUDA and registers no operators beside a PyTorch for CPUs. It
    cannot be imported without two of them, which no test calls.
    """
    if find_spec("torchvision") and not torch.version.cuda:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, operator):
                library.define(f"{operator}(Tensor dets, Tensor scores, float threshold) -> Tensor")
    return import_module(name)


def built(client: Client) -> tuple[nn.Module, Tensor | None]:
    torch.manual_seed(0)
    model, x = client.build(imported(client.module))
    return model.eval(), x


class Counts(NamedTuple):
    """How many norms and how many blocks of a model are patched, and the norms that are left."""

    norms: int
    blocks: int
    left: list[Left]


def patched(model: nn.Module) -> tuple[Report, Counts]:
    containers = {name for name, module in model.named_modules() if [*module.children()]}
    report = tilenorm.patch(model, residual=True)

    def is_block(name: str) -> bool:
        return name in containers or name == "the model"

    blocks = sum(is_block(entry.name.split(", ")[0]) for entry in report.patched)
    left = [
        entry
        for entry in report.left
        if "norm" in entry.cls.__name__.lower() and not is_block(entry.name.split(", ")[0])
    ]
    return report, Counts(len(report.patched) - blocks, blocks, left)


def row(name: str, client: Client) -> str:
    norms, blocks, left = patched(built(client)[0])[1]
    reasons = "; ".join(sorted({entry.reason for entry in left}))
    left_text = f"{len(left)}: {reasons}" if left else "0"
    package = f"{client.package} {version(client.package)}"
    return f"| {package} | {name} | {norms} | {blocks} | {left_text} |\n"


def main() -> None:
    sys.stdout.write(HEAD.format(torch=torch.__version__, python=platform.python_version()))
    sys.stdout.writelines(row(name, client) for name, client in CLIENTS.items())


if __name__ == "__main__":
    main()
