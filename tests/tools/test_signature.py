"""What the compiler assumes of arguments, without a GPU; and that cuTile itself agrees."""

import cuda.tile as ct
import pytest
import torch
from cuda.tile.compilation import CallingConvention, KernelSignature

from tests.executors import backward_calls, forward_calls
from tilenorm.launch.calls import every_gradient
from tilenorm.launch.target import Target
from tilenorm.spec import NormSpec
from tilenorm.tools.signature import constraint, signature


@ct.kernel
def kernel(X, n: int, eps: float, N: ct.Constant[int], WIDTHS: ct.Constant[tuple[int, ...]]):
    """Any: only its annotations matter."""


@pytest.mark.parametrize(
    "array, expected",
    [
        # A stride of whole vectors is known.
        (("bfloat16", (5, 9), (24, 1)), {"stride_divisible_by": [8, 1]}),
        (("bfloat16", (5, 9), (20, 1)), {"stride_divisible_by": [1, 1]}),
        (("float32", (5, 9), (20, 1)), {"stride_divisible_by": [4, 1]}),
        (("float32", (5, 9), (18, 1)), {"stride_divisible_by": [1, 1]}),
        (("float16", (5, 9), (1, 16)), {"stride_divisible_by": [1, 8]}),
        (("int32", (5, 9), (20, 1)), {"stride_divisible_by": [4, 1]}),
        # Strides and extents of one are constants.
        (("float32", (1, 9), (9, 1)), {"stride_constant": [None, 1], "shape_constant": [1, None]}),
        # An extent of sixteens is known.
        (("float32", (16, 48), (48, 1)), {"shape_divisible_by": [16, 16]}),
        (("float32", (8, 17), (17, 1)), {"shape_divisible_by": [1, 1]}),
        # So are an aligned base, and rows that share elements. No two arrays alias.
        (
            ("float32", (5, 9), (9, 1), 0),
            {"base_addr_divisible_by": 16, "may_alias_internally": False},
        ),
        (("float32", (5, 9), (9, 1), 1), {"base_addr_divisible_by": 1, "alias_groups": []}),
        (("float32", (5, 9), (8, 1)), {"may_alias_internally": True}),
        (("float32", (5, 9), (1, 5)), {"may_alias_internally": False}),
    ],
)
def test_what_is_known_of_an_array(array, expected):
    dtype, shape, strides, *first = array
    base = torch.empty(1000, dtype=getattr(torch, dtype), device="meta")
    made = constraint(base.as_strided(shape, strides, *first))
    for name, value in expected.items():
        found = getattr(made, name)
        assert (list(found) if isinstance(value, list) else found) == value, name


def test_scalars_and_constants():
    x = torch.empty(5, 9)
    _, n, eps, hidden, widths = signature(kernel, (x, 5, 1e-6, 9, (8, 1))).parameters
    assert (n.dtype, eps.dtype) == (ct.int32, ct.float32)
    assert hidden.value == 9
    assert [width.value for width in widths.items] == [8, 1]


def test_the_symbol_is_that_of_the_signature():
    a, b = (torch.empty(rows, 9) for rows in (5, 16))
    symbols = {signature(kernel, (x, 5, 1e-6, 9, (8, 1))).symbol for x in (a, b)}
    assert len(symbols) == 2


def tensors_of(item):
    """Tensors on the GPU in place of those without memory."""
    if isinstance(item, tuple):
        return tuple(map(tensors_of, item))
    if not isinstance(item, torch.Tensor):
        return item
    return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="cuda")


@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("hidden", [1, 37, 96, 4096, 40000])
@pytest.mark.parametrize(
    "fields",
    [{"norm": "rms"}, {"norm": "layer", "residual": "float32"}, {"norm": "layer", "heads": 2}],
    ids=str,
)
def test_agrees_with_cutile(hidden, rows, fields):
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA driver")
    spec = NormSpec(hidden=hidden, dtype="bfloat16", weight="float32", bias="bfloat16", **fields)
    target, needs = Target("sm_90", 2), every_gradient(spec)
    rows *= spec.heads or 1
    calls = forward_calls(spec, target, rows, True) + backward_calls(spec, target, rows, needs)
    for call in calls:
        expected = KernelSignature.from_kernel_args(
            call.kernel, tensors_of(call.arguments), CallingConvention.cutile_python_v2()
        )
        assert signature(call.kernel, call.arguments) == expected
