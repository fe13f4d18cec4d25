"""Rows are read in place where the kernels can read them and the bits stay, else copied once."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilenorm
from tests.support.calls import (
    EACH_DEVICE,
    LAYER,
    differing,
    gradients_like,
    name_of,
    random,
    step,
    tensors_of,
)
from tests.support.layouts import Layout
from tests.support.passes import Seen
from tests.support.pretended import pretended_gpu, tensors_among
from tilenorm.launch.calls import bound
from tilenorm.ops.passes import cutile, reference
from tilenorm.ops.passes.reading import parameter_of, rows_of, vector_of
from tilenorm.spec import NormSpec


def spec_of(hidden, heads=0, **fields) -> NormSpec:
    """A spec of float32 rows."""
    return NormSpec("rms", hidden, "float32", heads=heads, **fields)


def in_place(view, x) -> bool:
    return view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def check(x, hidden, heads=0) -> None:
    """What the kernels take holds the same rows, and tells the truth about where they start."""
    spec = spec_of(hidden, heads)
    view = rows_of(x, spec)
    assert view.stride(-1) == 1 or hidden == 1
    assert torch.equal(view.reshape(-1, hidden), x.reshape(-1, hidden))
    if heads:
        assert view.shape == (x.numel() // (heads * hidden), heads, hidden)
        # The compiler reads by strides, so extents of 1 have those of a whole tensor.
        even = heads * hidden, hidden
        assert all(view.stride(d) == even[d] for d in (0, 1) if view.shape[d] == 1)
    else:
        assert 2 <= view.dim() <= 4 and view.shape[-1] == hidden
    if spec.aligned:
        assert view.data_ptr() % 16 == 0
        assert all(s * view.element_size() % 16 == 0 for s in view.stride()[:-1])


QKV = random(2, 5, 3, 4, 8)  # batch, sequence, q k v, heads, columns
BASE = random(4, 6, 32)  # as tokens and heads: 4, 6
FLAT = BASE.flatten()

# Of each: the tensor, how long its rows are, and how many heads have weights of their own.
IN_PLACE = {
    "k of qkv, heads in a row": (QKV[:, :, 1], 32, 0),
    "columns": (BASE[..., 8:24], 16, 0),
    "one row of an odd stride": (random(1, 33)[:, :32], 32, 0),
    "rows that fill no vectors": (BASE[..., 1:18], 17, 0),
    "a start where alignment does not count": (FLAT[3 : 3 + 62].view(2, 31), 31, 0),
    "q of qkv": (QKV[:, :, 0], 8, 4),
    "heads apart": (random(4, 6, 64)[..., :32], 32, 6),
    "heads before tokens": (random(6, 4, 32).transpose(0, 1), 32, 6),
    "one batch, transposed": (random(1, 6, 5, 32).transpose(1, 2), 32, 6),
    "one token of an odd stride": (random(6 * 32).as_strided((1, 6, 32), (5, 32, 1)), 32, 6),
    "tokens where alignment does not count": (FLAT[1 : 1 + 4 * 31].view(2, 2, 31), 31, 2),
}
COPIED = {
    "rows a zero stride apart": (BASE[0, :1].expand(6, 32), 32, 0),
    "q of qkv, no heads": (QKV[:, :, 0], 8, 0),
    "k of qkv": (QKV[:, :, 1], 8, 0),
    "four leading dimensions": (random(2, 2, 2, 2, 8).permute(3, 2, 1, 0, 4), 8, 0),
    "rows that overlap backwards": (FLAT.as_strided((4, 32), (0, 1)), 32, 0),
    "a distance of rows": (FLAT.as_strided((4, 32), (34, 1)), 32, 0),
    "heads an odd distance apart": (random(4, 6, 33)[..., :32], 32, 6),
    "batches that do not merge": (random(5, 2, 6, 32).transpose(0, 1), 32, 6),
    "one head many times": (BASE[:, :1].expand(4, 6, 32), 32, 6),
}


@pytest.mark.parametrize("case", IN_PLACE | COPIED)
def test_what_a_call_hands_to_its_kernels(case):
    """Forward and backward read x itself or one copy; the weight is copied onto 16 bytes."""
    x, hidden, heads = (IN_PLACE | COPIED)[case]
    check(x, hidden, heads)
    with Seen() as seen:
        rows_of(x, spec_of(hidden, heads))
    assert seen.ops.count(torch.ops.aten.clone.default) == (case in COPIED)
    dims = next(d for d in range(1, x.dim() + 1) if x.shape[-d:].numel() == hidden)
    shape = x.shape[-2:] if heads else x.shape[-dims:]
    weight = torch.ones(shape.numel() + 1)[1:].view(shape)
    launched = []
    with pretended_gpu():
        launch = cutile.launch
        with patch.object(cutile, "launch", lambda *a: launched.append(a) or launch(*a)):
            leaf = x.detach().requires_grad_()
            y = tilenorm.rms_norm(leaf, x.shape[-dims:], weight, 1e-6)
            torch.autograd.grad(y, leaf, torch.ones(x.shape))
    assert len(launched) == 2
    for _, *made in launched:
        read = [t for call in bound(*made) for t in tensors_among(call.arguments)]
        assert any(t.data_ptr() == x.data_ptr() for t in read) == (case in IN_PLACE)
        assert hidden % 4 or not any(t.data_ptr() % 16 for t in read)


def test_rows_of_which_some_alone_fill_vectors():
    """Each is copied where it is not contiguous, and where it fills vectors but starts at none."""
    spec, wide = spec_of(20, gate="bfloat16"), random(4, 40)
    assert not spec.aligned and not spec.takes_rows_apart
    for x in (wide[:, :20], wide.bfloat16()[:, :20]):
        assert not in_place(rows_of(x, spec), x)
    x = random(101)[1:].view(5, 20)
    assert not in_place(rows_of(x, spec), x)
    assert in_place(rows_of(narrow := x.bfloat16(), spec), narrow)
    assert in_place(rows_of(wide[:2].view(4, 20), spec), wide)


@pytest.mark.parametrize("dtype, unit", [(torch.bfloat16, 8), (torch.float32, 4)], ids=str)
def test_sixteen_bytes_whatever_the_dtype(dtype, unit):
    base, spec = random(4, 64, dtype=dtype), NormSpec("rms", 16, str(dtype)[6:])
    assert in_place(rows_of(base[:, unit : unit + 16], spec), base)
    assert not in_place(rows_of(base[:, unit // 2 : unit // 2 + 16], spec), base)


@pytest.mark.parametrize("stride, stays", [(2**31 - 16, True), (2**31, False), (2**32 + 16, False)])
def test_strides_that_need_more_than_32_bits_are_copied(stride, stays):
    x = torch.empty_strided((3, 16), (stride, 1), device="meta")
    assert rows_of(x, spec_of(16)).stride(0) == (stride if stays else 16)


@st.composite
def views(draw):
    """A view of a contiguous tensor: permuted, sliced, expanded, with sizes of 1."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    x = torch.arange(draw(st.integers(0, 3)) + torch.Size(shape).numel(), dtype=torch.float32)
    x = x[x.numel() - torch.Size(shape).numel() :].view(shape)
    x = x.permute(draw(st.permutations(range(len(shape)))))
    for dim in range(x.dim()):
        action = draw(st.sampled_from(["keep", "keep", "step", "slice", "expand"]))
        if action == "step":
            x = x[(slice(None),) * dim + (slice(None, None, 2),)]
        elif action == "slice":
            x = x.narrow(dim, x.shape[dim] - 1, 1) if draw(st.booleans()) else x.narrow(dim, 0, 1)
        elif action == "expand" and x.shape[dim] == 1:
            x = x.expand(*x.shape[:dim], 3, *x.shape[dim + 1 :])
    normalized = draw(st.integers(1, x.dim()))
    return x, torch.Size(x.shape[-normalized:]).numel()


