"""Constants that save registers or move reads do not change the bits of any result.

PACKED converts 16-bit inputs twice. REREAD reads weights for each row. FETCH reads weights with the
row. TOGETHER reads the weights of several segments at once.
"""

import pytest

from tests import cases
from tests.executors import Inputs, Interpreter
from tests.ops.helpers import slow
from tilenorm.launch.plan import plan_forward
from tilenorm.spec import NormSpec

from .helpers import assert_same_bits, each_spec, every_result

B, F, F16 = "bfloat16", "float32", "float16"
EXECUTORS = [Interpreter("sm_80"), Interpreter("sm_90")]
each_executor = pytest.mark.parametrize("executor", EXECUTORS, ids=lambda e: e.name)
# Tiles of several rows, tiles of one row (gathers, or tile loads on sm_90), and shared rows.
SPECS = [
    NormSpec(hidden=n, dtype=B, weight=B, **fields)
    for n in (24, 37, 4096, 5120, 16392)
    for fields in (
        {"norm": "rms", "bias": B},
        {"norm": "layer", "residual": B, "heads": 2},
        {"norm": "rms", "gate": B},
        {"norm": "rms", "gate": B, "gate_first": True},
    )
]
TOGETHER = (
    {"weight": B},
    {"weight": B, "bias": F},
    {"weight": F, "bias": F16, "offset": 1.0},
    {"bias": B, "heads": 2},
)


@each_spec(argvalues=SPECS)
@each_executor
def test_packed_and_reread(executor, spec):
    inputs = Inputs.random(spec, 3, executor.device)
    expected = every_result(executor, spec, inputs, PACKED=False, FETCH=False, REREAD=False)
    for more in (False, True):
        found = every_result(executor, spec, inputs, PACKED=True, FETCH=more, REREAD=more)
        assert_same_bits(found, expected)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("weight", cases.DTYPES)
@each_executor
def test_fetch_with_any_weight_dtype(executor, dtype, weight):
    for more in ({"bias": F}, {"rounding": "early"}, {"offset": 1.0, "heads": 2}):
        spec = NormSpec("rms", 1000, dtype, weight, **more)
        inputs = Inputs.random(spec, 4, executor.device)
        late, fetched = (executor.forward(spec, inputs, FETCH=fetch) for fetch in (False, True))
        assert_same_bits(fetched, late)


@pytest.mark.parametrize("more", TOGETHER, ids=str)
@pytest.mark.parametrize("hidden", [5120, *slow(40000)])
def test_together(hidden, more):
    executor = Interpreter("sm_90")
    for norm in ("rms", "layer"):
        spec = NormSpec(norm, hidden, B, **more)
        widths = plan_forward(spec, executor.target, True).config.widths
        assert len(widths) > 3 and len(set(widths)) == 1
        inputs = Inputs.random(spec, 2, executor.device)
        once = executor.forward(spec, inputs, TOGETHER=1, FETCH=False)
        for together in (2, 3, len(widths)):
            found = executor.forward(spec, inputs, TOGETHER=together, FETCH=False)
            assert_same_bits(found, once)
