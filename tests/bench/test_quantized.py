"""bench quantized: its bytes, its check, its providers, and its table."""

import sys
from types import ModuleType

import pytest
import torch

from bench import quantized
from bench.__main__ import main
from bench.quantized import MOST_ERROR, bytes_of, inputs, wrong_by
from bench.quantized_providers import PROVIDERS, SCALINGS, pytorch_norm, quantize

ASKED = [("tensor", False, False), ("tensor", True, False), ("block", True, True)]


def test_bytes_are_what_the_mathematics_needs():
    x, weight = 64 * 1024 * 2, 1024 * 2
    assert bytes_of("row", False, False, 64, 1024) == x + weight + x // 2 + 64 * 4
    assert bytes_of("block", False, True, 64, 1024) == 2 * x + weight + x // 2 + 64 * 8 * 4
    assert bytes_of("row", True, False, 64, 1024) == 3 * x + weight + x // 2 + 64 * 4
    assert bytes_of("tensor", False, False, 64, 1024) == x + weight + x // 2
    assert bytes_of("tensor", True, True, 64, 1024) == 4 * x + weight + x // 2


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_wrong_result_is_found(scaling):
    given = inputs(8, 256, "cpu", True)
    found = PROVIDERS["torch"](scaling, True, False)(*given)
    assert wrong_by(found, given, scaling) < MOST_ERROR
    *codes, total = found
    assert wrong_by((*codes, total + 1), given, scaling) > MOST_ERROR
    assert wrong_by((codes[0].roll(1, -1), *found[1:]), given, scaling) > MOST_ERROR
    for wrong in [scale * factor for scale in codes[1:] for factor in (1.1, torch.nan)]:
        assert wrong_by((codes[0], wrong, total), given, scaling) > MOST_ERROR


@pytest.mark.parametrize("output", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_the_callers_scale_is_not_among_the_results(added, output):
    given = inputs(8, 256, "cpu", added)
    ours, theirs = (
        PROVIDERS[name]("tensor", added, output)(*given) for name in ("tilenorm", "torch")
    )
    assert len(ours) == len(theirs) == 1 + added + output
    assert wrong_by(ours, given, "tensor") < MOST_ERROR


def flashinfer_of_pytorch():
    """A package whose norms are called as FlashInfer's, and overwrite the residual as those do."""

    def rmsnorm_quant(out, input, weight, scale, eps):
        out.copy_(quantize(*pytorch_norm(False)(input, weight), scale, "tensor")[0])

    def fused_add_rmsnorm_quant(out, input, residual, weight, scale, eps):
        rmsnorm_quant(out, residual.add_(input), weight, scale, eps)

    def fused_add_rmsnorm_fp8_block_quant(out, block_scale, normed_out, input, residual, w, eps):
        normed_out.copy_(*pytorch_norm(False)(residual.add_(input), w))
        q, scales = quantize(normed_out, None, "block")
        out.copy_(q)
        block_scale[:, : len(out)] = scales.T

    package, norm = ModuleType("flashinfer"), ModuleType("flashinfer.norm")
    vars(norm).update(
        rmsnorm_quant=rmsnorm_quant,
        fused_add_rmsnorm_quant=fused_add_rmsnorm_quant,
        fused_add_rmsnorm_fp8_block_quant=fused_add_rmsnorm_fp8_block_quant,
    )
    package.norm = norm
    return {"flashinfer": package, "flashinfer.norm": norm}


@pytest.mark.parametrize("asked", ASKED)
def test_flashinfer_overwrites_its_residual_and_is_checked_before(monkeypatch, asked):
    for name, module in flashinfer_of_pytorch().items():
        monkeypatch.setitem(sys.modules, name, module)
    made = quantized.cell("flashinfer", asked, (6, 256, "cpu", 0.01))
    assert made.status == "ok", made.error


def test_flashinfer_is_measured_where_it_moves_the_same_bytes(monkeypatch):
    for name, module in flashinfer_of_pytorch().items():
        monkeypatch.setitem(sys.modules, name, module)
    asked = [(s, added, y) for s in SCALINGS for added in (False, True) for y in (False, True)]
    assert {how for how in asked if PROVIDERS["flashinfer"](*how)} == set(ASKED)


def test_a_package_that_is_absent_fails_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    made = quantized.cell("flashinfer", ("tensor", False, False), (8, 256, "cpu", 0.01))
    assert made.status == "failed" and "flashinfer" in made.error


def test_the_command_prints_a_table(capsys):
    given = ["--hidden", "256", "--provider", "tilenorm", "torch", "vllm", "--budget", "0.01"]
    assert main(["quantized", *given, "--elements", "2048"]) == 0
    text = capsys.readouterr().out
    for op in quantized.OPS:
        assert all(f"\n{op} {scaling} forward" in text for scaling in SCALINGS)
    assert "wrong" not in text


def test_the_command_measures_the_ops_asked_for(capsys):
    given = ["--op", "add_rms_norm_quantized", "--hidden", "256", "--provider", "torch"]
    assert main(["quantized", *given, "--elements", "2048", "--budget", "0.01"]) == 0
    text = capsys.readouterr().out
    assert "\nadd_rms_norm_quantized row forward" in text
    assert "\nrms_norm_quantized" not in text
