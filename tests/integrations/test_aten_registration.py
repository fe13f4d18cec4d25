"""When tilenorm.override registers and removes its kernels, and its errors without a usable GPU."""

import pytest
import torch
import torch.nn.functional as F

import tilenorm
from tilenorm.integrations import aten
from tilenorm.launch.target import Target
from tilenorm.ops import registry
from tilenorm.ops.registry import Device

from ..ops.helpers import random
from .aten_helpers import registered


def test_kernels_are_restored_exactly(cpu):
    before, x = registered(), random(5, 40)
    expected = F.layer_norm(x, (40,))
    with pytest.raises(ZeroDivisionError):
        cpu.around(lambda: 1 / 0)
    assert registered() == before
    for _ in range(2):
        cpu.around(F.layer_norm, x, (40,))
    assert registered() == before
    cpu.launches.clear()
    assert torch.equal(F.layer_norm(x, (40,)), expected) and not cpu.launches


def test_blocks_and_enable_together(cpu):
    before = registered()

    def is_active() -> bool:
        cpu.launches.clear()
        F.layer_norm(random(1, 8), (8,))
        assert (registered() != before) == bool(cpu.launches)
        return bool(cpu.launches)

    cpu.begin()
    cpu.begin()
    cpu.end()
    assert is_active(), "the end of a nested block ended the outer block"
    cpu.enable(True)
    cpu.enable(True)
    cpu.end()
    assert is_active(), "the end of a block undid enable()"
    cpu.begin()
    cpu.enable(False)
    assert is_active(), "disable() ended an open block"
    cpu.end()
    assert not is_active()
    cpu.enable(False)
    assert not is_active()


SM_90 = Target("sm_90", 132)
MACHINES = {
    "PyTorch sees no CUDA GPU": (None, None),
    "the driver serves CUDA 12; cuTile takes CUDA 13": (Device("cuda", SM_90, 12080), None),
    "sm_75: cuTile compiles for": (Device("cuda", Target("sm_75", 40), 13000), None),
    "its compiler is missing": (Device("cuda", SM_90, 13000), "its compiler is missing"),
}
ENTRIES = {"enable": tilenorm.enable, "override": lambda: tilenorm.override().__enter__()}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("reason", MACHINES)
def test_unsupported_machine_raises_with_the_reason(monkeypatch, entry, reason):
    device, compiler = MACHINES[reason]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device is not None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(aten, "device_of", lambda kind, index: device)
    monkeypatch.setattr(registry, "compiler_problem", lambda: compiler)
    before = registered()
    with pytest.raises(RuntimeError, match=f"tilenorm.override: cuTile supports no .*{reason}"):
        ENTRIES[entry]()
    assert registered() == before


def test_disable_without_enable_does_nothing():
    before = registered()
    tilenorm.disable()
    assert registered() == before
