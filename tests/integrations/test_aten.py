"""tilenorm.override on the CPU: the interpreter runs its kernels. When it registers and removes
them, its errors without a usable GPU, and PyTorch's router of its own kernels beside it.
"""

import sys
import types
from functools import partial
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import tilenorm
from tests.support.calls import random
from tilenorm.integrations import aten
from tilenorm.launch.target import Target
from tilenorm.ops.passes import registry
from tilenorm.ops.passes.registry import Device
from tilenorm.ops.pytorch import torch_private
from tilenorm.ops.pytorch.torch_private import native_router, rms_norm_of_torch

from .aten_helpers import CpuOverride, cpu_override, registered

SHAPES = [((5, 40), 1), ((40,), 1), ((3, 37), 1), ((2, 3, 4, 8), 2)] * 2
SHAPES += [((0, 40), 1), ((2, 0, 40), 1), ((5, 0), 1)]


def same_results(cpu, operator, arguments, launches: list) -> tuple:
    """What an operator returns, in and outside of a block, where it launches these kernels."""
    cpu.launches.clear()
    expected = operator(*arguments)
    assert not cpu.launches
    got = cpu.around(operator, *arguments)
    assert cpu.launches == launches
    eps = 8 * torch.finfo(arguments[0].dtype).eps
    for a, e in zip(got, expected, strict=True):
        assert (a is None) == (e is None)
        if a is not None:
            assert a.shape == e.shape and a.is_contiguous()
            as_cuda = a.dtype == torch.float32 and a.shape[-1] == 1  # statistics are float32
            assert as_cuda or (a.dtype == e.dtype and not (launches and e.shape[-1] == 1))
            torch.testing.assert_close(a, e, rtol=eps, atol=eps, check_dtype=False, equal_nan=True)
    return expected


@pytest.mark.parametrize("norm", ["native_layer_norm", "_fused_rms_norm"])
def test_drawn_calls_of_the_operators(cpu, norm):
    """tilenorm's kernels run what they serve, else PyTorch's, with the same results."""
    rng = Random(norm)
    forward, backward = (getattr(torch.ops.aten, name) for name in (norm, f"{norm}_backward"))
    for _ in range(80):
        shape, dims = rng.choice(SHAPES)
        dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16, torch.float64))
        # F.layer_norm accepts a weight of another dtype on the CPU, but not on CUDA.
        other = torch.float32 if dtype == torch.bfloat16 and rng.random() < 0.3 else dtype
        x, dy = (random(*shape, dtype=dtype, seed=seed) for seed in (0, 9))
        row = x.shape[-dims:]
        affine = [
            random(*row, dtype=other, seed=seed) if rng.random() < 0.7 else None
            for seed in ((1, 2) if norm == "native_layer_norm" else (1,))
        ]
        there = [t.dtype for t in affine if t is not None]
        served = dtype != torch.float64 and row.numel() and {dtype}.issuperset(there)
        runs = bool(served and x.numel())
        how = x, [*row], *affine
        _, *stats = same_results(cpu, forward, (*how, 1e-5), ["row_forward"] * runs)
        if other != dtype:  # not every gradient on the CPU takes that
            continue
        if norm == "native_layer_norm" and rng.random() < 0.2 and x.numel():
            more = rng.randrange(2)  # statistics of other rows
            stats[more] = torch.cat([stats[more].flatten(), torch.ones(2)])
            runs = False
        mask = [t is not None and rng.random() < 0.6 for t in (x, *affine)]
        runs = runs and stats[-1].dtype == torch.float32 and any(mask)
        launches = ["norm_backward"] + ["column_sum"] * any(mask[1:]) if runs else []
        given = dy, x, [*row], *stats, *affine, mask
        same_results(cpu, backward, given, launches)


def error_of(function, *arguments):
    """The type and the message of the exception that a call raises."""
    with pytest.raises((RuntimeError, TypeError, ValueError)) as raised:
        function(*arguments)
    return raised.type, str(raised.value)


@pytest.mark.parametrize(
    "arguments",
    [(random(5, 40), (41,)), (random(5, 40), (40,), random(41)), (random(5, 40), ())],
    ids=["shape", "weight", "empty shape"],
)
def test_bad_input_raises_pytorchs_error(cpu, arguments):
    def native(x, shape, weight=None):
        return torch.native_layer_norm(x, shape, weight, None, 1e-5)

    for function in (F.layer_norm, F.rms_norm, native):
        assert cpu.around(error_of, function, *arguments) == error_of(function, *arguments)


CALLERS = {
    "module": lambda x: nn.LayerNorm(40)(x),
    "vmap": lambda x: torch.func.vmap(lambda row: F.layer_norm(row, (40,)))(x),
    "grad": lambda x: torch.func.grad(lambda x: F.layer_norm(x, (40,)).square().sum())(x),
    "checkpoint": lambda x: checkpoint(F.layer_norm, x, (40,), use_reentrant=False),
    "compiled": lambda x: torch.compile(
        lambda x: F.layer_norm(x, (40,)), fullgraph=True, backend="aot_eager"
    )(x),
    "second derivatives": lambda x: torch.autograd.grad(
        F.layer_norm(x, (40,)), x, random(5, 40, seed=2), create_graph=True
    )[0],
}


