"""Tensors as the kernels take them: rows in place where that keeps a row's bits, else one copy."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..spec import NormSpec
from .torch_private import reinterpret

VECTOR_BYTES = 16
MAX_STRIDE = 2**31  # kernels hold extents and strides in 32 bits


def rows_of(x: Tensor, spec: NormSpec) -> Tensor:
    """x as (rows, hidden), or (tokens, heads, hidden) if there are heads, with a last stride of 1.

    In place if the normalised dimensions are contiguous, rows are evenly spaced, and, when rows
    fill vectors, every row starts on 16 bytes. A row that does not would be read in narrower pieces
    and summed in another order. Code for rows that are unevenly spaced may sum in another order,
    too: that of layer_norm backward of 1024 float32 (sm_90) adds in a tree instead of a chain. So
    these are copied, and all that are not contiguous where NormSpec.takes_rows_apart says so: the
    same bits come first.
    """
    if spec.heads:
        return _tokens_of(x, spec)
    hidden, fills = spec.hidden, _fills_vectors(x, spec)
    if x.is_contiguous():
        # A single row may have any stride, and the compiler reads by what the stride is.
        if x.stride() != (hidden, 1):
            x = reinterpret(x, (x.numel() // hidden, hidden), (hidden, 1))
        return x.clone() if fills and x.data_ptr() % VECTOR_BYTES else x
    strided = _collapse(x, hidden) if spec.takes_rows_apart else None
    if strided is None or len(strided[0]) > 1 or not _starts_vectors(x, strided[1], fills):
        return x.reshape(-1, hidden).contiguous()
    shape, strides = strided
    return x.as_strided((*shape, hidden), (*strides, 1))


def _tokens_of(x: Tensor, spec: NormSpec) -> Tensor:
    """x as (tokens, heads, hidden), always, so that every layout is read by the same code."""
    heads, hidden = spec.heads, spec.hidden
    shape = (x.numel() // (heads * hidden), heads, hidden)
    even, fills = (heads * hidden, hidden, 1), _fills_vectors(x, spec)
    if x.is_contiguous() and not (fills and x.data_ptr() % VECTOR_BYTES):
        return x if x.stride() == even else reinterpret(x, shape, even)
    try:
        view = x.view(shape)
    except RuntimeError:  # the leading dimensions do not merge into one
        view = x.contiguous().view(shape)
    # An extent of 1 may have any stride, and the compiler reads by what the stride is.
    strides = [e if n == 1 else s for n, s, e in zip(shape, view.stride(), even, strict=True)]
    fits = strides[2] == 1 and 0 < min(strides) <= max(strides) < MAX_STRIDE
    if fits and spec.takes_rows_apart and _starts_vectors(view, strides[:2], fills):
        return view.as_strided(shape, strides)
    return view.clone(memory_format=torch.contiguous_format).as_strided(shape, even)


def _fills_vectors(x: Tensor, spec: NormSpec) -> bool:
    """Whether a contiguous row of x is whole vectors of 16 bytes."""
    return spec.aligned or not spec.hidden * x.element_size() % VECTOR_BYTES


def _starts_vectors(x: Tensor, strides: list[int], fills: bool) -> bool:
    """Every row starts on 16 bytes, if rows fill vectors."""
    unit = VECTOR_BYTES // x.element_size()
    return not fills or not (x.data_ptr() % VECTOR_BYTES or any(s % unit for s in strides))


def start_vectors(tensors: Sequence[Tensor | None]) -> bool:
    """Whether every tensor that is there starts on 16 bytes."""
    addresses = 0
    for tensor in tensors:
        if tensor is not None:
            addresses |= tensor.data_ptr()
    return not addresses % VECTOR_BYTES


class Read(NamedTuple):
    """How contiguous tensors are viewed for the kernels: those with rows, and weight and bias."""

    rows: tuple[int, ...]
    rows_strides: tuple[int, ...]
    parameter: tuple[int, ...]
    parameter_strides: tuple[int, ...]

    @classmethod
    def of(cls, spec: NormSpec, rows: int) -> "Read":
        heads, hidden = spec.heads, spec.hidden
        if heads:
            strides = heads * hidden, hidden, 1
            return cls((rows // heads, heads, hidden), strides, (heads, hidden), (hidden, 1))
        return cls((rows, hidden), (hidden, 1), (hidden,), (1,))


def as_read(
    rows: Sequence[Tensor | None],
    parameters: Sequence[Tensor | None],
    spec: NormSpec,
    read: Read | None,
) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None]]:
    """A norm's tensors as the kernels read them, copied only where they cannot be read in place.

    rows: those that have rows. parameters: weight and bias. read: how contiguous tensors are
    viewed, or None where they are read as they are.
    """
    addresses = 0
    for given in (rows, parameters):
        for t in given:
            if t is not None:
                if not t.is_contiguous():
                    return _as_read_apart(rows, parameters, spec)
                addresses |= t.data_ptr()
    if addresses % VECTOR_BYTES:
        return _as_read_apart(rows, parameters, spec)
    if read is None:
        return rows, parameters
    shape, strides, size, step = read
    viewed: list[list] = [[], []]  # comprehensions take longer
    for t in rows:
        viewed[0].append(t if t is None else reinterpret(t, shape, strides))
    for t in parameters:
        viewed[1].append(t if t is None else reinterpret(t, size, step))
    return viewed[0], viewed[1]


def _as_read_apart(rows: Sequence[Tensor | None], parameters: Sequence, spec: NormSpec) -> tuple:
    """The same for tensors of which one may have to be copied."""
    rows = [t if t is None else rows_of(t, spec) for t in rows]
    return rows, [t if t is None else parameter_of(t, spec) for t in parameters]


def shaped_as(fresh: Tensor, like: Tensor) -> Tensor:
    """A contiguous tensor, which nothing else holds, in the shape of another."""
    strides = like.stride() if like.is_contiguous() else contiguous_strides(like)
    return reinterpret(fresh, tuple(like.shape), strides)  # PyTorch 2.14 takes no torch.Size


def rows_shape(shape: Sequence[int], hidden: int) -> tuple[int, ...]:
    """The leading sizes of a tensor whose rows have `hidden` elements: the shape of the statistics.

    The rows take the fewest trailing dimensions that hold `hidden` elements. A shard of a tensor
    whose leading dimensions are cut has as many of them as the whole tensor. Rows of no elements
    have no statistics, and the shape is (0,).

    Raises RuntimeError if no trailing dimensions hold `hidden` elements.
    """
    if not hidden:
        return (0,)
    elements = 1
    for end in reversed(range(len(shape))):
        elements *= shape[end]
        if elements == hidden:
            return tuple(shape[:end])
    raise RuntimeError(
        "tilenorm::norm: argument 'hidden' takes the number of elements of the input's last"
        f" dimensions, got {hidden} for an input of shape {list(shape)}"
    )


def contiguous_strides(x: Tensor) -> tuple[int, ...]:
    """The strides of a contiguous tensor of x's shape."""
    return x.stride() if x.is_contiguous() else contiguous_strides_of(x.shape)


