"""How many of the package's Python functions a warm call runs, and what it allocates."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tilenorm
from tilenorm.launch import driver
from tilenorm.ops import cutile
from tilenorm.ops.torch_private import fused_rms_norm

from .helpers import random
from .pretended import pretended_gpu

N = 128
X, RESIDUAL, GATE = (random(4, N, dtype=torch.bfloat16, seed=i) for i in range(3))
W, B = (random(N, dtype=torch.bfloat16, seed=i) for i in (3, 4))
CHUNK = random(2, 3 * N, dtype=torch.bfloat16, seed=5)[:, N : 2 * N]  # for two groups of rows
TABLES = random(2, 64, seed=6), random(2, 64, seed=7)
KEY = random(2, 2, 3, 64, dtype=torch.bfloat16, seed=8)[:, :, 1:]  # of a packed projection
QUANTIZED = {"scaling": "row", "return_output": True}
CALLS: dict[str, Callable] = {
    "rms_norm": lambda x: tilenorm.rms_norm(x, (N,), W, 1e-6),
    "layer_norm": lambda x: tilenorm.layer_norm(x, (N,), W, B, 1e-6),
    "add_rms_norm": lambda x: tilenorm.add_rms_norm(x, RESIDUAL, (N,), W, 1e-6),
    "add_rms_norm of one tensor": lambda x: tilenorm.add_rms_norm(x, x, (N,), W, 1e-6),
    "add_layer_norm": lambda x: tilenorm.add_layer_norm(x, RESIDUAL, (N,), W, B, 1e-6),
    "rms_norm_add": lambda x: tilenorm.rms_norm_add(x, RESIDUAL, (N,), W, 1e-6),
    "layer_norm_add": lambda x: tilenorm.layer_norm_add(x, RESIDUAL, (N,), W, B, 1e-6),
    "gated_rms_norm": lambda x: tilenorm.gated_rms_norm(x, GATE, (N,), W, 1e-6),
    "rms_norm_quantized": lambda x: tilenorm.rms_norm_quantized(x, (N,), W, 1e-6, **QUANTIZED),
    "add_layer_norm_quantized": lambda x: tilenorm.add_layer_norm_quantized(
        x, RESIDUAL, (N,), W, B, 1e-6, **QUANTIZED
    ),
    "modulated_rms_norm": lambda x: tilenorm.modulated_rms_norm(x, (N,), CHUNK),
    "modulated_layer_norm": lambda x: tilenorm.modulated_layer_norm(
        x, (N,), CHUNK, CHUNK, residual=RESIDUAL, gate=CHUNK
    ),
    "rms_norm_rope": lambda x: tilenorm.rms_norm_rope(
        x.view(2, 2, 2, 64), (64,), *TABLES, W[:64], key=KEY, key_weight=B[:64]
    ),
    "rms_norm_add_rms_norm": lambda x: tilenorm.rms_norm_add_rms_norm(
        x, RESIDUAL, (N,), W, B, 1e-6
    ),
}
MORE = {"add_rms_norm of one tensor": 1}  # what compares the tensors that are given once
PACKAGE = str(Path(tilenorm.__file__).parent)
STAND_INS = ("<lambda>", "_empty_strided_cpu")  # for C functions, where there is no GPU


def frames(call: Callable, x: torch.Tensor) -> list[str]:
    """The names of the package's functions that a warm call enters."""
    for _ in range(3):
        call(x)
    entered: list[str] = []

    def profile(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            entered.append(code.co_name)

    sys.setprofile(profile)
    try:
        call(x)
    finally:
        sys.setprofile(None)
    return entered


@pytest.mark.parametrize("name", CALLS)
def test_frames_up_to_the_launch(name, monkeypatch):
    def prepare(index, stream, launches, arrays, numbered, addresses):
        return driver.repeating(lambda *_: 0, (), addresses)

    with pretended_gpu(), torch.no_grad():
        monkeypatch.setattr(cutile, "prepare", prepare)
        found = frames(CALLS[name], X)
    found = [
        name for name in found[: len(found) - found[::-1].index("repeat")] if name not in STAND_INS
    ]
    assert len(found) <= 7 + MORE.get(name, 0), found


@pytest.mark.skipif(fused_rms_norm is None, reason="this PyTorch has no operator that gives rstd")
@pytest.mark.parametrize(
    "name", ["rms_norm", "layer_norm", "add_rms_norm", "rms_norm_add", "layer_norm_add"]
)
def test_frames_by_pytorchs_operators(name):
    with torch.no_grad():
        found = frames(CALLS[name], X)
    assert len(found) <= 12, found


# The outputs, mean and rstd, the gradients, and the partial sums of dW and dB. A forward pass
# without grad writes mean and rstd too where it would else compile to other bits.
@pytest.mark.parametrize(
    "name, forward, both",
    [
        ("rms_norm", 1, 5),
        ("layer_norm", 3, 7),
        ("add_rms_norm", 3, 6),
        ("rms_norm_add", 2, 5),
        ("gated_rms_norm", 2, 6),
        ("rms_norm_add_rms_norm", 2, 10),
        ("modulated_rms_norm", 1, 5),
        ("rms_norm_rope", 2, 7),
    ],
)
def test_allocations_of_a_warm_call(name, forward, both, monkeypatch):
    made, empty = [], cutile._empty_strided_cpu

    def counted(*how):
        made.append(how)
        return empty(*how)

    monkeypatch.setattr(cutile, "_empty_strided_cpu", counted)
    leaves = X, RESIDUAL, GATE, W, B, CHUNK
    with pretended_gpu():
        for count, grad in ((forward, False), (both, True)):
            for t in leaves:
                t.requires_grad_(grad)
            for _ in range(4):
                made.clear()
                found = CALLS[name](X)
                if grad:
                    first = found if isinstance(found, torch.Tensor) else found[0]
                    first.backward(torch.ones_like(first))
            for t in leaves:
                t.requires_grad_(False).grad = None
            assert len(made) == count, made