@pytest.mark.parametrize("caller", CALLERS)
def test_every_caller_runs_the_kernels(cpu, caller):
    def run():
        torch.manual_seed(0)
        x = random(5, 40).requires_grad_()
        y = CALLERS[caller](x)
        if y.requires_grad:
            y.square().sum().backward()
        return y.detach(), x.grad

    expected, got = run(), cpu.around(run)
    assert cpu.launches
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", [F.rms_norm, F.layer_norm])
def test_kernels_run_on_the_local_tensors_of_dtensors(norm, cpu, one_process_mesh):
    def step(x):
        x = x.detach().requires_grad_()
        y = norm(x, (40,))
        return y.detach(), *torch.autograd.grad(y.square().sum(), x)

    x = random(4, 6, 40)
    expected, launches = cpu.around(step, x), [*cpu.launches]
    cpu.launches.clear()
    got = cpu.around(step, distribute_tensor(x, one_process_mesh, [Shard(1)]))
    assert cpu.launches == launches and len(launches) == 2
    assert all(torch.equal(a.full_tensor(), b) for a, b in zip(got, expected, strict=True))


SM_90 = Target("sm_90", 132)
MACHINES = {
    "PyTorch sees no CUDA GPU": (None, None),
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


NEEDS_ROUTER = pytest.mark.skipif(native_router() is None, reason="needs PyTorch's router")
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
    dictionaries = registry._graphs, registry._dsl_name_to_lib_graph
    dictionaries += registry._op_symbol_to_lib_graph, registry._dispatch_key_to_lib_graph
    saved = [{key: [*value] for key, value in kept.items()} for kept in dictionaries]
    registry_of_dsls.register_dsl(DSL, module)
    registry.register_op_override(DSL, "aten", OP, "CPU", cond=lambda *_: True, impl=kernel)
    key = next(key for key in registry._graphs if key[-2:] == (OP, "CPU"))
    registry._register_overrides_from_graph(*key, registry._graphs[key])
    yield ran
    registry.deregister_op_overrides(disable_dsl_names=DSL)
    del registry_of_dsls._dsl_modules[DSL]
    for kept, before in zip(dictionaries, saved, strict=True):
        kept.clear()
        kept.update(before)
    registry.reenable_op_overrides(enable_dsl_names=DSL)
    for cached in ("list_all_dsls", "list_available_dsls", "is_dsl_available"):
        getattr(registry_of_dsls, cached).cache_clear()


NATIVE = sys.modules["torch.backends.python_native"] if native_router() else None
SWITCHES = {
    "language": (lambda: getattr(NATIVE, DSL).disable(), lambda: getattr(NATIVE, DSL).enable()),
    "operator": (lambda: NATIVE.disable_operations(OP), lambda: NATIVE.enable_operations(OP)),
}


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


@pytest.mark.parametrize("switch", [None, *(pytest.param(s, marks=NEEDS_ROUTER) for s in SWITCHES)])
def test_drawn_blocks_and_switches(switch, request, monkeypatch):
    """Kernels are in force from the first block or enable() to the last, and what is switched
    meanwhile, by which PyTorch's router serves the rest, stays so. rms_norm_of_torch() follows it.
    """
    monkeypatch.setattr(torch_private, "RMS_NORM_ON_CUDA", (OP, "CPU"))
    monkeypatch.setitem(torch_private.NATIVE, DSL, "quack")
    rng, blocks, enabled, on = Random(str(switch)), 0, False, switch is not None
    ran = request.getfixturevalue("router") if switch else []
    function = native_router() and native_router()._register_overrides_from_graph
    with cpu_override() as cpu:
        steps = {"begin": partial(cpu.ask, blocks=1), "end": partial(cpu.ask, blocks=-1)}
        for name in ("enable", "disable"):
            steps[name] = partial(cpu.ask, enabled=name == "enable")
        steps |= dict(zip(("off", "on"), SWITCHES[switch], strict=True)) if switch else {}
        for name in ["begin", *rng.choices([*steps, "end"], k=40), "on", "disable", *["end"] * 40]:
            if name in steps and (blocks or name != "end"):
                steps[name]()
                blocks += {"begin": 1, "end": -1}.get(name, 0)
                enabled = {"enable": True, "disable": False}.get(name, enabled)
                on = {"on": True, "off": False}.get(name, on)
                theirs = DSL if on else "ATen"
                assert who(cpu, ran) == ("tilenorm" if blocks or enabled else theirs)
                assert who(cpu, ran, torch.float64) == theirs
                assert rms_norm_of_torch() == ("quack, else ATen" if on else "ATen")
    assert not native_router() or native_router()._register_overrides_from_graph is function
