"""The torch.library ops of rows in pieces, with fakes: row_sums, row_center, row_apply and, for the
gradients, grad_sums and grad_apply.

x and the tensors like it are a piece: some columns of each row, the rest of which other processes
hold. `dims` is the number of normalised dimensions, and `hidden` the number of elements of a whole
row. What an op returns for each row has x's leading sizes. Results that are absent are empty
tensors.

    part, own, sum = row_sums(x, residual, gate)      all-reduce part: the mean of squares
    centered = row_center(x, mean, own)               LayerNorm alone; all-reduce centered
    y, mean, rstd = row_apply(sum, gate, weight, bias, part, centered)
    dots = grad_sums(dy, sum, gate, weight, mean, rstd)                 all-reduce dots
    dx, dresidual, dgate, dw, db = grad_apply(dy, dsum, sum, gate, weight, bias, mean, rstd, dots)

row_sums takes a gate that comes before the norm alone. autograd sees none of them: see norm.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ...launch.calls import Needs
from ...launch.toolchain import CompileError
from ...spec import NormSpec, Options
from ...table import PIECES, Piece
from ..gradients import PLACES, needs_of
from ..library import LIBRARY, TAGS, taken, tell_others
from ..norm_backward import OPTIONS
from ..reference import Given, name_of, statistics_dtype
from ..registry import device_of, on_device_of, record_failure, select
from . import reference

_FIELDS = len(Options._fields)


class Call(NamedTuple):
    """What all five ops take, beside their tensors."""

    options: Options
    dims: int
    backend: str | None = None

    def lead(self, x: Tensor) -> torch.Size:
        """The shape of what has a number a row."""
        if not 0 < self.dims <= x.dim():
            raise RuntimeError(f"tilenorm: argument 'dims' takes 1 to {x.dim()}, got {self.dims}")
        return x.shape[: x.dim() - self.dims]

    def spec(self, given: Given, dtypes: dict | None = None) -> NormSpec:
        """The spec of a piece: its `hidden` is what the piece has of a row.

        given: tensors by their roles. dtypes: of those that have another one in the spec.
        Raises RuntimeError where weight or bias are not of the piece's shape.
        """
        x = given["x"]
        piece = x.shape[len(self.lead(x)) :]
        width, heads = piece.numel(), 0
        for name in ("weight", "bias"):
            parameter = given.get(name)
            if parameter is None:
                continue
            if parameter.shape[-self.dims :] != piece:
                raise RuntimeError(
                    f"tilenorm: argument {name!r} takes a shape that ends in that of the piece,"
                    f" {list(piece)}, got {list(parameter.shape)}"
                )
            heads = parameter.numel() // width if width else 0
        roles = ("x", "residual", "gate", "weight", "bias")
        named = {r: None if (t := given.get(r)) is None else name_of(t.dtype) for r in roles}
        options = self.options._replace(hidden=width)
        return NormSpec.of_tensors(options, named | (dtypes or {}), heads)

    def run(self, name: str, spec: NormSpec, x: Tensor, *arguments):
        """A function of split/reference.py, by the implementation that serves the spec.

        Raises and warns as registry.select does.
        """
        if self.backend == "reference":
            return getattr(reference, name)(spec, *arguments)
        device, rows = device_of(x.device.type, x.get_device()), x.numel() // (spec.hidden or 1)
        while True:
            # A process may hold nothing of a row: the kernels have nothing to do then.
            backend = self.backend if spec.hidden else "reference"
            chosen = select(spec, rows, device, backend)
            try:
                with on_device_of(x):
                    return chosen.piece(name, spec, device)(*arguments)
            except CompileError as error:
                record_failure(chosen.name, spec, device, error)


def call_of(arguments: tuple) -> Call:
    """Of an op's arguments from its options on, of which `backend` follows `dims` at once."""
    return Call(Options(*arguments[:_FIELDS]), *arguments[_FIELDS:])


def row_sums(x, residual, gate, *others) -> tuple[Tensor, ...]:
    call, given = call_of(others), {"x": x, "residual": residual, "gate": gate}
    lead, dtype = call.lead(x), statistics_dtype(x, residual)
    spec = call.spec(given)
    part, own, total = call.run("row_sums", spec, x, given, lead.numel(), call.options.hidden)
    return (
        part.view(lead),
        x.new_empty(0, dtype=dtype) if own is None else own.view(*lead, 3),
        x.new_empty(0) if total is None else total,
    )


def row_sums_fake(x, residual, gate, *others) -> tuple[Tensor, ...]:
    tell_others()
    call, dtype = call_of(others), statistics_dtype(x, residual)
    lead = call.lead(x)
    own = (*lead, 3) if call.options.norm == "layer" else (0,)
    total = x.new_empty(0) if residual is None else residual.new_empty(x.shape)
    return x.new_empty(lead, dtype=dtype), x.new_empty(own, dtype=dtype), total


def row_center(x, mean, own, *others) -> Tensor:
    call = call_of(others)
    numbers = mean.reshape(-1), own.reshape(-1, 3)
    centered = call.run("row_center", call.spec({"x": x}), x, *numbers, call.options.hidden)
    return centered.view(*mean.shape, 2)


def row_center_fake(x, mean, own, *others) -> Tensor:
    tell_others()
    return mean.new_empty([*mean.shape, 2])


