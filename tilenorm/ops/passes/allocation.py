"""What follows from the shape of an input, for a plan: what is allocated, and how tensors are read.

It is worked out once for each shape, and kept. Heads that are rotated the kernels take as
(B, S, H, D), in place wherever these dimensions have one stride each: queries and keys may be views
of one projection, and what is made may have heads before tokens.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...launch.calls import Sizes
from ...launch.plan import BackwardPlan, ForwardPlan
from ...launch.scales import Scales
from ...row import Port
from ...spec import NormSpec
from ..pytorch.torch_private import reinterpret
from . import dims, ports
from .quantize import SCALE_DTYPES
from .reading import MAX_STRIDE, MOST_SHAPES, VECTOR_BYTES, as_read, contiguous_strides_of, reading

MOST_SCALES = 2**31 - 1  # the kernels number scales in 32 bits
AS_MATRICES = ("... n", "+g n", "+[h] n")  # results that the kernels write as matrices or vectors
IN_VECTORS = ("... n", "t k d", "t? r")
SCRATCH = {"partials": "float32", "slots": "int32", "group_sums": "float32"}


class Fresh(NamedTuple):
    """A contiguous tensor to be allocated."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: str) -> "Fresh":
        return cls(shape, contiguous_strides_of(shape), getattr(torch, dtype))


