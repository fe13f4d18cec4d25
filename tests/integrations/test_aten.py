"""tilenorm.override on the CPU: the interpreter runs its kernels. When it registers and removes
them, its errors without a usable GPU, and PyTorch's router of its own kernels beside it.
"""

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tilenorm
from tilenorm.integrations import aten
from tilenorm.launch.target import Target
from tilenorm.ops import registry, torch_private
from tilenorm.ops.registry import Device
from tilenorm.ops.torch_private import native_router, rms_norm_of_torch
from tilenorm.spec import NormSpec

from ..ops.helpers import name_of, random
from .aten_helpers import CpuOverride, cpu_override, registered


def output_and_grads(function, *tensors, dy=None):
    """The output of function(*tensors), and the gradients of the tensors that are not None."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    y = function(*leaves)
    dy = random(*y.shape, dtype=y.dtype, seed=9) if dy is None else dy
    return y.detach(), *torch.autograd.grad(y, [t for t in leaves if t is not None], dy)


SHAPES = {"matrix": ((5, 40), 1), "row": ((40,), 1), "odd": ((3, 37), 1), "two": ((2, 3, 4, 8), 2)}
NORM_WEIGHT_BIAS = [("rms", False, False), ("rms", True, False)]
NORM_WEIGHT_BIAS += [("layer", w, b) for w in (False, True) for b in (False, True)]


def norm_of(norm: str, x, dims: int, w, b):
    shape = x.shape[-dims:]
    return F.layer_norm(x, shape, w, b) if norm == "layer" else F.rms_norm(x, shape, w, 1e-5)


@pytest.mark.parametrize("norm, weight, bias", NORM_WEIGHT_BIAS)
@pytest.mark.parametrize("case", SHAPES)
def test_functional_norms_run_the_kernels(cpu, norm, weight, bias, case):
    shape, dims = SHAPES[case]
    x = random(*shape)
    w, b = (random(*shape[-dims:], seed=s) if on else None for s, on in ((1, weight), (2, bias)))

    def function(x, w, b):
        return norm_of(norm, x, dims, w, b)

    expected = output_and_grads(function, x, w, b)
    assert not cpu.launches
    got = cpu.around(output_and_grads, function, x, w, b)
    assert cpu.launches == ["row_forward", "norm_backward"] + ["column_sum"] * (weight or bias)
    for a, e in zip(got, expected, strict=True):
        assert a.is_contiguous()
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)
    dtype = "float32"
    fields = {"weight": dtype if weight else None, "bias": dtype if bias else None}
    spec = NormSpec(norm, x.shape[-dims:].numel(), dtype, **fields)
    direct = cpu.runner(spec, None).forward(True)((x, w, b), 1e-5)
    assert torch.equal(got[0], direct[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
def test_statistics_have_shapes_and_dtypes_of_pytorchs_cuda_kernels(cpu, dtype):
    x = random(2, 3, 4, 8, dtype=dtype)
    y, mean, rstd = cpu.around(torch.native_layer_norm, x, (4, 8), None, None, 1e-5)
    y_rms, rstd_rms = cpu.around(torch.ops.aten._fused_rms_norm, x, (4, 8), None, None)
    assert y.dtype == y_rms.dtype == dtype
    for stat in (mean, rstd, rstd_rms):
        assert stat.shape == (2, 3, 1, 1) and stat.dtype == torch.float32
    torch.testing.assert_close(mean, x.float().mean((2, 3), keepdim=True))
    rms = x.float().square().mean((2, 3), keepdim=True) + torch.finfo(torch.float32).eps
    torch.testing.assert_close(rstd_rms, rms.rsqrt())


MASKS = [[bool(n & bit) for bit in (1, 2, 4)] for n in range(8)]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_output_mask_selects_gradients(cpu, mask):
    x, dy, w, b = random(5, 40), random(5, 40, seed=1), random(40, seed=2), random(40, seed=3)
    aten_ops = torch.ops.aten
    _, mean, rstd = torch.native_layer_norm(x, (40,), w, b, 1e-5)
    layer = dy, x, (40,), mean, rstd, w, b
    expected = aten_ops.native_layer_norm_backward(*layer, [True] * 3)
    got = cpu.around(aten_ops.native_layer_norm_backward, *layer, mask)
    assert [g is not None for g in got] == mask
    for a, e in zip(got, expected, strict=True):
        assert a is None or torch.allclose(a, e, rtol=1e-5, atol=1e-5)
    rms = dy, x, (40,), rstd, w
    got = cpu.around(aten_ops._fused_rms_norm_backward, *rms, mask[:2])
    assert [g is not None for g in got] == mask[:2]


@pytest.mark.parametrize("inside", ["forward", "backward"])
def test_block_affects_only_the_pass_called_inside(cpu, inside):
    x, dy, w = random(5, 40).requires_grad_(), random(5, 40, seed=1), random(40, seed=2)
    call = {name: lambda f, *a: f(*a) for name in ("forward", "backward")} | {inside: cpu.around}
    y = call["forward"](F.layer_norm, x, (40,), w)
    (dx,) = call["backward"](torch.autograd.grad, y, x, dy)
    assert cpu.launches == [{"forward": "row_forward", "backward": "norm_backward"}[inside]]
    expected = output_and_grads(lambda x: F.layer_norm(x, (40,), w), x, dy=dy)
    torch.testing.assert_close((y.detach(), dx), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 40), (2, 0, 40)], ids=name_of)
def test_no_rows(cpu, shape):
    w, b = random(40, seed=1), random(40, seed=2)
    y, dx, dw, db = cpu.around(
        output_and_grads, lambda x, w, b: F.layer_norm(x, (40,), w, b), random(*shape), w, b
    )
    assert y.shape == dx.shape == shape and not cpu.launches
    assert torch.equal(dw, torch.zeros(40)) and torch.equal(db, torch.zeros(40))


# F.layer_norm accepts a weight of another dtype on the CPU, but not on CUDA.
UNSUPPORTED = {
    "float64": (random(5, 40, dtype=torch.float64), random(40, dtype=torch.float64)),
    "no columns": (random(5, 0), random(0)),
    "weight of another dtype": (random(5, 40, dtype=torch.bfloat16), random(40)),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
@pytest.mark.parametrize("function", [F.layer_norm, F.rms_norm])
def test_unsupported_inputs_run_pytorchs_kernels(cpu, function, case):
    arguments = lambda x, w: function(x, w.shape, w), *UNSUPPORTED[case]
    expected = output_and_grads(*arguments)
    torch.testing.assert_close(cpu.around(output_and_grads, *arguments), expected)
    assert not cpu.launches


@pytest.mark.parametrize("more", ["mean", "rstd"])
def test_statistics_of_other_rows_run_pytorchs_kernel(cpu, more):
    x, dy, w = random(5, 40), random(5, 40, seed=1), random(40, seed=2)
    _, mean, rstd = torch.native_layer_norm(x, (40,), w, None, 1e-5)
    stats = {"mean": mean, "rstd": rstd}
    stats[more] = torch.cat([stats[more], torch.ones(2, 1)])
    backward = torch.ops.aten.native_layer_norm_backward
    arguments = dy, x, [40], *stats.values(), w, None, [True, True, False]
    expected = backward(*arguments)
    got = cpu.around(backward, *arguments)
    assert all(map(torch.equal, got[:2], expected[:2]))
    assert not cpu.launches


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


def test_second_derivatives(cpu):
    def second():
        x, w = random(5, 40).requires_grad_(), random(40, seed=1).requires_grad_()
        y = F.layer_norm(x, (40,), w)
        first = torch.autograd.grad(y, (x, w), random(5, 40, seed=2), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), (x, w))

    torch.testing.assert_close(cpu.around(second), second(), rtol=1e-4, atol=1e-4)


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


@NEEDS_ROUTER
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


@NEEDS_ROUTER
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


@NEEDS_ROUTER
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
