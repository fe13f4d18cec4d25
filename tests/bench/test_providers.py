import subprocess
import sys

import pytest

from bench import providers
from bench.cases import OPS
from bench.providers import PROVIDERS, Provider

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
def test_a_missing_peer_is_named_with_the_import_error(name, monkeypatch):
    for module in PEERS:
        monkeypatch.setitem(sys.modules, module, None)
    assert "Error: " in PROVIDERS[name].absent(OPS["rms_norm"], "cuda")


def test_what_needs_a_gpu_is_absent_without_one():
    op = OPS["rms_norm"]
    absent = {name: p.absent(op, "cpu") for name, p in PROVIDERS.items() if name != "tilenorm"}
    assert absent.pop("torch") is None
    assert set(absent.values()) == {"needs a GPU"}


def test_an_op_that_a_provider_lacks_is_its_absence():
    nothing = Provider("nothing", lambda op: None, on_cpu=True)
    assert nothing.absent(OPS["rms_norm"], "cpu") == "has no rms_norm"


def test_liger_is_asked_for_pytorchs_rounding():
    class Function:
        @staticmethod
        def apply(*arguments):
            return arguments

    _, _, eps, offset, casting, in_place, _ = providers._liger_norms(Function)["rms_norm"](1, 2)
    assert (eps, offset, casting, in_place) == (providers.EPS, 0.0, "gemma", True)
