"""A row's bits depend neither on undefined padding nor on the order of blocks.

tests/sweep compares the bits in other layouts, batches and places, and beside rows of NaN.
"""

import pytest

from tests import cases
from tests.executors import Inputs
from tilenorm.spec import NormSpec

from .helpers import assert_same_bits, every_result

# Tiles of several rows and of one, tile loads, shared rows; masked and not; aligned and not.
SPECS = (
    NormSpec("rms", 24, "bfloat16", "bfloat16", "bfloat16"),
    NormSpec("rms", 37, "float16", "float32"),
    NormSpec("rms", 64, "float32", "float32", None, 1.0),
    NormSpec("rms", 1001, "bfloat16", "bfloat16"),
    NormSpec("rms", 5120, "bfloat16", "bfloat16"),
    NormSpec("layer", 40, "bfloat16", "bfloat16", "bfloat16", residual="float32"),
    NormSpec("layer", 1536, "float16", "float16", "float16"),
    NormSpec("rms", 16392, "bfloat16", residual="bfloat16"),
    NormSpec("rms", 12288, "bfloat16", "bfloat16", residual="bfloat16"),
    NormSpec("rms", 128, "bfloat16", "bfloat16", gate="bfloat16"),
    NormSpec("rms", 520, "float16", gate="float32", gate_first=True),
    NormSpec("rms", 64, "bfloat16", "bfloat16", heads=3),
    NormSpec("layer", 37, "float32", "float32", "float32", heads=4),
)
ROWS = 12

each_spec = pytest.mark.parametrize("spec", SPECS, ids=cases.label)


@each_spec
@pytest.mark.parametrize("executor", cases.INTERPRETERS, indirect=True)
@pytest.mark.parametrize(
    "how", [{"fill": 1e30}, {"fill": -1e30}, {"order": "reverse"}, {"order": 1}], ids=str
)
def test_bits_do_not_depend_on_padding_or_the_order_of_blocks(executor, spec, how):
    inputs = Inputs.random(spec, ROWS, executor.device)
    expected = every_result(executor, spec, inputs)
    assert_same_bits(every_result(executor, spec, inputs, **how), expected)