class Layout(NamedTuple):
    """What follows from the shape of an input."""

    rows: Any  # how many; where heads are rotated the Sizes, or () if there are none
    groups: tuple[int, ...]  # how many, of a backward pass by group, in a tuple; else ()
    # What is allocated: the results in their order, None for an absent one, and scratch.
    made: tuple[Fresh | None, ...]
    # The place, shape and strides of each result that the kernels write as a matrix or a vector,
    # where it is none.
    written: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]
    # The place, shape, strides and dtype of each result that a caller gets as another view of its
    # memory.
    shown: tuple[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    reading: Any  # how tensors are read, see Layouts.as_read
    cleared: tuple[int, ...]  # the places of results that kernels add to, or do not write whole


class Layouts(dict):
    """The Layout of each shape that a plan has met, the first MOST_SHAPES of them.

    A key has the shape of the input, that of the tensor at `like`, and the shapes and strides of
    the tensors at `grouped`. input, like, grouped: places among the tensors that are read. like: of
    a parameter whose shape the gradients of parameters have, else of the input. grouped: of what
    lies by group, or of all tensors where heads are rotated.
    """

    def __init__(
        self, plan: ForwardPlan | BackwardPlan, read: ports.Tensors, results: ports.Results
    ):
        super().__init__()
        self._plan, self._read, self._results = plan, tuple(read), tuple(results)
        rotated = plan.spec.rotation is not None
        present = [(i, port) for i, (port, dtype) in enumerate(read) if dtype]
        (self.input,) = [i for i, (port, _) in enumerate(read) if port.role == "x"]
        self.grouped = tuple([i for i, port in present if port.dims == "g n" or rotated])
        parameters = [i for i, port in present if port.dims == "[h] n"]
        self.like = parameters[0] if parameters and hasattr(plan, "needs") else self.input
        self.as_read = _heads_as_read if rotated else as_read
        self._reading = reading(plan.spec, [port for port, _ in read])
        one = Sizes(1, 1, 1, 1) if rotated else 1
        # The names and dtypes of the scratch that the plan needs.
        self.scratch = [
            (name, dtype)
            for name, dtype in SCRATCH.items()
            if self._scratch_shape(name, one, (1,)) is not None
        ]

    def of(self, tensors: Sequence[Any]) -> Layout:
        """The Layout of a call's tensors."""
        key = tensors[self.input].shape, tensors[self.like].shape
        return self[key + tuple([(tensors[i].shape, tensors[i].stride()) for i in self.grouped])]

    def __missing__(self, key: Any) -> Layout:
        layout = self._layout_of(*key)
        if len(self) < MOST_SHAPES:
            self[key] = layout
        return layout

    def _scratch_shape(self, name: str, rows: Any, groups: tuple[int, ...]) -> Any:
        """The shape of the partials, the slots or the sums by group; None without any."""
        shape_of = getattr(self._plan, name, None)
        if shape_of is None:
            return None
        by_group = self._plan.spec.modulated and name != "slots"
        return shape_of(rows, *groups) if by_group else shape_of(rows)

    def _layout_of(self, shape: torch.Size, like: torch.Size, *grouped: tuple) -> Layout:
        spec = self._plan.spec
        named = {"input": dims.Shaped(shape)}
        for place, shape_and_strides in zip(self.grouped, grouped, strict=True):
            port, _ = self._read[place]
            named[port.name] = dims.Shaped(*shape_and_strides)
        sizes = dims.sizes_of_spec(spec, named)
        rows, groups = self._rows(sizes, named), ()
        if "scale" in named and isinstance(self._plan, BackwardPlan):
            groups = (prod(sizes.words["g"]),)
        scales = None
        if spec.quantized is not None:
            scales = Scales.of(spec.quantized, spec.hidden, rows)
            if scales.count > MOST_SCALES:
                raise NotImplementedError(
                    f"{spec.op}: the kernels write up to {MOST_SCALES} scales, got {scales.count}"
                )
        fresh, written, shown, cleared = [], [], [], []
        for place, result in enumerate(self._results):
            if result is None:
                fresh.append(None)
                continue
            port, dtype = result
            new = Fresh.of(self._allocated(port, sizes, like, scales), dtype)
            fresh.append(new)
            if rows and spec.rotation:
                written.append((place, dims.view(port, sizes), _strides_of(port, new, sizes)))
            elif port.dims in AS_MATRICES:
                view = dims.view(port, sizes, written=True)
                if view != new.shape:
                    written.append((place, view, contiguous_strides_of(view)))
            if port.like == "scale":
                view_of_caller = scales.shape, scales.strides, SCALE_DTYPES[scales.dtype]
                shown.append((place, *view_of_caller))
            if port.dims == "1":  # the largest magnitude, of whose bits the kernels write a maximum
                shown.append((place, (1,), (1,), torch.float32))
                cleared.append(place)
            # A sum over no rows is zeros.
            if (port.like == "scale" and scales.padding) or (port.adds and not rows):
                cleared.append(place)
        for name, dtype in self.scratch:
            extents = self._scratch_shape(name, rows, groups) if rows else None
            fresh.append(None if extents is None else Fresh.of(extents, dtype))
        read_as = self._reading
        if spec.rotation:
            read_as = self._heads_reading(sizes, named, rows)
        views = tuple(written), tuple(shown)
        return Layout(rows, groups, tuple(fresh), *views, read_as, tuple(cleared))

    def _rows(self, sizes: dims.Sizes, named: dict[str, dims.Shaped]) -> Any:
        """How many rows; where heads are rotated the Sizes, or () if there are none."""
        if self._plan.spec.rotation is None:
            return prod(sizes.words["..."])
        heads = [named[name].shape for name in ("input", "key") if name in named]
        if not any(map(prod, heads)):
            return ()
        return Sizes(*dims.sequences(sizes.words["t"]), *[shape[-2] for shape in heads])

    def _allocated(self, port: Port, sizes: dims.Sizes, like: torch.Size, scales: Any) -> tuple:
        """The shape in which a result is allocated: its own, or flat."""
        if port.dims == "+[h] n":
            return tuple(like)
        if port.like == "scale":
            return (scales.count,)
        shape = dims.shape(port, sizes)
        return (prod(shape),) if port.number else shape

    def _heads_reading(self, sizes: dims.Sizes, named: dict, rows: Any) -> tuple:
        """How heads that are rotated are read: the sizes of the call, and a Read of each tensor."""
        reads = [
            _read_of(self._plan.spec, place, *self._read[place], named, sizes)
            for place in (self.grouped if rows else ())
        ]
        return sizes, reads


class Read(NamedTuple):
    """How a tensor is read."""

    place: int
    port: Port
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # of the tensor in place; None if it is copied first


def _heads_as_read(tensors: Sequence[Tensor | None], spec: NormSpec, how: tuple) -> list:
    """The tensors as the kernels read them, copied only where they cannot be read in place.

    how: the sizes of the call, and how each tensor that is there is read.
    """
    read, aligned, (sizes, reads) = list(tensors), spec.aligned, how
    for place, port, shape, strides in reads:
        t: Any = tensors[place]
        if strides is None or (aligned and t.data_ptr() % VECTOR_BYTES):
            t = _turned(port, t, sizes).clone(memory_format=torch.contiguous_format)
            strides = contiguous_strides_of(shape)
        read[place] = reinterpret(t, shape, strides)
    return read


def _turned(port: Port, t: Tensor, sizes: dims.Sizes) -> Tensor:
    """A view with heads behind tokens, and of all tokens where a table or positions serve many."""
    if port.swapped and sizes.swapped:
        return t.transpose(1, 2)
    if sizes.dims(port).startswith("t?"):
        return t.expand(*sizes.words["t"], *t.shape[-1:] * bool(port.indexed))
    return t


def _strides_of(port: Port, tensor: Any, sizes: dims.Sizes) -> tuple[int, ...] | None:
    """The strides in which the kernels take a tensor; None if it cannot be read in place."""
    t = torch.empty_strided(tensor.shape, tensor.strides, device="meta")
    shape = dims.view(port, sizes)
    try:
        strides = list(_turned(port, t, sizes).view(shape).stride())
    except RuntimeError:  # the leading dimensions do not merge
        return None
    # An extent of 1 may have any stride, and the compiler reads by what the stride is.
    inner = 1
    for i in reversed(range(len(shape))):
        strides[i] = min(inner, VECTOR_BYTES * shape[-1]) if shape[i] == 1 else strides[i]
        inner = shape[i] * strides[i]
    return tuple(strides)


def _read_of(
    spec: NormSpec,
    place: int,
    port: Port,
    dtype: str,
    named: Mapping[str, dims.Shaped],
    sizes: dims.Sizes,
) -> Read:
    """How a tensor is read: in place if its dimensions are evenly spaced, its last stride is 1,
    and, where heads are whole vectors, each head and each row of a table starts on 16 bytes.

    Raises NotImplementedError for sequences whose distance the kernels cannot hold.
    """
    shape = dims.view(port, sizes)
    if shape[0] > 1 and (elements := prod(shape[1:])) >= MAX_STRIDE:
        raise NotImplementedError(
            f"{spec.op}: the kernels take sequences of less than {MAX_STRIDE} elements where there"
            f" are several, got {elements}; backend='reference' takes them"
        )
    strides = _strides_of(port, named[port.name], sizes)
    if strides is None:
        return Read(place, port, shape, None)
    item = getattr(torch, dtype).itemsize
    unit = VECTOR_BYTES // item if spec.aligned and port.dims in IN_VECTORS else 1
    fits = strides[-1] == 1 and max(strides) < MAX_STRIDE
    fits = fits and not any(stride % unit for stride in strides[:-1])
    return Read(place, port, shape, tuple(strides) if fits else None)
