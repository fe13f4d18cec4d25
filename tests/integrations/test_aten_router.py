"""tilenorm.override beside PyTorch's router of its own kernels, torch.backends.python_native.

The router has a stand-in kernel for the CPU here, and the interpreter runs tilenorm's.
"""

import sys
import types

import pytest
import torch
import torch.nn.functional as F

from tilenorm.ops import torch_private
from tilenorm.ops.torch_private import native_router, rms_norm_of_torch

from ..ops.helpers import random
from .aten_helpers import CpuOverride, cpu_override, registered

pytestmark = pytest.mark.skipif(native_router() is None, reason="needs PyTorch's router")
OP, DSL = "_fused_rms_norm", "stand_in"


@pytest.fixture
def router():
    """The names of the stand-in's calls. Its language of kernels can be switched off and on."""
    from torch._native import dsl_registry

    ran, registry = [], native_router()

    def kernel(x, shape, weight, eps):
        ran.append(DSL)
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return (x * rstd if weight is None else x * rstd * weight), rstd

    module = types.ModuleType(DSL)
    module.runtime_available, module.runtime_version = (lambda: True), (lambda: None)
    module.register_op_override = registry.register_op_override
    module.deregister_op_overrides = lambda: registry.deregister_op_overrides(disable_dsl_names=DSL)
    registry_of_dsls = dsl_registry.dsl_registry
    registry_of_dsls.register_dsl(DSL, module)
    registry.register_op_override(DSL, "aten", OP, "CPU", cond=lambda *_: True, impl=kernel)
    key = next(key for key in registry._graphs if key[-2:] == (OP, "CPU"))
    registry._register_overrides_from_graph(*key, registry._graphs[key])
    yield ran
    registry.deregister_op_overrides(disable_dsl_names=DSL)
    del registry._graphs[key], registry_of_dsls._dsl_modules[DSL]
    for names in (
        registry._dsl_name_to_lib_graph,
        registry._op_symbol_to_lib_graph,
        registry._dispatch_key_to_lib_graph,
    ):
        for name in [name for name, keys in names.items() if key in keys]:
            names[name] = [k for k in names[name] if k != key]
    registry.reenable_op_overrides(enable_dsl_names=DSL)
    for cached in ("list_all_dsls", "list_available_dsls", "is_dsl_available"):
        getattr(registry_of_dsls, cached).cache_clear()


NATIVE = sys.modules["torch.backends.python_native"] if native_router() else None
SWITCHES = {
    "language": (lambda: getattr(NATIVE, DSL).disable(), lambda: getattr(NATIVE, DSL).enable()),
    "operator": (lambda: NATIVE.disable_operations(OP), lambda: NATIVE.enable_operations(OP)),
}
EACH_SWITCH = pytest.mark.parametrize("switch", SWITCHES)


def who(override: CpuOverride, ran: list, dtype=torch.float32) -> str:
    """Whose kernels a norm runs."""
    override.launches.clear()
    ran.clear()
    x = random(3, 40).to(dtype)
    y = F.rms_norm(x, (40,), eps=1e-5)
    wanted = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
    assert not (ran and override.launches)
    return DSL if ran else "tilenorm" if override.launches else "ATen"


@EACH_SWITCH
@pytest.mark.parametrize("on_at_first", [True, False])
def test_an_override_stays_in_force(router, switch, on_at_first):
    off, on = SWITCHES[switch]
    with cpu_override() as cpu:
        assert who(cpu, router) == DSL
        if not on_at_first:
            off()
        before = registered()
        cpu.begin()
        for _ in range(2):
            off()
            assert who(cpu, router) == "tilenorm"
            assert who(cpu, router, torch.float64) == "ATen"
            on()
            assert who(cpu, router) == "tilenorm"
            assert who(cpu, router, torch.float64) == DSL
        if not on_at_first:
            off()
        cpu.end()
        assert len(registered()) == len(before)
        assert who(cpu, router) == (DSL if on_at_first else "ATen")
        on()
        assert who(cpu, router) == who(cpu, router, torch.float64) == DSL


@EACH_SWITCH
def test_what_was_switched_inside_of_a_block_stays_so(router, switch):
    off, on = SWITCHES[switch]
    function = native_router()._register_overrides_from_graph
    with cpu_override() as cpu:
        cpu.around(off)
        assert who(cpu, router) == "ATen"
        cpu.around(on)
        assert who(cpu, router) == DSL
        cpu.begin()
        with getattr(NATIVE, DSL).disabled(), NATIVE.operations_disabled(OP):
            assert who(cpu, router) == "tilenorm"
            cpu.end()
            assert who(cpu, router) == "ATen"
        assert who(cpu, router) == DSL
    assert native_router()._register_overrides_from_graph is function


@EACH_SWITCH
def test_whose_rms_norm_it_is(router, switch, monkeypatch):
    off, on = SWITCHES[switch]
    monkeypatch.setattr(torch_private, "RMS_NORM_ON_CUDA", (OP, "CPU"))
    assert rms_norm_of_torch() == f"{DSL}, else ATen"
    monkeypatch.setitem(torch_private.NATIVE, DSL, "quack")
    assert rms_norm_of_torch() == "quack, else ATen"
    off()
    assert rms_norm_of_torch() == "ATen"
    on()
    assert rms_norm_of_torch() == "quack, else ATen"
