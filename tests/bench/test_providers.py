import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from bench.cases import OPS
from bench.check import as_tuple
from bench.op import EPS, Case
from bench.providers import LIGER, LIGER_CUTILE, PROVIDERS, Provider

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


@pytest.fixture
def liger(monkeypatch):
    """A function that makes Liger have an autograd function, whose result is its arguments."""

    def has(package: str, module: str, name: str, apply=lambda *arguments: arguments):
        parts = f"{package}.{module}".split(".")
        for i in range(1, len(parts) + 1):
            path = ".".join(parts[:i])
            if path not in sys.modules:
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
        setattr(sys.modules[path], f"Liger{name}Function", SimpleNamespace(apply=apply))

    return has


@pytest.mark.parametrize("provider, package", [("liger", LIGER), ("liger-cutile", LIGER_CUTILE)])
def test_liger_is_called_with_the_rounding_of_pytorch(liger, provider, package):
    liger(package, "rms_norm", "RMSNorm")
    liger(package, "layer_norm", "LayerNorm")
    liger(package, "fused_add_rms_norm", "FusedAddRMSNorm")
    load = PROVIDERS[provider].load
    assert load(OPS["rms_norm"])(1, 2)[2:] == (EPS, 0.0, "gemma", True, None)
    assert load(OPS["layer_norm"])(1, 2, 3) == (1, 2, 3, EPS)
    assert load(OPS["add_rms_norm"])(1, 2, 3)[3:] == (EPS, 0.0, "gemma", False)
    assert load(OPS["add_layer_norm"]) is None


def test_liger_has_modulated_rms_norm_where_its_package_has(liger):
    op, where = OPS["modulated_rms_norm"], (LIGER, "modulated_rms_norm")
    assert "liger" in PROVIDERS["liger"].absent(op, "cuda")
    liger(*where, "ModulatedRMSNorm")
    assert PROVIDERS["liger"].load(op)(1, 2, 3) == (1, None, 2, 3, EPS, 0.0, "gemma", True)
    assert PROVIDERS["liger-cutile"].load(op) is None


def test_liger_normalises_and_then_rotates(liger):
    """Functions with the signatures of Liger's, of which the rotation overwrites what it gets."""

    def rms_norm(x, weight, *rest):
        assert rest == (EPS, 0.0, "llama", True, None)
        return F.rms_norm(x, x.shape[-1:], weight, EPS)

    def rope(q, k, cos, sin):
        for x in (q, k):
            first, second = x.chunk(2, -1)
            x.copy_(x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None])
        return q, k, cos, sin

    liger(LIGER, "rms_norm", "RMSNorm", rms_norm)
    liger(LIGER, "rope", "Rope", rope)
    op = OPS["rms_norm_rope 16/8"]
    inputs = [x.detach() for x in op.made(Case(op.name, "float32", 24 * 2 * 5, 16, 2), "cpu")]
    torch.testing.assert_close(PROVIDERS["liger"].load(op)(*inputs), op.eager(*inputs))


def _quack_rmsnorm(x, weight, *, residual=None, eps, prenorm=False):
    total = x if residual is None else x + residual
    y = F.rms_norm(total, x.shape[-1:], None, eps) * weight
    return (y, total) if prenorm else y


def _quack_layernorm_fwd(x, weight, bias, eps, return_rstd, return_mean):
    assert weight.dtype == bias.dtype == torch.float32
    assert return_rstd and return_mean
    y = F.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)
    return y, torch.rsqrt(x.var(-1, correction=0) + eps), x.mean(-1)


def _quack_layernorm_bwd(x, weight, dout, rstd, mean):
    normed = (x - mean[:, None]) * rstd[:, None]
    g = dout * weight
    dx = g - normed * (g * normed).mean(-1, keepdim=True) - g.mean(-1, keepdim=True)
    return dx * rstd[:, None], (dout * normed).sum(0), dout.sum(0)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "add_rms_norm", "head_rms_norm"])
def test_quack_is_called_with_its_own_signatures(name, monkeypatch):
    """quack needs a GPU, so functions with the same signatures stand in for it."""
    inner = ModuleType("quack.rmsnorm")
    inner.layernorm_fwd, inner.layernorm_bwd = _quack_layernorm_fwd, _quack_layernorm_bwd
    monkeypatch.setitem(sys.modules, "quack.rmsnorm", inner)
    monkeypatch.setitem(sys.modules, "quack", SimpleNamespace(rmsnorm=_quack_rmsnorm))
    op = OPS[name]
    case = Case(op.name, "float32", 64, 16)
    inputs, grads = op.made(case, "cpu"), op.output_grads(case, "cpu")
    found, expected = (as_tuple(f(*inputs)) for f in (PROVIDERS["quack"].load(op), op.reference))
    torch.testing.assert_close(found, expected)
    found, expected = (torch.autograd.grad(out, inputs, grads) for out in (found, expected))
    torch.testing.assert_close(found, expected)
