"""`import tilenorm` loads little, and every public name is there when it is asked for."""

import os
import pickle
import subprocess
import sys
from importlib import import_module

import pytest

import tilenorm
from tests.support.forks import ROOT, failing
from tilenorm import integrations

LOADED = """
import sys, torch
before = set(sys.modules)
import tilenorm
print(*sorted(set(sys.modules) - before))
"""
BEFORE = """
import torch

def first(use):
    import tilenorm
    exec(use, {"torch": torch, "tilenorm": tilenorm})
"""
# A first use of each name in a process that has none of the modules behind it.
USES = (
    "tilenorm.patch(torch.nn.LayerNorm(8)).undo()",
    "tilenorm.compile(torch.nn.LayerNorm(8))",
    "tilenorm.explain('rms_norm', torch.ones(2, 8), (8,))",
    "tilenorm.disable()",
    "tilenorm.integrations.fx.replace_norms",
    "exec('from tilenorm import integrations, override'); integrations.patch.Report",
    "exec('from tilenorm import *'); unpatch, override, rms_norm",
    "exec('from tilenorm.integrations import aten, compile, fx, patch'); patch.patch",
    "assert {'integrations', 'patch', 'rms_norm', '__version__'} <= {*dir(tilenorm)}",
)


def printed(*code: str) -> str:
    run = subprocess.run([sys.executable, "-c", *code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def loaded() -> list[str]:
    """The modules that an import loads."""
    return printed(LOADED).split()


def test_it_loads_nothing_but_its_own_modules(loaded):
    """Neither FX nor Inductor, nor cuda.tile, nor anything else that `import torch` has not."""
    own = {"tilenorm", *sys.stdlib_module_names}
    assert "tilenorm.ops.torch_ops.library" in loaded
    assert [name for name in loaded if name.partition(".")[0] not in own] == []


def test_it_loads_no_module_that_users_of_functions_do_not_need(loaded):
    late = ("integrations", "tools", "kernels", "launch.plan", "launch.tuned.tables")
    names = tuple(f"tilenorm.{name}" for name in late)
    assert [name for name in loaded if name.startswith(names)] == []


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_name_is_there_at_its_first_use():
    assert "fails:" not in failing(BEFORE, USES)


@pytest.mark.parametrize("module", (tilenorm, integrations), ids=("tilenorm", "integrations"))
def test_dir_has_every_public_name(module):
    assert {*module.__all__} <= {*dir(module)}
    assert all(getattr(module, name) is not None for name in dir(module))


@pytest.mark.parametrize("module", ("tilenorm", "tilenorm.integrations"))
def test_a_name_that_there_is_not(module):
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'norm'"):
        import_module(module).norm  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'norm'"):
        exec(f"from {module} import norm")


@pytest.mark.parametrize("name", tilenorm.__all__)
def test_a_public_name_is_one_object_and_is_pickled_by_its_module(name):
    value = getattr(tilenorm, name)
    assert getattr(tilenorm, name) is value
    assert pickle.loads(pickle.dumps(value)) is value or name == "__version__"
