"""A row's bits depend on nothing beside the row: not on undefined padding, the order of blocks,
partial sums that come late, which products the compiler fuses, or constants that save registers or
move reads.

tests/ops/test_same_bits.py has other layouts, batches and places, and rows of NaN. PACKED
converts 16-bit inputs twice. REREAD reads weights for each row. FETCH reads weights with the row.
TOGETHER reads the weights of several segments at once.
"""

from dataclasses import replace

import pytest
from torch import Tensor

from tests.support import cases, draw
from tests.support.calls import slow
from tests.support.executors import Inputs, Interpreter
from tests.support.one_result import one_result
from tests.support.results import assert_same_bits, check_undefined, each_spec, every_result
from tilenorm.launch.order import prescribed
from tilenorm.launch.plan import plan_forward
from tilenorm.spec import NormSpec

# Rows that no tile of several rows holds: gathered, by tile loads, and shared. test_drawn.py draws
# narrower ones.
SPECS = (
    NormSpec("rms", 1001, "bfloat16", "bfloat16"),
    NormSpec("layer", 1536, "float16", "float16", "float16"),
    NormSpec("rms", 5120, "bfloat16", "bfloat16"),
    NormSpec("rms", 12288, "bfloat16", "bfloat16", residual="bfloat16"),
    NormSpec("rms", 16392, "bfloat16", residual="bfloat16"),
)
ROWS = 5
OF_ROWS = "dx", "dresidual"  # the gradients that are no sums over rows


@each_spec(argvalues=SPECS)
@pytest.mark.parametrize("executor", cases.INTERPRETERS, indirect=True)
def test_bits_do_not_depend_on_padding_or_the_order_of_blocks(executor, spec):
    check_undefined(executor, spec, Inputs.random(spec, ROWS, executor.device))


ON_GPU = [
    NormSpec(hidden=n, dtype=dtype, weight=dtype, **fields)
    for n, dtype in (
        (20480, "float32"),
        (40000, "bfloat16"),
        (65536, "float16"),
        (131072, "bfloat16"),
        (65537, "float32"),
        (262144, "bfloat16"),
    )
    for fields in (
        {"norm": "rms"},
        {"norm": "layer", "bias": dtype, "residual": dtype},
        {"norm": "rms", "gate": dtype},
        {"norm": "rms", "gate": dtype, "gate_first": True},
    )
]


@each_spec(argvalues=ON_GPU)
@pytest.mark.parametrize("executor", ["gpu"], indirect=True)
def test_blocks_that_do_not_wait_have_the_same_bits(executor, spec):
    for rows in (1, 300):
        inputs = Inputs.random(spec, rows, executor.device)
        expected = every_result(executor, spec, inputs)
        assert_same_bits(every_result(executor, spec, inputs, exchange=False), expected)


@pytest.mark.parametrize("asked", [False, True])
def test_bits_do_not_depend_on_which_products_are_fused(asked):
    """Of two products that are added, the compiler fuses one, and not the same one in each kernel.
    So y of norms of one order depends on no such sum, nor does dx with TILENORM_ONE_RESULT.

    Norms with a gate have orders of their own.
    """
    compared = 0
    with one_result(asked):
        for case in draw.drawn(90, 11, draw.Limits(2100, 6, 1 << 12)):
            spec, executor = case.spec, EXECUTORS[case.seed % 2]
            if spec.gate or not prescribed(spec, executor.target, backward=asked):
                continue
            inputs = Inputs.random(spec, case.rows, executor.device, case.seed)
            first, second = (of_rows(executor, spec, inputs, asked, f) for f in ("first", "second"))
            assert_same_bits(first, second)
            compared += 1
    assert compared > 30


def of_rows(executor, spec, inputs, gradients: bool, fuse: str) -> dict[str, Tensor]:
    """The results of a forward pass and, if asked for, the gradients that are no sums over rows."""
    found = executor.forward(spec, inputs, fuse=fuse)
    made = executor.backward(spec, inputs, fuse=fuse) if gradients else {}
    return found | {name: t for name, t in made.items() if name in OF_ROWS}


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("hidden", [100, 4104, 16392])
def test_a_float32_product_is_rounded_before_a_skip_is_added(norm, hidden):
    """rms_norm_add(x, r) has the bits of r + rms_norm(x), where products are fused too."""
    spec, executor = NormSpec(norm, hidden, "float32", "float32", skip="float32"), EXECUTORS[1]
    inputs = Inputs.random(spec, 3, executor.device)
    plain = executor.forward(replace(spec, skip=None), inputs, fuse="first")
    found = executor.forward(spec, inputs, fuse="first")
    assert_same_bits({"y": found["y"]}, {"y": inputs.skip + plain["y"]})


B, F, F16 = "bfloat16", "float32", "float16"
EXECUTORS = [Interpreter("sm_80"), Interpreter("sm_90")]
each_executor = pytest.mark.parametrize("executor", EXECUTORS, ids=lambda e: e.name)
# Tiles of several rows, tiles of one row (gathers, or tile loads on sm_90), and shared rows.
SAVING = [
    NormSpec(hidden=n, dtype=B, weight=B, **fields)
    for n in (24, 37, 4096, 4104, 16392)
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


@each_spec(argvalues=SAVING)
@each_executor
def test_packed_and_reread(executor, spec):
    inputs = Inputs.random(spec, 3 if spec.hidden < 16384 else 1, executor.device)
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


@pytest.mark.parametrize(
    "hidden, more", [*((7168, m) for m in TOGETHER), *slow((40000, TOGETHER[1]))]
)
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
