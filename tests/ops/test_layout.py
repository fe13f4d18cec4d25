"""rows_of: in place where the kernels can read it and the bits stay, else one copy."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilenorm.ops.layout import parameter_of, rows_of, vector_of
from tilenorm.spec import NormSpec

from .helpers import name_of, random


def spec_of(hidden, heads=0, **fields) -> NormSpec:
    """A spec of float32 rows."""
    return NormSpec("rms", hidden, "float32", heads=heads, **fields)


def described(shape, strides):
    """A tensor by its description, whose strides no memory here could hold."""
    copy = SimpleNamespace(contiguous=lambda: "copied")
    return SimpleNamespace(
        shape=shape,
        stride=lambda: strides,
        dim=lambda: len(shape),
        is_contiguous=lambda: False,
        data_ptr=lambda: 0,
        element_size=lambda: 4,
        as_strided=lambda *_: "in place",
        reshape=lambda *_: copy,
    )


def in_place(view, x) -> bool:
    return view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def check(x, hidden) -> torch.Tensor:
    spec = spec_of(hidden)
    view = rows_of(x, spec)
    assert 2 <= view.dim() <= 4
    assert view.shape[-1] == hidden
    assert view.stride(-1) == 1 or hidden == 1
    assert torch.equal(view.reshape(-1, hidden), x.reshape(-1, hidden))
    if spec.aligned:
        assert view.data_ptr() % 16 == 0
        assert all(s * view.element_size() % 16 == 0 for s in view.stride()[:-1])
    return view


QKV = random(2, 5, 3, 4, 8)  # batch, sequence, q k v, heads, columns
BASE = random(4, 6, 32)  # as tokens and heads: 4, 6

IN_PLACE = {
    "contiguous": (BASE, 32),
    "contiguous, two dimensions a row": (BASE, 6 * 32),
    "one row": (BASE[0, 0], 32),
    "k of qkv, heads in a row": (QKV[:, :, 1], 32),
    "columns": (BASE[..., 8:24], 16),
    "every second row": (BASE[:, ::2], 32),
    "four that collapse to two": (BASE.view(2, 2, 3, 2, 32)[..., :16], 16),
    "odd strides of size 1": (BASE.as_strided((1, 6, 1, 32), (7, 64, 13, 1)), 32),
    "one row of an odd stride": (random(1, 33)[:, :32], 32),
    "one row of an odd stride, by itself": (random(1, 1, 33)[..., :32], 32),
    "rows that fill no vectors": (BASE[..., 1:18], 17),
}


@pytest.mark.parametrize("case", IN_PLACE)
def test_in_place(case):
    x, hidden = IN_PLACE[case]
    view = check(x, hidden)
    assert view.data_ptr() == x.data_ptr()
    assert view.dim() == 2


COPIED = {
    "columns transposed": (random(4, 8, 6).transpose(1, 2), 8),
    "every second column": (BASE[..., ::2], 16),
    "a row in two pieces": (BASE[..., :16], 6 * 16),
    "one row many times": (BASE[:1].expand(4, 6, 32), 32),
    "rows a zero stride apart": (BASE[0, :1].expand(6, 32), 32),
    "columns a zero stride apart": (BASE[..., :1].expand(4, 6, 32), 32),
    "q of qkv": (QKV[:, :, 0], 8),
    "k of qkv": (QKV[:, :, 1], 8),
    "rows and columns": (BASE[:, 1:3, 4:20], 16),
    "transposed batch": (BASE.transpose(0, 1), 32),
    "three leading dimensions": (random(4, 3, 2, 32).permute(2, 1, 0, 3), 32),
    "four leading dimensions": (random(2, 2, 2, 2, 8).permute(3, 2, 1, 0, 4), 8),
    "rows that overlap backwards": (BASE.flatten().as_strided((4, 32), (0, 1)), 32),
    "rows that are shorter than a vector": (BASE[..., :3], 3),
}


@pytest.mark.parametrize("case", COPIED)
def test_copied_once(case, monkeypatch):
    x, hidden = COPIED[case]
    copies = []
    for name in ("contiguous", "reshape"):
        original = getattr(torch.Tensor, name)

        def counted(self, *args, _original=original):
            result = _original(self, *args)
            if not in_place(result, self):
                copies.append(result)
            return result

        monkeypatch.setattr(torch.Tensor, name, counted)
    view = rows_of(x, spec_of(hidden))
    monkeypatch.undo()
    assert len(copies) == 1 and view.is_contiguous()
    check(x, hidden)


MISALIGNED = {
    "start": BASE.flatten()[3 : 3 + 64].view(2, 32),
    "start of rows apart": BASE[:, 0, 1:17],
    "distance of rows": BASE.flatten().as_strided((4, 32), (34, 1)),
}


@pytest.mark.parametrize("case", MISALIGNED)
def test_misaligned_rows_are_copied_where_alignment_counts(case):
    x = MISALIGNED[case]
    hidden = x.shape[-1]
    assert not in_place(check(x, hidden), x)
    assert check(x[..., :-1], hidden - 1).data_ptr() == x.data_ptr()


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
    base, spec = random(4, 64, dtype=dtype), NormSpec("rms", 16, name_of(dtype))
    assert in_place(rows_of(base[:, unit : unit + 16], spec), base)
    assert not in_place(rows_of(base[:, unit // 2 : unit // 2 + 16], spec), base)


@pytest.mark.parametrize(
    "stride, expected", [(2**31 - 16, "in place"), (2**31, "copied"), (2**32 + 16, "copied")]
)
def test_strides_that_need_more_than_32_bits_are_copied(stride, expected):
    assert rows_of(described((3, 16), (stride, 1)), spec_of(16)) == expected


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
@given(views())
def test_the_same_rows_in_any_view(view):
    check(*view)


WEIGHTS = {
    "vector": (BASE[0, 0], True),
    "matrix": (BASE[0], True),
    "strided": (BASE[0, 0, ::2], False),
    "one number": (BASE[0, 0, :1].expand(32), False),
    "transposed": (BASE[0].t(), False),
    "misaligned": (BASE[0, 0, 1:17], False),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_parameters_become_contiguous_vectors(case):
    w, stays = WEIGHTS[case]
    vector = vector_of(w, aligned=True)
    assert vector.dim() == 1 and vector.is_contiguous() and vector.data_ptr() % 16 == 0
    assert torch.equal(vector, w.reshape(-1))
    assert in_place(vector, w) == stays


def test_a_misaligned_parameter_stays_where_alignment_does_not_count():
    assert vector_of(BASE[0, 0, 1:18]).data_ptr() == BASE[0, 0, 1:].data_ptr()


TOKENS_IN_PLACE = {
    "contiguous": BASE,
    "one token": BASE[0],
    "q of qkv": QKV[:, :, 0],
    "a slice of a fused projection": random(2, 5, 7 * 32)[..., : 6 * 32].unflatten(-1, (6, 32)),
    "heads apart": random(4, 6, 64)[..., :32],
    "heads before tokens": random(6, 4, 32).transpose(0, 1),
    "every second token": random(8, 6, 32)[::2],
    "one batch, transposed": random(1, 6, 5, 32).transpose(1, 2),
    "odd strides of size 1": random(6 * 32 + 7).as_strided((1, 6, 32), (5, 32, 1)),
}
TOKENS_COPIED = {
    "batches that do not merge": random(5, 2, 6, 32).transpose(0, 1),
    "batches transposed": random(2, 6, 5, 32).transpose(1, 2),
    "columns apart": random(4, 6, 64)[..., ::2],
    "columns transposed": random(4, 32, 6).transpose(1, 2),
    "one head many times": BASE[:, :1].expand(4, 6, 32),
    "one token many times": BASE[:1].expand(4, 6, 32),
    "one element in": random(4 * 6 * 32 + 1)[1:].view(4, 6, 32),
    "rows an odd distance apart": random(4, 6, 33)[..., :32],
}


def check_tokens(x) -> torch.Tensor:
    heads, hidden = x.shape[-2:]
    view = rows_of(x, spec_of(hidden, heads))
    assert view.shape == (x.numel() // (heads * hidden), heads, hidden)
    assert view.stride(-1) == 1
    assert torch.equal(view, x.reshape(view.shape))
    # The compiler takes strides for what they are, so extents of 1 have those of a whole tensor.
    assert all(view.stride(d) == (heads * hidden, hidden)[d] for d in (0, 1) if view.shape[d] == 1)
    return view


@pytest.mark.parametrize("case", TOKENS_IN_PLACE)
def test_tokens_in_place(case):
    x = TOKENS_IN_PLACE[case]
    assert check_tokens(x).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("case", TOKENS_COPIED)
def test_tokens_copied(case):
    view = check_tokens(TOKENS_COPIED[case])
    assert view.is_contiguous() and not in_place(view, TOKENS_COPIED[case])


def test_misaligned_tokens_stay_where_alignment_does_not_count():
    x = TOKENS_COPIED["one element in"][..., :-1]
    assert check_tokens(x).data_ptr() == x.data_ptr()


@settings(deadline=None, max_examples=100)
@given(views())
def test_the_same_tokens_in_any_view(view):
    x = view[0]
    if x.dim() > 1:
        check_tokens(x)


def test_parameters_by_heads():
    spec = spec_of(32, 6)
    for w in (BASE[0], BASE[0].t().contiguous().t(), BASE[0, 0].expand(6, 32)):
        matrix = parameter_of(w, spec)
        assert matrix.is_contiguous() and torch.equal(matrix, w)
    assert in_place(parameter_of(BASE[0], spec), BASE)
