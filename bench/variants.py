"""The variants of a training step: what tilenorm and a compiler do to the model."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn


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
    """Give a model the parameters and buffers of another, whose layers may be compiled or not."""

    def plain(name: str) -> str:
        return name.replace("_orig_mod.", "")

    tensors = *other.named_parameters(remove_duplicate=False), *other.named_buffers()
    given = {plain(name): tensor for name, tensor in tensors}
    for prefix, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            for name in [name for name, tensor in held.items() if tensor is not None]:
                held[name] = given[plain(f"{prefix}.{name}" if prefix else name)]
