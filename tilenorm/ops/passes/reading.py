"""Tensors as the kernels take them: rows in place where that keeps a row's bits, else one copy."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import prod
from operator import mul

import torch
from torch import Tensor

from ...row import Port
from ...spec import NormSpec
from ..pytorch.torch_private import reinterpret

VECTOR_BYTES = 16
MAX_STRIDE = 2**31  # kernels hold extents and strides in 32 bits
MOST_SHAPES = 256  # of inputs, for which a bound call keeps what follows from them


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
    hidden = spec.hidden
    if x.is_contiguous():
        # A single row may have any stride, and the compiler reads by what the stride is.
        if x.stride() != (hidden, 1):
            x = reinterpret(x, (x.numel() // hidden, hidden), (hidden, 1))
        return x if _starts_vectors(x, spec) else x.clone()
    stride = _row_stride(x.shape, x.stride(), hidden) if spec.takes_rows_apart else None
    if stride is None or not _starts_vectors(x, spec, stride):
        return x.reshape(-1, hidden).contiguous()
    return x.as_strided((prod(x.shape) // hidden, hidden), (stride, 1))


def _tokens_of(x: Tensor, spec: NormSpec) -> Tensor:
    """x as (tokens, heads, hidden), always, so that every layout is read by the same code."""
    heads, hidden = spec.heads, spec.hidden
    shape, even = (x.numel() // (heads * hidden), heads, hidden), (heads * hidden, hidden, 1)
    if x.is_contiguous() and _starts_vectors(x, spec):
        return x if x.stride() == even else reinterpret(x, shape, even)
    try:
        view = x.view(shape)
    except RuntimeError:  # the leading dimensions do not merge into one
        view = x.contiguous().view(shape)
    # An extent of 1 may have any stride, and the compiler reads by what the stride is.
    strides = [e if n == 1 else s for n, s, e in zip(shape, view.stride(), even, strict=True)]
    fits = strides[2] == 1 and 0 < min(strides) <= max(strides) < MAX_STRIDE
    if fits and spec.takes_rows_apart and _starts_vectors(view, spec, *strides[:2]):
        return view.as_strided(shape, strides)
    return view.clone(memory_format=torch.contiguous_format).as_strided(shape, even)


def _starts_vectors(x: Tensor, spec: NormSpec, *strides: int) -> bool:
    """Whether every row starts on 16 bytes, if a contiguous row is whole vectors of 16 bytes."""
    if not spec.aligned and spec.hidden * x.element_size() % VECTOR_BYTES:
        return True
    unit = VECTOR_BYTES // x.element_size()
    return not (x.data_ptr() % VECTOR_BYTES or any(s % unit for s in strides))


def copies_of(
    tensors: Sequence[Tensor | None], read: Sequence, grouped: Sequence[int]
) -> frozenset[int] | None:
    """The places of the tensors that the kernels read as contiguous copies. None where a tensor is
    copied otherwise: from an address that is no multiple of 16 bytes, or at `grouped`.

    read: what as_read returned.
    """
    places = set()
    for place, (t, as_kernel_reads) in enumerate(zip(tensors, read, strict=True)):
        if t is None:
            continue
        if t.data_ptr() != as_kernel_reads.data_ptr():
            if place in grouped or t.is_contiguous():
                return None
            places.add(place)
        elif t.data_ptr() % VECTOR_BYTES:
            return None
    return frozenset(places)


def strided(tensors: Sequence[Tensor | None], grouped: Sequence[int]) -> list[int]:
    """The places of tensors whose strides a launch depends on: of those that are not contiguous,
    and of those at `grouped`.
    """
    return [
        place
        for place, t in enumerate(tensors)
        if t is not None and (place in grouped or not t.is_contiguous())
    ]


def reading(spec: NormSpec, ports: Sequence[Port]) -> list[tuple[Callable, tuple[int, ...]]]:
    """How tensors are read: of each what makes it what the kernels read, and the strides of what
    they read in the place of a contiguous tensor, or ().
    """
    rows = (spec.heads, spec.hidden) if spec.heads else (spec.hidden,)
    in_place = {"... n": rows, "[h] n": rows[1:], "n": ()}
    how = []
    for port in ports:
        strides: tuple[int, ...] = ()
        if port.dims in in_place and port.like != "bool":
            strides = contiguous_strides_of((1, *in_place[port.dims]))
        how.append((READERS.get(port.dims, _as_it_is), strides))
    return how


def as_read(tensors: Sequence[Tensor | None], spec: NormSpec, how: Sequence) -> list:
    """An op's tensors as the kernels read them, copied only where they cannot be read in place. A
    mask is read as bytes, which are 0 or 1. how: see reading.
    """
    read = []
    for t, (reader, strides) in zip(tensors, how, strict=True):
        # Most tensors are contiguous. Calls with new shapes take 2 to 3 µs less by this branch.
        if t is not None and t.is_contiguous() and strides and not t.data_ptr() % VECTOR_BYTES:
            if t.stride() != strides:
                sizes = [a // b for a, b in pairwise(strides)]
                t = reinterpret(t, (t.numel() // strides[0], *sizes), strides)
        elif t is not None:
            t = reader(t, spec)
        read.append(t)
    return read


def _as_it_is(t: Tensor, spec: NormSpec) -> Tensor:
    return t


def _matrix_of(t: Tensor, spec: NormSpec) -> Tensor:
    t = rows_of(t, spec)
    return t.view(torch.uint8) if t.dtype == torch.bool else t


def shaped_as(fresh: Tensor, like: Tensor) -> Tensor:
    """A contiguous tensor, which nothing else holds, in the shape of another."""
    strides = like.stride() if like.is_contiguous() else contiguous_strides_of(like.shape)
    return reinterpret(fresh, tuple(like.shape), strides)  # PyTorch 2.14 takes no torch.Size


def shown_as(written: Tensor, shape: tuple, strides: tuple, dtype: torch.dtype) -> Tensor:
    """Another view of the memory of what was written, from its start."""
    shaped = written.as_strided(shape, strides)
    return shaped if shaped.dtype == dtype else shaped.view(dtype)


def heads_of(hidden: int, *parameters: Tensor | None) -> int:
    """How many rows of `hidden` elements a weight and a bias have; 0 without them."""
    most = max([prod(p.shape) for p in parameters if p is not None], default=0)
    return most // hidden if hidden else 0


def contiguous_strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of a shape."""
    sizes = [max(size, 1) for size in shape[:0:-1]]
    return tuple(accumulate(sizes, mul, initial=1))[::-1] if len(shape) else ()