def row_apply(x, gate, weight, bias, whole, centered, *others) -> tuple[Tensor, ...]:
    *others, eps, dtype, save, backend = (*others, None)[: _FIELDS + 5]
    call = call_of((*others, backend))
    given = {"x": x, "gate": gate, "weight": weight, "bias": bias}
    lead = call.lead(x)
    # Where a residual was added, x is the sum, whose dtype is not always y's.
    added = None if x.dtype == dtype else name_of(x.dtype)
    spec = call.spec(given, {"x": name_of(dtype), "residual": added})
    numbers = whole.reshape(-1), None if centered is None else centered.reshape(-1, 2)
    y, *statistics = call.run("row_apply", spec, x, given, *numbers, eps, save)
    none = whole.new_empty(0)
    return y, *(none.clone() if not save or t is None else t.view(lead) for t in statistics)


def row_apply_fake(x, gate, weight, bias, whole, centered, *others) -> tuple[Tensor, ...]:
    tell_others()
    dtype, save = others[_FIELDS + 2], others[_FIELDS + 3]
    mean = whole.shape if save and centered is not None else (0,)
    rstd = whole.shape if save else (0,)
    return x.new_empty(x.shape, dtype=dtype), whole.new_empty(mean), whole.new_empty(rstd)


def _saved(x, gate, weight, bias, mean, rstd) -> Given:
    mean = None if mean is None else mean.reshape(-1)
    saved = {"x": x, "gate": gate, "weight": weight, "bias": bias}
    return saved | {"mean": mean, "rstd": rstd.reshape(-1)}


def grad_sums(dy, x, gate, weight, mean, rstd, *others) -> Tensor:
    call, saved = call_of(others), _saved(x, gate, weight, None, mean, rstd)
    spec = call.spec(saved, {"x": name_of(dy.dtype), "residual": name_of(x.dtype)})
    dots = call.run("grad_sums", spec, x, dy, saved, call.options.hidden)
    return dots.view(*rstd.shape, *([2] if mean is not None else []))


def grad_sums_fake(dy, x, gate, weight, mean, rstd, *others) -> Tensor:
    tell_others()
    return rstd.new_empty((*rstd.shape, *([2] if mean is not None else [])))


class GradApply(NamedTuple):
    """The arguments of grad_apply. read: what grad_sums read, and the bias."""

    dy: Tensor
    dsum: Tensor | None
    read: tuple
    dots: Tensor | None
    call: Call
    added: bool
    mask: tuple[bool, ...]

    @classmethod
    def of(cls, arguments: tuple) -> "GradApply":
        dy, dsum, *read, dots = arguments[:9]
        end = 9 + _FIELDS
        dims, added, mask, *backend = arguments[end:]
        call = call_of((*arguments[9:end], dims, *backend))
        return cls(dy, dsum, tuple(read), dots, call, added, tuple(mask))

    def needs(self) -> Needs:
        """The gradients that are asked for. The tensors may be descriptions with a dtype."""
        x, gate, weight, bias = self.read[:4]
        given = {"x": self.dy, "residual": x if self.added else None}
        given |= {"gate": gate, "weight": weight, "bias": bias}
        dtypes = {role: None if t is None else name_of(t.dtype) for role, t in given.items()}
        spec = NormSpec.of_tensors(self.call.options, dtypes)
        asked = [role for role, need in zip(PLACES, self.mask, strict=False) if need]
        return needs_of(spec, asked, self.dsum is not None)


def grad_apply(*arguments) -> tuple[Tensor, ...]:
    asked = GradApply.of(arguments)
    dy, dots, needs = asked.dy, asked.dots, asked.needs()
    saved = _saved(*asked.read)
    x = saved["x"]
    dtypes = {"x": name_of(dy.dtype), "residual": name_of(x.dtype) if asked.added else None}
    spec = asked.call.spec(saved, dtypes)
    if dots is not None:
        dots = dots.reshape(saved["rstd"].numel(), 1 if saved["mean"] is None else 2)
    grads = asked.call.run("grad_apply", spec, dy, needs, dy, asked.dsum, saved, dots)
    return tuple(dy.new_empty(0) if g is None else g for g in grads)


def grad_apply_fake(*arguments) -> tuple[Tensor, ...]:
    tell_others()
    asked = GradApply.of(arguments)
    dy, needs = asked.dy, asked.needs()
    likes = zip(needs.gradients, (dy, *asked.read[:4]), strict=True)
    return tuple(like.new_empty(like.shape) if need else dy.new_empty(0) for need, like in likes)


def schema_of(piece: Piece) -> str:
    """The schema of an op, from its row."""
    makes = ", ".join(f"Tensor {port.name}" for port in piece.makes)
    makes = f"({makes})" if len(piece.makes) > 1 else "Tensor"
    last = f"{OPTIONS}, int dims, {piece.more}str? backend=None"
    return f"{piece.name}({', '.join(taken(piece.takes))}, {last}) -> {makes}"


for piece in PIECES:
    LIBRARY.define(schema_of(piece), tags=TAGS)
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(piece.name, globals()[piece.name], key)
    fake = globals()[f"{piece.name}_fake"]
    torch.library.register_fake(f"tilenorm::{piece.name}", fake, lib=LIBRARY)
