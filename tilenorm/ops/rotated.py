"""How the kernels of the cuTile implementation take heads that are rotated.

The kernels take heads as (B, S, H, D), in place wherever these dimensions have one stride each:
queries and keys may be views of one projection, and what is made may have heads before tokens.
"""

from collections.abc import Callable, Sequence
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..launch.arrays import RopeBackwardArrays, RopeForwardArrays
from ..launch.calls import ABSENT, Needs, Sizes
from ..launch.rope import RopeBackwardPlan
from ..spec import NormSpec
from .layout import MAX_STRIDE, VECTOR_BYTES, contiguous_strides_of
from .shapes import Fresh, Layout, Layouts
from .torch_private import reinterpret

IN_VECTORS = ("rows", "key", "heads", "table")


class Read(NamedTuple):
    """How a tensor is read. lies: as Port.lies; "vector" lies in one row. strides: of the tensor in
    place; None if it is copied first.
    """

    place: int
    lies: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None


def as_read(tensors: Sequence[Tensor | None], spec: NormSpec, how: tuple) -> list:
    """The tensors as the kernels read them, copied only where they cannot be read in place.

    how: the tokens' shape, and how each tensor that is there is read.
    """
    read, aligned, (tokens, reads) = list(tensors), spec.aligned, how
    for place, lies, shape, strides in reads:
        t: Any = tensors[place]
        if strides is None or (aligned and t.data_ptr() % VECTOR_BYTES):
            turned = _turned(spec, lies, t, tokens)
            t = turned.clone(memory_format=torch.contiguous_format)
            strides = contiguous_strides_of(shape)
        read[place] = reinterpret(t, shape, strides)
    return read


class RotatedLayouts(Layouts):
    """As Layouts, of heads that are rotated."""

    as_read = staticmethod(as_read)

    def _layout_of(self, key: Any) -> Layout:
        plan: Any = self._plan
        spec, tokens, given = plan.spec, tuple(key[0][:-2]), {}
        for place, (shape, strides) in zip(self.grouped, key[1:], strict=True):
            dtype = getattr(torch, self._read[place][1] or "")
            given[place] = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        heads = [t for place, t in given.items() if self._read[place][0] in ("rows", "key")]
        there = any(t.numel() for t in heads)
        sizes = Sizes(*_sequences(tokens), *[t.shape[-2] for t in heads]) if there else ()
        fresh, written, reads = [], [], []
        for place, (made, like) in enumerate(zip(self._made, self._likes, strict=True)):
            how = made and _fresh(spec, *made, given[like])
            fresh.append(how)
            if there and made and how:
                empty = torch.empty_strided(how.shape, how.strides, device="meta")
                as_matrix = _read_of(spec, place, made[0], empty, tokens)
                written.append((place, as_matrix.shape, as_matrix.strides))
        if isinstance(plan, RopeBackwardPlan):
            partials = plan.partials(sizes) if there else None
            fresh.append(partials and Fresh.of(partials, "float32"))
        if there:
            each = [(place, self._read[place][0], given[place]) for place in self.grouped]
            reads = [_read_of(spec, *how, tokens) for how in each]
        # A sum over no tokens is zeros.
        sums = [i for i, made in enumerate(self._made) if made and made[0] == "vector"]
        cleared = () if there else tuple(sums)
        return Layout(sizes, (), tuple(fresh), tuple(written), (tokens, reads), None, cleared, {})


def _sequences(tokens: tuple[int, ...]) -> tuple[int, int]:
    """How many sequences there are, and the tokens of each. A block has tokens of one sequence: so
    tokens that are their sequences' only ones, as where a model decodes, count as one sequence.
    """
    batch, count = prod(tokens[:-1]), tokens[-1]
    return (1, batch) if count == 1 else (batch, count)


def _fresh(spec: NormSpec, lies: str, dtype: str, like: Tensor) -> Fresh:
    shape = tuple(like.shape)
    if lies == "heads" and spec.rotation.heads_first:
        shape = tuple(like.transpose(1, 2).shape)
    if lies == "number":
        shape = (prod(shape[: -2 if spec.by_token else -1]),)
    return Fresh.of(shape, dtype)


def _turned(spec: NormSpec, lies: str, t: Tensor, tokens: tuple[int, ...]) -> Tensor:
    """A view with heads behind tokens, and of all tokens where a table or positions serve many."""
    if lies == "heads" and spec.rotation.heads_first:
        return t.transpose(1, 2)
    if lies == "table" and not spec.rotation.positions:
        return t.expand(*tokens, t.shape[-1])
    return t.expand(tokens) if lies == "tokens" else t


