"""Where cuda.tile cannot be imported, as on macOS, the reference serves and says why."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tilenorm.launch import scales
from tilenorm.launch.config import VECTOR

ROOT = Path(__file__).parent.parent
HIDE = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name in ("cuda", "cutile_cache"):
            raise ModuleNotFoundError("No module named cuda")
sys.meta_path.insert(0, Hide())
import warnings
import pytest, torch, tilenorm
from tilenorm.__main__ import main
"""
MODEL = """
from tilenorm.integrations.fx import replace_norms

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.other = tilenorm.RMSNorm(16), torch.nn.LayerNorm(16)
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x):
        y, total = tilenorm.add_rms_norm(self.linear(self.norm(x)), x, (16,), self.norm.weight)
        y, total = tilenorm.rms_norm_add_rms_norm(y, total, (16,), self.norm.weight)
        return self.other(tilenorm.gated_layer_norm(y, total, (16,)))

def step(model):
    x = torch.ones(3, 16, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None

with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    step(Block())
assert {w.category for w in told} == {tilenorm.ReferenceWarning}
assert all("cuda-tile is not installed (No module named cuda)" in str(w.message) for w in told)
warnings.simplefilter("ignore", tilenorm.ReferenceWarning)

step(tilenorm.compile(Block(), backend="eager"))
patched = Block()
report = str(tilenorm.patch(patched))
assert "patched" in report and "other" in report, report
step(patched)
traced = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.LayerNorm(16)))
replace_norms(traced)
step(traced)
x = torch.ones(3, 16)
for function in (tilenorm.rms_norm_quantized, tilenorm.layer_norm_quantized):
    function(x, (16,), scaling="row")
assert tilenorm.explain("rms_norm", x, (16,)).chosen == "reference"
with pytest.raises(RuntimeError, match="backend 'cutile' was asked for, but cuda-tile"):
    tilenorm.rms_norm(x, (16,), backend="cutile")
with pytest.raises(RuntimeError, match="tilenorm.override: cuTile supports no GPU here"):
    tilenorm.enable()
"""
COMMANDS = """
tilenorm.rms_norm(torch.ones(2, 8), (8,))
assert main(["info"]) == 0
assert main(["explain", "--arch", "sm_90", "--hidden", "16"]) == 0
for command in (["digests"], ["precompile", "--hidden", "16"]):
    with pytest.raises(SystemExit):
        main([*command, "--arch", "sm_90"])
with pytest.raises(SystemExit):
    main(["tune", "--hidden", "16"])
"""


@pytest.fixture(scope="module")
def said() -> tuple[str, str]:
    """What a model and the commands print in a process without cuda.tile, and without a GPU."""
    command = [sys.executable, "-c", HIDE + MODEL + COMMANDS]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout, run.stderr


@pytest.mark.slow
def test_a_model_runs_and_commands_say_that_it_is_missing(said):
    out, err = said
    missing = "cuda-tile is not installed (No module named cuda); on Linux and Windows: pip install"
    assert f"cutile refuses: {missing}" in out  # info
    assert f"refused by cutile: {missing}" in out  # explain
    assert err.count(f"error: {missing}") == 3


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_one_that_does_not_load(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.tile", ModuleType("a part of it"))
    missing = runpy.run_module("tilenorm.launch.toolchain")["cuda_tile_missing"]()
    assert missing.startswith("cuda-tile does not load (cannot import name '_compile' from 'a part")


def test_the_remedy_is_the_projects_own_line(said):
    _, err = said
    [line] = re.findall(r'"(cuda-tile\S*);', (ROOT / "pyproject.toml").read_text())
    assert f"pip install '{line}'" in err


def test_the_hosts_numbers_are_those_of_the_kernels():
    """The reference reads them without cuda.tile, which the kernels import."""
    from tilenorm.kernels import quantize, tiles

    assert tiles.VECTOR == VECTOR
    assert (quantize.TILE_ROWS, quantize.TILE_GROUPS) == (scales.TILE_ROWS, scales.TILE_GROUPS)
