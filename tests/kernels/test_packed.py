"""Constants that save registers or move reads do not change the bits of any result.

PACKED converts 16-bit inputs twice. REREAD reads weights for each row. FETCH reads weights with the
row. TOGETHER reads the weights of several segments at once.
"""

from dataclasses import replace

import pytest
import torch

from tests import cases
from tests.executors import Inputs, Interpreter
from tilenorm.launch.plan import plan_forward
from tilenorm.spec import NormSpec

EXECUTORS = [Interpreter("sm_80"), Interpreter("sm_90")]
# Tiles of several rows, tiles of one row (gathers, or tile loads on sm_90), and shared rows.
SPECS = [
    NormSpec(hidden=n, dtype="bfloat16", weight="bfloat16", **fields)
    for n in (24, 37, 4096, 5120, 16392)
    for fields in (
        {"norm": "rms", "bias": "bfloat16"},
        {"norm": "layer", "residual": "bfloat16", "heads": 2},
        {"norm": "rms", "gate": "bfloat16"},
        {"norm": "rms", "gate": "bfloat16", "gate_first": True},
    )
]


@pytest.mark.parametrize("spec", SPECS, ids=cases.label)
@pytest.mark.parametrize("executor", EXECUTORS, ids=lambda e: e.name)
def test_packed_and_reread_give_the_same_bits(executor, spec):
    inputs = Inputs.random(spec, 3, executor.device)
    once, packed, both = (
        executor.forward(spec, inputs, PACKED=packed, FETCH=more)
        | executor.backward(spec, inputs, PACKED=packed, REREAD=more)
        for packed, more in ((False, False), (True, False), (True, True))
    )
    assert set(once) == set(packed) == set(both)
    for name, tensor in once.items():
        assert torch.equal(tensor, packed[name]), name
        assert torch.equal(tensor, both[name]), name


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("weight", cases.DTYPES)
@pytest.mark.parametrize("executor", EXECUTORS, ids=lambda e: e.name)
def test_fetch_gives_the_same_bits_with_any_weight_dtype(executor, dtype, weight):
    for more in ({"bias": "float32"}, {"rounding": "early"}, {"offset": 1.0, "heads": 2}):
        spec = NormSpec("rms", 1000, dtype, weight, **more)
        inputs = Inputs.random(spec, 4, executor.device)
        late, fetched = (executor.forward(spec, inputs, FETCH=fetch) for fetch in (False, True))
        for name, tensor in late.items():
            assert torch.equal(tensor, fetched[name]), name


@pytest.mark.parametrize(
    "more",
    [
        {"weight": "bfloat16"},
        {"weight": "bfloat16", "bias": "float32"},
        {"weight": "float32", "bias": "float16", "offset": 1.0},
        {"bias": "bfloat16", "heads": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("hidden", [5120, 40000])
def test_together_gives_the_same_bits(hidden, more):
    executor = Interpreter("sm_90")
    for norm in ("rms", "layer"):
        spec = NormSpec(norm, hidden, "bfloat16", **more)
        widths = plan_forward(spec, executor.target, True).config.widths
        assert len(widths) > 3 and len(set(widths)) == 1
        inputs = Inputs.random(spec, 2, executor.device)
        once = executor.forward(spec, inputs, TOGETHER=1, FETCH=False)
        for together in (2, 3, len(widths)):
            found = executor.forward(spec, inputs, TOGETHER=together, FETCH=False)
            for name, tensor in once.items():
                assert torch.equal(tensor, found[name]), (norm, together, name)


@pytest.mark.parametrize("spec", [s for s in SPECS if s.hidden <= 37], ids=cases.label)
@pytest.mark.parametrize("executor", EXECUTORS, ids=lambda e: e.name)
def test_the_same_bits_with_any_needed_gradients(executor, spec):
    inputs = Inputs.random(spec, 3, executor.device)
    for needs in cases.some_needs(spec):
        given = inputs if needs.dsum else replace(inputs, dsum=None)
        once, again = (
            executor.backward(spec, given, needs, PACKED=reread, REREAD=reread)
            for reread in (False, True)
        )
        assert set(once) == set(again)
        for name, tensor in once.items():
            assert torch.equal(tensor, again[name]), (needs, name)
