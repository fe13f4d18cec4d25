"""What Inductor's generated code calls: functions in which everything constant of a call is bound.

Generated code makes one function for each kind of call when it is loaded: of one op, of tensors
with the same dtypes, device and parameters, with the same options. The function finds what serves
when it is called first, because code is loaded before a device is used. Then a call checks that its
tensors are plain, and runs the implementation. Arguments that only the dispatcher can serve go to
the op.

Calls that repeat earlier ones ask only whether a mode sees them. TorchDynamo's guards hold the
dispatch keys of a graph's inputs, and what Inductor makes is plain. A step of a model runs much
between two calls, so that each Python object that a call touches comes from memory: on the host of
an H100 a forward pass of 5 µs in a loop took 40 µs in a step of BERT.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ..spec import NormSpec
from ..table import FACTORS, OPS
from .bound import Bound, BoundNorm, bound_of, keep, keep_backward, norm_of
from .direct import Plain
from .layout import MOST_SHAPES, contiguous_strides_of, rows_shape, vector_of
from .library import numbers_shape
from .modulated_backward import ModulatedBackward
from .norm_backward import FIRST, TERMS, Backward
from .registry import MAX_ROWS, on_device_of
from .rotated_backward import RotatedBackward
from .torch_private import modes, reinterpret

# The backward ops whose tensors go by their roles.
BY_ROLE = {kind.NAME: kind for kind in (ModulatedBackward, RotatedBackward)}


def tensors_of(op: str, given: Sequence[str]) -> tuple[str, ...]:
    """The names of the tensors that a bound function of an op takes, where tensors of the names
    `given` are there.
    """
    if op in OPS:
        return tuple(port.name for port in OPS[op].takes)
    if op in BY_ROLE:
        kind = BY_ROLE[op]
        return kind.NAMES[: len(kind.ROLES)]
    return *FIRST, *(name for name in (*TERMS, *FACTORS) if name in given)


def bind(op: str, taken: tuple[str, ...], **options) -> Callable:
    """A function of an op's tensors of the names `taken` that returns what the op returns, and None
    for what is absent. options: the op's other arguments by name.
    """
    if op in OPS:
        return forward(op, **options)
    return backward_by_role(op, **options) if op in BY_ROLE else backward(taken, **options)


def forward(name: str, *, hidden: int, save: bool, backend: str | None, **options) -> Callable:
    op = OPS[name]
    eps = tuple(options.pop(of) for of in op.eps)
    asked = (hidden, *(options[of] for of in op.options))
    most, own = MAX_ROWS * hidden, eps if op.calls else eps[0]
    numbers = [(i, port) for i, port in enumerate(op.makes) if port.lies == "number"]
    bound: Bound | None = None
    repeated: dict[torch.Size, Callable] = {}  # by the shape of the input

    @lru_cache(MOST_SHAPES)
    def view_of(shape: torch.Size) -> tuple | None:
        return _apart(rows_shape(shape, hidden))

    def bound_forward(*tensors: Tensor | None) -> Sequence[Tensor | None]:
        x = tensors[0]
        repeat = repeated.get(x.shape)
        made = None if repeat is None or modes() else repeat(tensors)
        if made is None:
            made = called(x, tensors)
        view = view_of(x.shape) if save else None
        for i, port in numbers:
            if not save or made[i] is None:
                made[i] = None
                continue
            if port.given:
                view = _apart(numbers_shape(op, port, tensors, hidden))
            if view is not None:
                made[i] = reinterpret(made[i], *view)
        return made[: len(op.makes)]

    def called(x: Tensor, tensors: tuple) -> list:
        nonlocal bound
        bound = bound or bound_of(op, tensors, asked, backend)
        if x.numel() > most or not bound.plain.takes(tensors):
            made = getattr(torch.ops.tilenorm, name)(*tensors, *asked, *eps, save, backend)
            return [made] if isinstance(made, Tensor) else list(made)
        run: Any = bound.training if save else bound.inference
        with on_device_of(x):
            made = list(run(tensors, own))
        if len(set(eps)) == 1:
            keep(repeated, x.shape, run.repeated(x.shape, eps[0]))
        return made

    return bound_forward


def _apart(shape: tuple[int, ...]) -> tuple | None:
    """The shape and strides of numbers in several dimensions."""
    return None if len(shape) == 1 else (shape, contiguous_strides_of(shape))


def backward(taken: tuple[str, ...], *, hidden: int, backend: str | None, **options) -> Callable:
    """The same of norm_backward."""
    most, plain, output = MAX_ROWS * hidden, Plain(), options["output"]
    constant = options | {"hidden": hidden, "backend": backend}
    first, end = len(FIRST), len(FIRST) + len(set(TERMS) & set(taken))
    statistics = [taken.index(name) for name in ("mean", "rstd")]
    norm: BoundNorm | None = None
    run: Any = None
    read: Any = None
    places: list[int] = []
    repeated: dict[torch.Size, Callable] = {}

    def bound_backward(*tensors: Tensor | None) -> Sequence[Tensor | None]:
        repeat = repeated.get(tensors[2].shape)
        if repeat is not None and not modes():
            made = repeat(read((*tensors, None)))
            if made is not None:
                return (*made[:5], made[5] if output else None)
        return called(tensors)

    def called(tensors: tuple) -> Sequence[Tensor | None]:
        nonlocal norm, run, read, places
        dy, dsum, x = tensors[:3]
        if norm is None:
            call = Backward.of((), constant | dict(zip(taken, tensors, strict=True)))
            spec = call.spec
            needs = call.needs(spec)
            norm = norm_of(spec, x.device.type, x.get_device(), False, backend)
            places = [taken.index("input" if role == "x" else role) for role in spec.kept]
            run = norm.backward(spec, needs)
            order = [0, 1 if needs.dsum else -1, *places, *range(first, end)]
            read = itemgetter(*order)
        if x.numel() > most or not plain.takes(tensors):
            given = constant | dict(zip(taken, tensors, strict=True))
            return torch.ops.tilenorm.norm_backward(**given)
        saved = [tensors[place] for place in places]
        for i, place in enumerate(places):
            if place in statistics:
                saved[i] = vector_of(saved[i])
        with on_device_of(dy):
            found = run(dy, dsum, saved, options["eps"], tensors[first:end])
        keep_backward(repeated, x.shape, found, run.repeated(x.shape, 0.0))
        return found if output else (*found, None)

    return bound_backward


def backward_by_role(op: str, *, hidden: int, **options) -> Callable:
    """The same of an op whose tensors go by their roles."""
    most, plain, kind = MAX_ROWS * hidden, Plain(), BY_ROLE[op]
    constant = (hidden, *options.values())
    known: tuple[NormSpec, Callable] | None = None

    def bound_backward(*tensors: Tensor | None) -> Sequence[Tensor | None]:
        nonlocal known
        dy, dsum, x = tensors[:3]
        call = kind((*tensors, *constant), {})
        if known is None:
            spec = call.spec
            norm = norm_of(spec, x.device.type, x.get_device(), False, options["backend"])
            known = spec, norm.backward(spec, call.needs(spec))
        if x.numel() > most or not plain.takes(tensors):
            return getattr(torch.ops.tilenorm, op)(*tensors, *constant)
        spec, run = known
        with on_device_of(x):
            found = (*run(dy, dsum, call.kept(spec), options["eps"]), None, None)
        return [found[place] for place in kind.PLACES]

    return bound_backward
