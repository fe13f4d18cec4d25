"""When the override is registered, how it ends, and what it says where it cannot serve."""

import threading

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


def test_restored_exactly(cpu):
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

    def serves() -> bool:
        cpu.launches.clear()
        F.layer_norm(random(1, 8), (8,))
        assert (registered() != before) == bool(cpu.launches)
        return bool(cpu.launches)

    cpu.begin()
    cpu.begin()
    cpu.end()
    assert serves(), "a nested block ended the one around it"
    cpu.enable(True)
    cpu.enable(True)
    cpu.end()
    assert serves(), "a block ended what enable began"
    cpu.begin()
    cpu.enable(False)
    assert serves(), "disable ended a block"
    cpu.end()
    assert not serves()
    cpu.enable(False)
    assert not serves()


def test_blocks_of_two_threads(cpu):
    began, finish, x = threading.Event(), threading.Event(), random(1, 8)

    def other():
        cpu.begin()
        began.set()
        finish.wait(10)
        cpu.end()

    before = registered()
    thread = threading.Thread(target=other)
    thread.start()
    assert began.wait(10)
    cpu.around(F.layer_norm, x, (8,))
    cpu.launches.clear()
    F.layer_norm(x, (8,))
    assert cpu.launches, "the end of one thread's block ended another's"
    finish.set()
    thread.join()
    assert registered() == before


SM_90 = Target("sm_90", 132)
MACHINES = {
    "PyTorch sees no CUDA GPU": (None, None),
    "the driver serves CUDA 12; cuTile takes CUDA 13": (Device("cuda", SM_90, 12080), None),
    "sm_75: cuTile compiles for": (Device("cuda", Target("sm_75", 40), 13000), None),
    "its compiler is missing": (Device("cuda", SM_90, 13000), "its compiler is missing"),
}
ASKS = {"enable": tilenorm.enable, "override": lambda: tilenorm.override().__enter__()}


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("reason", MACHINES)
def test_a_machine_that_cutile_does_not_serve(monkeypatch, ask, reason):
    device, compiler = MACHINES[reason]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device is not None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(aten, "device_of", lambda kind, index: device)
    monkeypatch.setattr(registry, "_compiler_missing", lambda: compiler)
    before = registered()
    with pytest.raises(RuntimeError, match=f"tilenorm.override: cuTile serves no .*{reason}"):
        ASKS[ask]()
    assert registered() == before


def test_disabling_what_was_not_enabled_does_nothing():
    before = registered()
    tilenorm.disable()
    assert registered() == before
