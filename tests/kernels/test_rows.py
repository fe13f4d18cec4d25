"""A row's bits depend on the row alone: not on layout, other rows, row count or block order."""

from functools import partial

import pytest
import torch
from torch import Tensor

from tests import cases
from tests.executors import Inputs
from tilenorm.spec import NormSpec

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
# Results with one row for each row of x.
RESULTS_WITH_ROWS = ("y", "sum", "mean", "rstd", "dx", "dresidual", "dgate")

each_spec = pytest.mark.parametrize("spec", SPECS, ids=cases.label)
interpreted = partial(pytest.mark.parametrize, "executor", cases.INTERPRETERS, indirect=True)


def change(inputs: Inputs, function) -> Inputs:
    """Apply a function to each input that has rows."""
    return inputs.with_rows(lambda _, t: function(t))


def results(executor, spec, inputs, **how) -> dict[str, Tensor]:
    """Every result. Results with rows are (rows, hidden), whatever the layout of the input."""
    found = executor.forward(spec, inputs, **how) | executor.backward(spec, inputs, **how)
    whole = ("mean", "rstd", "dw", "db")
    return {n: t if n in whole else t.reshape(-1, spec.hidden) for n, t in found.items()}


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, t in found.items():
        assert torch.equal(t, expected[name]), f"{name}: {(t != expected[name]).sum()} differ"


def inside(x: Tensor, *leading: int, before: int = 0, extra: int | None = None) -> Tensor:
    """A copy of x with these leading dimensions, inside a larger tensor of NaN.

    Rows are not evenly spaced, and no two dimensions can be merged into one.
    """
    hidden = x.shape[1]
    extra = hidden if extra is None else extra
    sizes = [n + 1 for n in leading] + [before + hidden + extra]
    around = torch.full(sizes, torch.nan, dtype=x.dtype, device=x.device)
    view = around[..., before : before + hidden]
    for dim, n in enumerate(leading):
        view = view.narrow(dim, 0, n)
    return view.copy_(x.view(*leading, hidden))


LAYOUTS = {
    "row_stride": lambda x: inside(x, ROWS),
    "second_third": lambda x: inside(x, ROWS, before=x.shape[1]),
    "three_dimensions": lambda x: inside(x, 3, ROWS // 3),
    "four_dimensions": lambda x: inside(x, 2, 2, ROWS // 4),
    "five_dimensions": lambda x: inside(x, 2, 2, 1, ROWS // 4),
    "off_by_one_element": lambda x: inside(x, ROWS, before=1, extra=2),
    "columns": lambda x: x.t().contiguous().t(),
    "every_second_element": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "one_row_repeated": lambda x: x[:1].expand(ROWS, -1),
}


@pytest.mark.parametrize("spec", [s for s in SPECS if not s.heads], ids=cases.label)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("executor", ["interpreter_sm_90", "gpu"], indirect=True)
def test_bits_do_not_depend_on_layout(executor, spec, layout):
    laid_out = change(Inputs.random(spec, ROWS, executor.device), LAYOUTS[layout])
    packed = change(
        laid_out, lambda t: t.reshape(ROWS, -1).clone(memory_format=torch.contiguous_format)
    )
    assert_same_bits(results(executor, spec, laid_out), results(executor, spec, packed))


@each_spec
def test_bits_do_not_depend_on_the_number_of_rows(executor, spec):
    inputs = Inputs.random(spec, ROWS, executor.device)
    every = results(executor, spec, inputs)
    count, each = len(inputs.x), spec.heads or 1
    for start, stop in ((0, 1), (1, 3), (count - 2, count)):
        alone = results(executor, spec, change(inputs, lambda t: t[start:stop]))  # noqa: B023
        for name in set(RESULTS_WITH_ROWS) & set(every):
            expected = every[name][start * each : stop * each]
            assert torch.equal(alone[name], expected), (name, start)


@each_spec
@pytest.mark.parametrize("value", ["huge", "nan"])
def test_bits_do_not_depend_on_other_rows(executor, spec, value):
    # Fails if a mask lets a row read the next one, or if a sum runs over a whole tile.
    inputs = Inputs.random(spec, ROWS, executor.device)
    row, each = 2, spec.heads or 1
    others = torch.arange(len(inputs.x), device=executor.device) != row
    number = HUGE[spec.dtype] if value == "huge" else torch.nan

    def spoil(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[others] = number
        return tensor

    found, expected = (results(executor, spec, i) for i in (change(inputs, spoil), inputs))
    for name in set(RESULTS_WITH_ROWS) & set(found):
        kept = slice(row * each, (row + 1) * each)
        assert torch.equal(found[name][kept], expected[name][kept]), name


@each_spec
def test_a_second_run_has_the_same_bits(executor, spec):
    inputs = Inputs.random(spec, ROWS, executor.device)
    assert_same_bits(results(executor, spec, inputs), results(executor, spec, inputs))


@each_spec
@interpreted()
def test_bits_do_not_depend_on_padding(executor, spec):
    inputs = Inputs.random(spec, 5, executor.device)
    expected = results(executor, spec, inputs)
    for fill in (1e30, -1e30):
        assert_same_bits(results(executor, spec, inputs, fill=fill), expected)


@each_spec
@interpreted()
@pytest.mark.parametrize("order", ["reverse", 1], ids=["reversed", "shuffled"])
def test_bits_do_not_depend_on_the_order_of_blocks(executor, spec, order):
    inputs = Inputs.random(spec, ROWS, executor.device)
    expected = results(executor, spec, inputs)
    assert_same_bits(results(executor, spec, inputs, order=order), expected)
