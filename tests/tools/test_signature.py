"""What the compiler assumes of arguments, without a GPU; and that cuTile itself agrees."""

import cuda.tile as ct
import pytest
import torch
from cuda.tile.compilation import CallingConvention, KernelSignature

from tests.executors import backward_calls, forward_calls
from tilenorm.launch.calls import ABSENT, BackwardArrays, ForwardArrays, bound, every_gradient
from tilenorm.launch.plan import plan_backward, plan_forward
from tilenorm.launch.target import Target
from tilenorm.spec import NormSpec
from tilenorm.tools.signature import ArrayLike, signature


@ct.kernel
def kernel(X, n: int, eps: float, N: ct.Constant[int], WIDTHS: ct.Constant[tuple[int, ...]]):
    """Any: only its annotations matter."""


def test_contiguous_strides():
    assert ArrayLike.contiguous("float32", 3, 5, 7).strides == (35, 7, 1)
    assert ArrayLike.contiguous("float32", 7).strides == (1,)


@pytest.mark.parametrize(
    "dtype, strides, expected",
    [
        ("bfloat16", (24, 1), [8, 1]),
        ("bfloat16", (20, 1), [1, 1]),
        ("float32", (20, 1), [4, 1]),
        ("float32", (18, 1), [1, 1]),
        ("float16", (1, 16), [1, 8]),
        ("int32", (20, 1), [4, 1]),
    ],
)
def test_a_stride_of_whole_vectors_is_known(dtype, strides, expected):
    assert list(ArrayLike(dtype, (5, 9), strides).constraint().stride_divisible_by) == expected


def test_strides_and_extents_of_one_are_constants():
    found = ArrayLike("float32", (1, 9), (9, 1)).constraint()
    assert list(found.stride_constant) == [None, 1]
    assert list(found.shape_constant) == [1, None]


@pytest.mark.parametrize("extent, divisor", [(16, 16), (48, 16), (8, 1), (17, 1)])
def test_an_extent_of_sixteens_is_known(extent, divisor):
    assert list(ArrayLike.contiguous("float32", extent).constraint().shape_divisible_by) == [
        divisor
    ]


@pytest.mark.parametrize("aligned, divisor", [(True, 16), (False, 1)])
def test_an_aligned_base_is_known(aligned, divisor):
    like = ArrayLike("float32", (5, 9), (9, 1), aligned)
    assert like.constraint().base_addr_divisible_by == divisor


@pytest.mark.parametrize(
    "shape, strides, overlapping",
    [
        ((5, 9), (9, 1), False),
        ((5, 9), (8, 1), True),
        ((5, 9), (1, 5), False),
    ],
)
def test_rows_that_share_elements_are_known(shape, strides, overlapping):
    found = ArrayLike("float32", shape, strides).constraint()
    assert found.may_alias_internally is overlapping


def test_no_two_arrays_alias():
    assert ArrayLike.contiguous("float32", 5, 9).constraint().alias_groups == ()


def test_scalars_and_constants():
    x = ArrayLike.contiguous("float32", 5, 9)
    _, n, eps, hidden, widths = signature(kernel, (x, 5, 1e-6, 9, (8, 1))).parameters
    assert (n.dtype, eps.dtype) == (ct.int32, ct.float32)
    assert hidden.value == 9
    assert [width.value for width in widths.items] == [8, 1]


def test_the_symbol_is_that_of_the_signature():
    a, b = (ArrayLike.contiguous("float32", rows, 9) for rows in (5, 16))
    symbols = {signature(kernel, (x, 5, 1e-6, 9, (8, 1))).symbol for x in (a, b)}
    assert len(symbols) == 2


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

    def tensor(dtype, *shape):
        return torch.empty(shape, dtype=dtype, device="cuda")

    heads = spec.heads or 1
    lead = (rows, heads) if spec.heads else (rows,)
    rows = rows * heads
    x, y = (tensor(torch.bfloat16, *shape, hidden) for shape in (lead, (rows,)))
    residual, total = (tensor(torch.float32, *shape, hidden) for shape in (lead, (rows,)))
    parameter = (heads, hidden) if spec.heads else (hidden,)
    weight, bias = (tensor(d, *parameter) for d in (torch.float32, torch.bfloat16))
    dw, db = (tensor(d, heads * hidden) for d in (torch.float32, torch.bfloat16))
    mean, rstd = tensor(torch.float32, rows), tensor(torch.float32, rows)
    added = spec.residual is not None
    mean = mean if spec.norm == "layer" else ABSENT
    forward, backward = plan_forward(spec, target, True), plan_backward(spec, target, needs)
    slots = [
        tensor(torch.int32, *plan.slots(rows)) if plan.slots(rows) else ABSENT
        for plan in (forward, backward)
    ]
    partials = tensor(torch.float32, *backward.partials(rows))
    real = bound(
        forward.launches(rows, 1e-6),
        ForwardArrays(
            x=x,
            residual=residual if added else ABSENT,
            gate=ABSENT,
            weight=weight,
            bias=bias,
            y=y,
            sum=total if added else ABSENT,
            mean=mean,
            rstd=rstd,
            slots=slots[0],
        ).of(spec),
    ) + bound(
        backward.launches(rows),
        BackwardArrays(
            x=residual if added else x,
            dy=x,
            gate=ABSENT,
            dsum=residual if added else ABSENT,
            weight=weight,
            bias=bias,
            mean=mean,
            rstd=rstd,
            dx=y,
            dresidual=total if added else ABSENT,
            dgate=ABSENT,
            partials=partials,
            slots=slots[1],
            dw=dw,
            db=db,
        ),
    )
    derived = forward_calls(spec, target, rows, True) + backward_calls(spec, target, rows, needs)
    for theirs, ours in zip(real, derived, strict=True):
        expected = KernelSignature.from_kernel_args(
            theirs.kernel, theirs.arguments, CallingConvention.cutile_python_v2()
        )
        assert signature(ours.kernel, ours.arguments) == expected