def vector_of(w: Tensor, aligned: bool = False) -> Tensor:
    """w as a contiguous vector, copied where it is not one, or, if `aligned`, not on 16 bytes."""
    if w.stride() != (1,):  # also of one element, which may have any stride
        w = reinterpret(w.contiguous(), (w.numel(),), (1,))
    return w.clone() if aligned and w.data_ptr() % VECTOR_BYTES else w


def parameter_of(w: Tensor, spec: NormSpec) -> Tensor:
    """A weight or bias as (hidden,), or (heads, hidden) where heads have their own."""
    vector = vector_of(w, spec.aligned)
    return vector.view(spec.heads, spec.hidden) if spec.heads else vector


def groups_of(p: Tensor, spec: NormSpec) -> Tensor:
    """What lies by group as (groups, hidden), in place if its rows are evenly spaced, and all start
    on 16 bytes where they fill vectors.
    """
    hidden, stride = spec.hidden, _row_stride(p.shape, p.stride(), spec.hidden)
    if stride is None or not _starts_vectors(p, spec, stride):
        p, stride = p.clone(memory_format=torch.contiguous_format), hidden
    return reinterpret(p, (p.numel() // hidden, hidden), (stride, 1))


def _row_stride(sizes: Sequence[int], strides: Sequence[int], hidden: int) -> int | None:
    """The distance of a tensor's rows if they are evenly spaced and contiguous, else None. A single
    row may have any stride, and the compiler reads by what the stride is: it has `hidden` here.
    """
    dims = [(n, s) for n, s in zip(sizes, strides, strict=True) if n != 1]
    inner = 1
    while inner < hidden:
        extent, stride = dims.pop()
        if stride != inner:
            return None
        inner *= extent
    distance = following = dims[-1][1] if dims else hidden
    for extent, stride in reversed(dims):
        if stride != following:
            return None
        following = extent * stride
    return distance if 0 < distance < MAX_STRIDE else None


def _vector_of_rows(t: Tensor, spec: NormSpec) -> Tensor:
    return vector_of(t, spec.aligned)


# What makes a tensor of a port's dimensions what the kernels read.
READERS: dict[str, Callable[[Tensor, NormSpec], Tensor]] = {
    "... n": _matrix_of,
    "g n": groups_of,
    "[h] n": parameter_of,
    "n": _vector_of_rows,
}
