"""torch.export of modules, and AOTInductor, for any number of rows.

test_decompositions.py exports every function and module.
"""

import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.cpp_extension import CUDA_HOME

import tilenorm

from .helpers import EACH_DEVICE, TORCH, random

OPS = torch.ops.tilenorm


class Block(nn.Module):
    """Every module, and a function, between other operations."""

    def __init__(self):
        super().__init__()
        self.first, self.last = tilenorm.RMSNorm(16, offset=1.0), tilenorm.LayerNorm(16)

    def forward(self, x):
        y, total = tilenorm.add_rms_norm(self.first(x).relu(), x, (16,), self.last.weight)
        return self.last(y + total)


def exported(block, device, strict=False):
    block = block.to(device).requires_grad_(False)
    rows = torch.export.Dim("rows", min=2, max=1 << 20)
    given = (random(3, 16, device=device),)
    return block, torch.export.export(block, given, dynamic_shapes=({0: rows},), strict=strict)


@EACH_DEVICE
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_module_runs_for_any_number_of_rows(device, strict, tmp_path):
    block, program = exported(Block(), device, strict)
    targets = [node.target for node in program.graph.nodes]
    ops = (OPS.rms_norm, OPS.add_rms_norm, OPS.layer_norm)
    assert all(targets.count(op.default) == 1 for op in ops)
    torch.export.save(program, tmp_path / "block.pt2")
    loaded = torch.export.load(tmp_path / "block.pt2").module()
    for rows in (2, 7):
        x = random(rows, 16, device=device, seed=rows)
        assert torch.equal(loaded(x), block(x))


WITHOUT_TILENORM = """
import sys, torch
package = torch._inductor.aoti_load_package(sys.argv[1])
found = package(torch.ones(3, 16, device=sys.argv[2]))
torch.testing.assert_close(found, torch.zeros_like(found))
assert "tilenorm" not in sys.modules
"""


@pytest.mark.slow
@EACH_DEVICE
@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.skipif(TORCH < (2, 13), reason="AOTInductor of PyTorch 2.11 crashes on the op")
@pytest.mark.skipif(not shutil.which("g++"), reason="AOTInductor needs a C++ compiler")
def test_a_package_of_aot_inductor(device, decomposed, tmp_path):
    """It calls the op of the process. With the table of decompositions it needs no tilenorm."""
    if device == "cuda" and CUDA_HOME is None:
        pytest.skip("AOTInductor needs CUDA's headers")
    # Norms alone: whatever Inductor generates beside them takes the C++ compiler seconds.
    block, program = exported(nn.Sequential(tilenorm.RMSNorm(16), tilenorm.LayerNorm(16)), device)
    program = program.run_decompositions(tilenorm.decompositions()) if decomposed else program
    path = str(tmp_path / "block.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=path)
    package = torch._inductor.aoti_load_package(path)
    for rows in (3, 7):
        x = random(rows, 16, device=device, seed=rows)
        torch.testing.assert_close(package(x), block(x), rtol=1e-5, atol=1e-5)
    command = [sys.executable, "-c", WITHOUT_TILENORM, path, device]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    if decomposed:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode and "Could not find schema for tilenorm::" in done.stderr