@settings(deadline=None, max_examples=300)
@given(views(), st.booleans())
def test_the_same_rows_in_any_view(view, by_heads):
    x, hidden = view
    if by_heads and x.dim() > 1:
        check(x, x.shape[-1], x.shape[-2])
    else:
        check(x, hidden)


WEIGHTS = [(BASE[0, 0], True), (BASE[0], True), (BASE[0, 0, ::2], False), (BASE[0].t(), False)]
WEIGHTS += [(BASE[0, 0, :1].expand(32), False), (BASE[0, 0, 1:17], False)]


@pytest.mark.parametrize("w, stays", WEIGHTS)
def test_parameters_become_contiguous(w, stays):
    vector = vector_of(w, aligned=True)
    assert vector.dim() == 1 and vector.is_contiguous() and vector.data_ptr() % 16 == 0
    assert torch.equal(vector, w.reshape(-1))
    assert in_place(vector, w) == stays
    if w.dim() == 2:
        by_heads = parameter_of(w, spec_of(w.shape[1], w.shape[0]))
        assert torch.equal(by_heads, w) and in_place(by_heads, w) == stays
    misaligned = BASE[0, 0, 1:18]  # where alignment does not count
    assert in_place(vector_of(misaligned), misaligned)


@EACH_DEVICE
@pytest.mark.parametrize("shape", [(1, 1024), (6, 2304), (4096, 128)], ids=name_of)
def test_the_reference_gives_the_same_bits_wherever_rows_start(shape, device):
    """It serves float64, and PyTorch's sums on a GPU take another order from an odd start."""
    tensors = tensors_of(LAYER, *shape, dtype=torch.float64, device=device)
    (dy,) = gradients_like([tensors["input"]])
    expected = step(LAYER, tensors, [dy])
    for start in (1, 2, 3, 8):
        place = Layout(shape, (shape[1], 1), start)
        moved = tensors | {"input": place.filled(tensors["input"])}
        for of_step in ((moved, dy), (tensors, place.filled(dy)), (moved, place.filled(dy))):
            got = step(LAYER, of_step[0], [of_step[1]])
            assert differing(got, expected) == {}, f"rows from element {start}"


class OnGPU(torch.Tensor):
    """Says of itself that it lies on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("start, stays", [(0, True), (1, False), (2, False), (4, True), (8, True)])
def test_the_reference_copies_rows_of_a_gpu_that_start_at_no_vector(start, stays):
    around = random(6 * 256 + start, dtype=torch.float64)
    for kind, shared in ((torch.Tensor, True), (OnGPU, stays)):
        x = around[start:].view(6, 256).as_subclass(kind)
        rows = reference.rows_of(x, spec_of(256), torch.float64)
        assert in_place(rows, x) == shared and torch.equal(rows, x)
        assert rows.is_contiguous() and rows.storage_offset() == (start if shared else 0)
