"""Which calls the extension in C++ serves, told by what a call enters in Python."""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

import tilenorm

from .calls import random
from .pretended import WARM

N = 64
PACKAGE = Path(tilenorm.__file__).parent
ROOMS = ("kernels", "launch")  # of which the interpreter calls functions


@cache
def _counts(file: str) -> bool:
    path = Path(file)
    return PACKAGE in path.parents and path.parent.name not in ROOMS


def entered(call: Callable, counts: Callable[[str], bool] = _counts) -> list[str]:
    """The functions that a call enters in files that count: those of the package, without kernels
    and what the interpreter calls of launch/.
    """
    seen: list[str] = []

    def profile(frame, event, _):
        if event == "call" and counts(frame.f_code.co_filename):
            seen.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def is_served(call: Callable, most: int = 2) -> bool:
    """Whether the extension serves a call: nothing of the package runs below `call.call`."""
    seen = entered(call)
    return len(seen) <= most and seen[-1:] in (["call"], [])


def leaves(*names: str, rows: int = 5, **how) -> dict[str, torch.Tensor]:
    shapes = {"input": (rows, N), "residual": (rows, N), "weight": (N,), "bias": (N,)}
    made = {n: random(*shapes[n], seed=i, **how) for i, n in enumerate(names)}
    return {n: t.requires_grad_() for n, t in made.items()}


THREE = ("input", "weight", "bias")


def layer(given: dict[str, torch.Tensor]) -> torch.Tensor:
    return tilenorm.layer_norm(given["input"], (N,), given["weight"], given["bias"], 1e-6)


def warmed(rows: int = 5) -> list[torch.Tensor]:
    """Repeats a step of layer_norm until the extension serves it; its gradients."""
    for _ in range(WARM):
        given = leaves(*THREE, rows=rows)
        y = layer(given)
        y.backward(torch.ones_like(y))
    assert is_served(lambda: layer(given))
    return [t.grad for t in given.values()]
