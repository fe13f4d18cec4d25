"""bench quantized: its bytes, its check, its providers, and its table."""

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from bench import quantized
from bench.__main__ import main
from bench.formulas import EPS
from bench.quantized import MOST_ERROR, PROVIDERS, SCALINGS, Asked, inputs, quantize, wrong_by

ASKED = [("tensor", False, False), ("tensor", True, False), ("block", True, True)]
X, WEIGHT = 64 * 1024 * 2, 1024 * 2


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (("row", False, False), X + WEIGHT + X // 2 + 64 * 4),
        (("block", False, True), 2 * X + WEIGHT + X // 2 + 64 * 8 * 4),
        (("row", True, False), 3 * X + WEIGHT + X // 2 + 64 * 4),
        (("tensor", False, False), X + WEIGHT + X // 2),
        (("tensor", True, True), 4 * X + WEIGHT + X // 2),
    ],
)
def test_bytes_are_what_the_mathematics_needs(asked, expected):
    assert Asked(*asked).bytes(64, 1024) == expected


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_wrong_result_is_found(scaling):
    given = inputs(8, 256, "cpu", True)
    found = PROVIDERS["torch"](Asked(scaling, True, False))(*given)
    assert wrong_by(found, given, scaling) < MOST_ERROR
    *codes, total = found
    assert wrong_by((*codes, total + 1), given, scaling) > MOST_ERROR
    assert wrong_by((codes[0].roll(1, -1), *found[1:]), given, scaling) > MOST_ERROR
    for wrong in [scale * factor for scale in codes[1:] for factor in (1.1, torch.nan)]:
        assert wrong_by((codes[0], wrong, total), given, scaling) > MOST_ERROR


@pytest.fixture
def flashinfer(monkeypatch):
    """A package whose norms are called as FlashInfer's, and overwrite the residual as those do."""

    def normed(x, weight):
        return F.rms_norm(x, weight.shape, weight, EPS)

    def rmsnorm_quant(out, input, weight, scale, eps):
        out.copy_(quantize(normed(input, weight), scale, "tensor")[0])

    def fused_add_rmsnorm_quant(out, input, residual, weight, scale, eps):
        rmsnorm_quant(out, residual.add_(input), weight, scale, eps)

    def fused_add_rmsnorm_fp8_block_quant(out, block_scale, normed_out, input, residual, w, eps):
        normed_out.copy_(normed(residual.add_(input), w))
        q, scales = quantize(normed_out, None, "block")
        out.copy_(q)
        block_scale[:, : len(out)] = scales.T

    package, norm = ModuleType("flashinfer"), ModuleType("flashinfer.norm")
    functions = (rmsnorm_quant, fused_add_rmsnorm_quant, fused_add_rmsnorm_fp8_block_quant)
    vars(norm).update({function.__name__: function for function in functions})
    package.norm = norm
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.norm", norm)


def test_flashinfer_is_measured_where_it_moves_the_same_bytes(flashinfer):
    every = [(s, added, y) for s in SCALINGS for added in (False, True) for y in (False, True)]
    for asked in every:
        made = quantized.cell("flashinfer", Asked(*asked), 6, 256, "cpu", 0.01)
        assert made.status == ("ok" if asked in ASKED else "skipped"), made.error


def test_a_package_that_is_absent_fails_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    made = quantized.cell("flashinfer", Asked(*ASKED[0]), 8, 256, "cpu", 0.01)
    assert made.status == "failed" and "flashinfer" in made.error


@pytest.mark.parametrize("output", [[], ["--output"]])
def test_the_command_measures_the_ops_asked_for(capsys, output):
    small = ["--hidden", "256", "--elements", "2048", "--budget", "0.01", *output]
    assert main(["quantized", "--provider", "tilenorm", "torch", *small]) == 0
    text = capsys.readouterr().out
    for op in quantized.OPS:
        assert all(f"\n{op} {scaling}" in text for scaling in SCALINGS)
    assert "wrong" not in text and "failed" not in text
    only = ["--op", "add_rms_norm_quantized", "--provider", "torch"]
    assert main(["quantized", *only, *small]) == 0
    assert "\nrms_norm_quantized" not in capsys.readouterr().out
