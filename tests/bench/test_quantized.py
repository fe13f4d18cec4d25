"""Norms with a quantised output: their check, and what the providers return."""

import pytest
import torch

from bench import check
from bench.cases import OPS
from bench.op import Case
from bench.quantized import QUANTIZED, SCALINGS
from bench.run import _prepare

from .test_run import ran


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


@pytest.mark.filterwarnings("ignore::tilenorm.ReferenceWarning")
@pytest.mark.parametrize("name", [op.name for op in QUANTIZED])
def test_what_each_provider_returns_is_right(name, monkeypatch):
    monkeypatch.setattr("bench.providers.compiled", lambda function: function)
    names = ["tilenorm", "torch", "tilenorm+cast"]
    _, *cells = ran(Case(name, "bfloat16", 6, 256), names, ("forward", "backward"))
    assert [(c.provider, c.direction, c.status) for c in cells] == [
        (name, "forward", "ok") for name in names
    ]
