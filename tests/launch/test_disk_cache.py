"""Kernels that an earlier process compiled are found without tracing, if nothing has changed."""

import os
import subprocess
import sys

import cuda.tile as ct
import pytest
from cuda.tile._cext import default_tile_context

from tests.executors import forward_calls
from tests.ops.helpers import NEEDS_GPU
from tilenorm.kernels.forward import row_forward
from tilenorm.launch import disk_cache
from tilenorm.launch.kernel import Kernel
from tilenorm.launch.target import Target
from tilenorm.spec import NormSpec
from tilenorm.tools.signature import signature

SPEC = NormSpec("rms", 64, "bfloat16", "bfloat16")
SIGNATURE = signature(row_forward, forward_calls(SPEC, Target.of("sm_90"), 1000, True)[0].arguments)


@pytest.fixture
def traced(monkeypatch, tmp_path):
    """A list of the signatures that cuTile itself compiles. The cache starts empty."""
    for name in [name for name in os.environ if name.startswith("CUDA_TILE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(default_tile_context.config, "cache_dir", str(tmp_path))
    disk_cache._origin.cache_clear()
    calls = []

    def compile(self, signature, context, compute_capability=None):
        calls.append(signature)
        return f"cubin {len(calls)}".encode(), "symbol", None, ()

    monkeypatch.setattr(ct.kernel, "_compile", compile)
    yield calls
    disk_cache._origin.cache_clear()


def compiled(signature=SIGNATURE, capability=(9, 0), **hints) -> bytes:
    """The cubin that a new kernel object gets, as in a new process."""
    kernel = Kernel(row_forward._pyfunc, **hints)
    cubin, _, *rest = kernel._compile(signature, default_tile_context, capability)
    assert rest == [None, ()]
    return cubin


def test_a_kernel_is_traced_once(traced):
    assert [compiled(), compiled()] == [b"cubin 1"] * 2
    # A launch asks with a signature without a symbol, precompile with one that has a symbol.
    assert compiled(SIGNATURE.with_symbol(None)) == b"cubin 1"
    assert len(traced) == 1


def test_anything_that_changes_the_code_compiles_anew(traced, monkeypatch, tmp_path):
    other = NormSpec("rms", 64, "float16", "bfloat16")
    [call] = forward_calls(other, Target.of("sm_90"), 1000, True)
    found = [
        compiled(),
        compiled(signature(row_forward, call.arguments)),
        compiled(capability=(10, 0)),
        compiled(occupancy=2),
        compiled(num_worker_warps=8),
    ]
    (tmp_path / "tileiras").write_text("")
    (tmp_path / "forward.py").write_text("# edited")
    for owner, name, value in (
        (disk_cache, "compiler_path", lambda: str(tmp_path / "tileiras")),
        (disk_cache.kernels, "__file__", str(tmp_path / "__init__.py")),
        (ct, "__version__", "99"),
    ):
        monkeypatch.setattr(owner, name, value)
        disk_cache._origin.cache_clear()
        found.append(compiled())
    assert found == [f"cubin {i}".encode() for i in range(1, 9)]


@pytest.mark.parametrize("name", ["CUDA_TILE_LOGS", "CUDA_TILE_ANYTHING", ""])
def test_other_cutile_variables_turn_the_lookup_off_and_so_does_no_cache(traced, monkeypatch, name):
    if name:
        monkeypatch.setenv(name, "1")
    else:
        monkeypatch.setattr(default_tile_context.config, "cache_dir", None)
    assert [compiled(), compiled()] == [b"cubin 1", b"cubin 2"]


def test_a_damaged_cache_is_not_an_error(traced, tmp_path):
    compiled()
    (tmp_path / "cache.db").write_bytes(b"damaged")
    assert [compiled(), compiled()] == [b"cubin 2"] * 2


PROGRAM = """
import os, sys, torch, tilenorm
from cuda.tile import _compile
def refuse(*_, **__): raise AssertionError("traced")
if sys.argv[1] == "again": _compile.get_function_hir = refuse
x = torch.ones(5, {n}, device="cuda", requires_grad=True)
w = torch.ones({n}, device="cuda", requires_grad=True)
tilenorm.rms_norm(x, ({n},), w).sum().backward()
print(w.grad.sum().item(), flush=True)
os._exit(0)  # an ordinary end aborts if a thread of autograd still frees tensors: pytorch#190489
"""


@NEEDS_GPU
@pytest.mark.parametrize("n", [64, 65536])
def test_a_new_process_traces_nothing(tmp_path, n):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CUDA_TILE_")}
    environment["CUDA_TILE_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", PROGRAM.format(n=n)]
    told = {"env": environment, "capture_output": True, "text": True}
    first, again = (subprocess.run([*command, which], **told) for which in ("first", "again"))
    assert (first.returncode, again.returncode) == (0, 0), first.stderr + again.stderr
    assert first.stdout == again.stdout