def contiguous_strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of a shape."""
    strides = [1] if len(shape) else []
    for size in shape[:0:-1]:
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))


def vector_of(w: Tensor, aligned: bool = False) -> Tensor:
    """w as a contiguous vector, copied where it is not one, or, if `aligned`, not on 16 bytes."""
    vector = w if w.stride() == (1,) else w.reshape(-1).contiguous()
    return vector.clone() if aligned and vector.data_ptr() % VECTOR_BYTES else vector


def parameter_of(w: Tensor, spec: NormSpec) -> Tensor:
    """A weight or bias as (hidden,), or (heads, hidden) where heads have their own."""
    vector = vector_of(w, spec.aligned)
    return vector.view(spec.heads, spec.hidden) if spec.heads else vector


def _collapse(x: Tensor, hidden: int) -> tuple[list[int], list[int]] | None:
    """Shape and strides of the leading dimensions, merged; None if the kernels cannot read x."""
    dims = [(n, s) for n, s in zip(x.shape, x.stride(), strict=True) if n != 1]
    inner = 1
    while inner < hidden:
        extent, stride = dims.pop()
        if stride != inner:
            return None
        inner *= extent
    merged: list[tuple[int, int]] = []
    for extent, stride in dims:
        if merged and merged[-1][1] == extent * stride:
            extent *= merged.pop()[0]
        merged.append((extent, stride))
    if not merged:
        return [1], [hidden]
    shape, strides = map(list, zip(*merged, strict=True))
    if not 0 < min(strides) <= max(strides) < MAX_STRIDE:
        return None
    return shape, strides