def _shape_of(spec: NormSpec, lies: str, turned: Tensor, tokens: tuple[int, ...]) -> tuple:
    """The shape in which the kernels take a tensor."""
    batch, head = _sequences(tokens), spec.rotation.head
    if lies == "vector" or (lies == "affine" and not spec.by_token):
        return (turned.numel(),)
    if lies == "affine":
        return turned.numel() // head, head
    if lies == "table" and spec.rotation.positions:
        return tuple(turned.shape)
    if lies == "tokens" or (lies == "number" and spec.by_token):
        return batch
    if lies == "number":
        return *batch, turned.numel() // prod(batch)
    return *batch, *turned.shape[len(tokens) :]


def _read_of(spec: NormSpec, place: int, lies: str, t: Tensor, tokens: tuple[int, ...]) -> Read:
    """How a tensor is read: in place if its dimensions are evenly spaced, its last stride is 1,
    and, where heads are whole vectors, each head and each row of a table starts on 16 bytes.

    Raises NotImplementedError for sequences whose distance the kernels cannot hold.
    """
    turned = _turned(spec, lies, t, tokens)
    shape = _shape_of(spec, lies, turned, tokens)
    if shape[0] > 1 and (elements := prod(shape[1:])) >= MAX_STRIDE:
        raise NotImplementedError(
            f"{spec.op}: the kernels take sequences of less than {MAX_STRIDE} elements where there"
            f" are several, got {elements}; backend='reference' takes them"
        )
    try:
        strides = list(turned.view(shape).stride())
    except RuntimeError:  # the leading dimensions do not merge
        return Read(place, lies, shape, None)
    # An extent of 1 may have any stride, and the compiler reads by what the stride is.
    inner = 1
    for i in reversed(range(len(shape))):
        strides[i] = min(inner, VECTOR_BYTES * shape[-1]) if shape[i] == 1 else strides[i]
        inner = shape[i] * strides[i]
    unit = VECTOR_BYTES // t.element_size() if spec.aligned and lies in IN_VECTORS else 1
    fits = strides[-1] == 1 and max(strides) < MAX_STRIDE
    fits = fits and not any(stride % unit for stride in strides[:-1])
    return Read(place, lies, shape, tuple(strides) if fits else None)


def reads(needs: Needs) -> tuple[bool, bool]:
    """Whether a backward pass reads the gradients of the rotated input and of the rotated key."""
    return needs.dx or needs.dw, needs.dkey or needs.dkey_weight


def taking_forward(places: dict[str, int]) -> Callable[[tuple], tuple]:
    """As cutile._taking_forward. places: of what is there, by the roles."""
    of_input = _taking(places, "x", "weight", "y", "rstd")
    of_key = _taking(places, "key", "key_weight", "key_y", "key_rstd")
    tables = _taking(places, "cos", "sin", "positions")

    def take(given: tuple) -> tuple:
        second = of_key(given) if "key" in places else ABSENT
        return RopeForwardArrays(of_input(given), second, *tables(given))

    return take


def taking_backward(places: dict[str, int], needs: Needs) -> Callable[[tuple], tuple]:
    """As cutile._taking_backward. places: also of gradients and partials that are not needed."""
    asked = {"dx": needs.dx, "dw": needs.dw, "dkey": needs.dkey, "dkey_weight": needs.dkey_weight}
    asked["partials"] = needs.dw or needs.dkey_weight
    places = {name: place for name, place in places.items() if asked.get(name, True)}
    of_input = _taking(places | {"dy": 0}, "x", "dy", "weight", "rstd", "dx")
    of_key = _taking(places | {"dy": 1}, "key", "dy", "key_weight", "key_rstd", "dkey")
    others = _taking(places, "cos", "sin", "positions", "partials", "dw", "dkey_weight")
    first, second = reads(needs)

    def take(given: tuple) -> tuple:
        each = of_input(given) if first else ABSENT, of_key(given) if second else ABSENT
        return RopeBackwardArrays(*each, *others(given))

    return take


def _taking(places: dict[str, int], *names: str) -> Callable[[tuple], tuple]:
    """A function that selects arrays by their names; the last one, ABSENT, for an absent one."""
    return itemgetter(*[places.get(name, -1) for name in names])
