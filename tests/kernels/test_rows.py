"""A row's bits depend neither on other rows, nor on undefined padding, nor on the blocks' order.

tests/sweep compares the bits in other layouts, batches and places.
"""

import pytest
import torch
from torch import Tensor

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
HUGE = {"float16": 6e4, "bfloat16": 1e30, "float32": 1e30}
ROWS = 12

each_spec = pytest.mark.parametrize("spec", SPECS, ids=cases.label)


@each_spec
@pytest.mark.parametrize("value", ["huge", "nan"])
def test_bits_do_not_depend_on_other_rows(executor, spec, value):
    # Fails if a mask lets a row read the next one, or if a sum runs over a whole tile.
    inputs = Inputs.random(spec, ROWS, executor.device)
    row, each = 2, spec.heads or 1
    others = torch.arange(len(inputs.x), device=executor.device) != row
    number = HUGE[spec.dtype] if value == "huge" else torch.nan

    def spoil(_, tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[others] = number
        return tensor

    kept = slice(row * each, (row + 1) * each)
    found, expected = (
        {
            name: (t if name in ("mean", "rstd") else t.reshape(-1, spec.hidden))[kept]
            for name, t in every_result(executor, spec, given).items()
            if name not in ("dw", "db")
        }
        for given in (inputs.with_rows(spoil), inputs)
    )
    assert_same_bits(found, expected)


@each_spec
@pytest.mark.parametrize("executor", cases.INTERPRETERS, indirect=True)
@pytest.mark.parametrize(
    "how", [{"fill": 1e30}, {"fill": -1e30}, {"order": "reverse"}, {"order": 1}], ids=str
)
def test_bits_do_not_depend_on_padding_or_the_order_of_blocks(executor, spec, how):
    inputs = Inputs.random(spec, ROWS, executor.device)
    expected = every_result(executor, spec, inputs)
    assert_same_bits(every_result(executor, spec, inputs, **how), expected)
