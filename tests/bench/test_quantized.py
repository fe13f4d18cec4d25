"""Norms with a quantised output: their check, and the peers that have them."""

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from bench import check
from bench.cases import OPS
from bench.op import EPS, Case
from bench.providers import PROVIDERS
from bench.quantized import QUANTIZED, SCALINGS, quantize
from bench.run import _prepare

from .test_run import ran

HAS = {f"{op}_quantized tensor" for op in ("rms_norm", "add_rms_norm")}
HAS |= {"add_rms_norm_quantized block + y"}


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_wrong_result_is_found(scaling):
    op, case = OPS[f"add_rms_norm_quantized {scaling}"], Case("", "bfloat16", 8, 256)
    inputs, _, expected, allowed = _prepare(op, case, ["forward"], "cpu")

    def complaint(*made) -> str | None:
        results = op.decoded(made, inputs)
        return check.complaint(op, "forward", results, expected["forward"], allowed["forward"])

    *codes, total = found = op.eager(*inputs)
    assert complaint(*found) is None
    assert complaint(*codes, total + 1).startswith("sum is off")
    assert complaint(codes[0].roll(1, -1), *found[1:]).startswith("codes is off")
    for wrong in [scale * factor for scale in codes[1:] for factor in (1.1, torch.nan)]:
        assert complaint(codes[0], wrong, total).startswith("codes is off")


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
    absent = {op.name: PROVIDERS["flashinfer"].absent(op, "cuda") for op in OPS.values()}
    assert {name for name, why in absent.items() if not why} == HAS


@pytest.mark.filterwarnings("ignore::tilenorm.ReferenceWarning")
@pytest.mark.parametrize("name", [op.name for op in QUANTIZED])
def test_what_each_provider_returns_is_right(name, flashinfer, monkeypatch):
    monkeypatch.setattr("bench.providers.compiled", lambda function: function)
    names = ["tilenorm", "torch", "tilenorm+cast", *["flashinfer"] * (name in HAS)]
    _, *cells = ran(Case(name, "bfloat16", 6, 256), names, ("forward", "backward"))
    assert [(c.provider, c.direction, c.status) for c in cells] == [
        (name, "forward", "ok") for name in names
    ]
