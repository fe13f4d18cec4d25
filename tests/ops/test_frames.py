"""How many of the package's Python functions a warm call runs, and what it allocates.

test_native.py tests that an extension in C++ leaves none of them.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import tilenorm
from tests.support.pretended import pretended_gpu
from tests.support.served import entered
from tests.support.uses import of_kernels
from tilenorm.launch import driver
from tilenorm.ops.passes import cutile
from tilenorm.ops.pytorch.torch_private import fused_rms_norm
from tilenorm.table import OPS

B = torch.bfloat16
ONE = "add_rms_norm of one tensor"


def called(name: str) -> Callable:
    """A call of a public function without arguments, all of whose tensors require grad."""
    use = of_kernels(name.split()[0])
    function, rows = use.bound(use.tensors((B, B), "cpu"))
    return partial(function, *(rows[:1] * len(rows) if name == ONE else rows))


MORE = {ONE: 1}  # what compares the tensors that are given once
PACKAGE = str(Path(tilenorm.__file__).parent)
STAND_INS = ("<lambda>", "_empty_strided_cpu")  # for C functions, where there is no GPU


def frames(call: Callable) -> list[str]:
    """The names of the package's functions that a warm call enters."""
    for _ in range(3):
        call()
    return entered(call, lambda file: file.startswith(PACKAGE))


@pytest.mark.parametrize("name", [*OPS, ONE])
def test_frames_up_to_the_launch(name, in_python):
    def prepare(index, stream, launches, arrays, numbered, addresses):
        return driver.repeating(lambda *_: 0, (), addresses)

    with pretended_gpu(), torch.no_grad(), patch.object(cutile, "prepare", prepare):
        found = frames(called(name))
    found = [name for name in found[: 1 + found.index("repeated")] if name not in STAND_INS]
    assert len(found) <= 5 + MORE.get(name, 0), found


@pytest.mark.skipif(fused_rms_norm is None, reason="this PyTorch has no operator that gives rstd")
@pytest.mark.parametrize(
    "name", ["rms_norm", "layer_norm", "add_rms_norm", "rms_norm_add", "layer_norm_add"]
)
def test_frames_by_pytorchs_operators(name):
    with torch.no_grad():
        found = frames(called(name))
    assert len(found) <= 13, found


# The outputs, mean and rstd, the gradients, and the partial sums over rows. A forward pass
# without grad writes mean and rstd too where it would else compile to other bits.
@pytest.mark.parametrize(
    "name, forward, both",
    [
        ("rms_norm", 1, 5),
        ("gated_rms_norm", 1, 6),
        ("rms_norm_add_rms_norm", 2, 10),
        ("modulated_rms_norm", 2, 11),
        ("rms_norm_rope", 2, 7),
    ],
)
def test_allocations_of_a_warm_call(name, forward, both, in_python, monkeypatch):
    """Where grad is off, nothing is saved of tensors that require it."""
    made, empty = [], cutile._empty_strided_cpu
    monkeypatch.setattr(cutile, "_empty_strided_cpu", lambda *how: made.append(how) or empty(*how))
    call = called(name)
    with pretended_gpu():
        for count, grad in ((forward, False), (both, True)):
            for _ in range(4):
                made.clear()
                with torch.set_grad_enabled(grad):
                    first, *_ = call().values()
                if grad:
                    first.backward(torch.ones_like(first))
            assert len(made) == count, made
