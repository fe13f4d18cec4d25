import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from bench.cases import OPS
from bench.op import EPS, Case
from bench.providers import LIGER, LIGER_CUTILE, PROVIDERS, Provider

from .test_run import ran

PEERS = ("quack", "liger_kernel", "tilegym", "triton", "matplotlib")


def test_importing_the_bench_imports_no_peer_and_starts_no_gpu():
    code = (
        "import sys, torch, tilenorm\n"
        "before = set(sys.modules)\n"
        "import bench.__main__\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not set(sys.argv[1:]) & (set(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-c", code, *PEERS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["quack", "liger", "liger-cutile", "tilegym"])
def test_missing_peer_is_shown_with_its_import_error(name, monkeypatch):
    for module in PEERS:
        monkeypatch.setitem(sys.modules, module, None)
    assert "Error: " in PROVIDERS[name].absent(OPS["rms_norm"], "cuda")


def test_providers_are_absent_without_a_gpu_or_the_op():
    op = OPS["rms_norm"]
    absent = {name: p.absent(op, "cpu") for name, p in PROVIDERS.items()}
    assert {name for name, why in absent.items() if why is None} == {"tilenorm", "torch"}
    assert set(absent.values()) == {None, "needs a GPU"}
    nothing = Provider("nothing", lambda op: None, on_cpu=True)
    assert nothing.absent(op, "cpu") == "has no rms_norm"


@pytest.mark.parametrize("provider, package", [("liger", LIGER), ("liger-cutile", LIGER_CUTILE)])
def test_liger_is_called_with_the_rounding_of_pytorch(monkeypatch, provider, package):
    """Another rounding is within what the check of outputs allows. A stand-in is called."""
    called = SimpleNamespace(apply=lambda *arguments: arguments)
    for parent in ("liger_kernel", LIGER, LIGER_CUTILE.removesuffix(".ops"), package):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    for module, name in (("rms_norm", "RMSNorm"), ("fused_add_rms_norm", "FusedAddRMSNorm")):
        has = SimpleNamespace(**{f"Liger{name}Function": called})
        monkeypatch.setitem(sys.modules, f"{package}.{module}", has)
    load = PROVIDERS[provider].load
    assert load(OPS["rms_norm"])(1, 2)[2:] == (EPS, 0.0, "gemma", True, None)
    assert load(OPS["add_rms_norm"])(1, 2, 3)[3:] == (EPS, 0.0, "gemma", False)
    assert load(OPS["add_layer_norm"]) is None


def test_flashinfer_writes_over_tensors_of_its_call_alone_and_serves_inference(monkeypatch):
    """A stand-in computes in place, as flashinfer does."""

    def fused_add_rmsnorm(x, residual, weight, eps):
        y, total = OPS["add_rms_norm"].eager(x, residual, weight)
        residual.copy_(total)
        x.copy_(y)

    def rmsnorm(x, weight, eps):
        return OPS["rms_norm"].eager(x, weight)

    norm = SimpleNamespace(rmsnorm=rmsnorm, fused_add_rmsnorm=fused_add_rmsnorm)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(norm=norm))
    load = PROVIDERS["flashinfer"].load
    assert load(OPS["layer_norm"]) is None
    for name in ("rms_norm", "add_rms_norm"):
        case = Case(name, "bfloat16", 8, 64)
        _, *cells = ran(case, ["flashinfer", "torch"], ("inference", "forward"))
        found = {(cell.provider, cell.direction): cell for cell in cells}
        assert found["flashinfer", "inference"].status == found["torch", "inference"].status == "ok"
        assert found["torch", "forward"].status == "ok"
        assert "has inference only" in found["flashinfer", "forward"].error
