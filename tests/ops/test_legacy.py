"""Programs that version 0.2 exported, with its ops norm, norm_quantized and norm_add_norm."""

from pathlib import Path

import pytest
import torch

import tilenorm

from .helpers import TORCH, random

N = 64
BEFORE = Path(__file__).parent / "exported_before.pt2"
pytestmark = pytest.mark.skipif(TORCH < (2, 13), reason="the file is one of PyTorch 2.13")


def now(x, r, w, b, v) -> tuple:
    """What the program does, by the functions of this version."""
    y, total = tilenorm.add_rms_norm(
        x, r, (N,), w, dropout_mask=r > 0, dropout_scale=2.0, layer_scale=v
    )
    q = tilenorm.rms_norm_quantized(x, (N,), w, scaling="row", return_output=True)
    m = tilenorm.add_layer_norm_quantized(x, r, (N,), w, b, scaling="mx", return_amax=True)
    return (
        tilenorm.rms_norm(x, (N,), w),
        tilenorm.layer_norm(x, (N,), w, b),
        *(y, total),
        *tilenorm.add_layer_norm(x, (x, r), (N,), w, b),
        tilenorm.rms_norm_add(x, r, (N,), w),
        tilenorm.gated_rms_norm(x, r, (N,), w, norm_before_gate=False, activation="sigmoid"),
        *tilenorm.rms_norm_add_rms_norm(x, r, (N,), w, v),
        *(q.q.float(), q.scale, q.output),
        *(m.q.float(), m.scale.float(), m.amax, m.residual_out),
    )


@pytest.mark.parametrize("rows", [5, 9])
def test_an_exported_program_runs(rows):
    program = torch.export.load(BEFORE)
    called = {node.target.name() for node in program.graph.nodes if "tilenorm" in str(node.target)}
    assert called == {f"tilenorm::{op}" for op in ("norm", "norm_quantized", "norm_add_norm")}
    x, r = random(rows, N), random(rows, N, seed=1)
    parameters = [program.state_dict[name] for name in ("w", "b", "v")]
    found, expected = program.module()(x, r), now(x, r, *parameters)
    assert all(map(torch.equal, found, expected)) and len(found) == len(expected)


def test_gradients_and_decompositions_of_the_ops_of_before():
    x, w = random(3, N).requires_grad_(), random(N, seed=1).requires_grad_()
    how = (N, "layer", 0.0, False, "late", "silu", 1.0, 1e-5, True)
    y, _, mean, rstd = torch.ops.tilenorm.norm(x, None, None, w, None, *how)
    expected = tilenorm.layer_norm(x, (N,), w)
    assert torch.equal(y, expected) and mean.shape == rstd.shape == (3,)
    pairs = zip(*(torch.autograd.grad(t.sum(), (x, w)) for t in (y, expected)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    program = torch.export.load(BEFORE)
    table = torch.export.default_decompositions()
    table.update(tilenorm.decompositions())
    left = {str(n.target) for n in program.run_decompositions(table).graph.nodes}
    assert not [name for name in left if "tilenorm" in name]
