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

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...launch.calls import Needs, needs_of
from ...launch.toolchain import CompileError
from ...spec import NormSpec, Options
from ...table import PIECES, Piece
from ..backward import OPTIONS
from ..gradients import PLACES
from ..library import register, taken, tell_others
from ..reference import name_of, statistics_dtype
from ..registry import device_of, on_device_of, record_failure, select
from ..tensor_checks import wrong
from . import reference

# The roles of the tensors that have another name in the schemas.
ROLES = {"input": "x", "grad_output": "dy", "grad_sum": "dsum"}
# The shape of a result, None for an empty tensor, and its dtype.
Result = tuple[Sequence[int] | None, torch.dtype]


class Call(NamedTuple):
    """A call of an op. given: the arguments by name, the tensors by role. Where only results() is
    asked for, a shape and a dtype may stand for a tensor.
    """

    piece: Piece
    options: Options
    given: dict[str, Any]

    @classmethod
    def of(cls, piece: Piece, arguments: Sequence) -> "Call":
        names = getattr(torch.ops.tilenorm, piece.name).default._schema.arguments
        named = zip([ROLES.get(a.name, a.name) for a in names], arguments, strict=False)
        given = {"backend": None} | dict(named)
        return cls(piece, Options(*[given[name] for name in Options._fields]), given)

    @property
    def lead(self) -> tuple[int, ...]:
        """The shape of what has a number a row."""
        shape, dims = tuple(self.given["x"].shape), self.given["dims"]
        if not 0 < dims <= len(shape):
            raise wrong("tilenorm", "dims", f"1 to {len(shape)}", dims)
        return shape[: len(shape) - dims]

    @property
    def dtypes(self) -> dict[str, str]:
        """The dtypes of the spec's tensors by role. Once a residual was added, x is the sum, and
        stands for the residual. The spec's own dtype is that of y.
        """
        given, x, dy = self.given, self.given["x"], self.given.get("dy")
        there = {r: given.get(r) for r in ("residual", "gate", "weight", "bias")}
        dtypes = {role: t.dtype for role, t in there.items() if t is not None}
        dtypes["x"] = given.get("dtype", x.dtype if dy is None else dy.dtype)
        if given.get("added", dy is not None or dtypes["x"] != x.dtype):
            dtypes["residual"] = x.dtype
        return {role: name_of(dtype) for role, dtype in dtypes.items()}

    def spec(self) -> NormSpec:
        """The spec of the piece: its `hidden` is what the piece has of a row.

        Raises RuntimeError where weight or bias are not of the piece's shape.
        """
        given, heads = self.given, 0
        shape = given["x"].shape[len(self.lead) :]
        width = prod(shape)
        for name in ("weight", "bias"):
            parameter = given.get(name)
            if parameter is None:
                continue
            if parameter.shape[-given["dims"] :] != shape:
                takes = f"a shape that ends in that of the piece, {list(shape)}"
                raise wrong("tilenorm", name, takes, list(parameter.shape))
            heads = parameter.numel() // width if width else 0
        return NormSpec.of_tensors(self.options._replace(hidden=width), self.dtypes, heads)

    def needs(self) -> Needs:
        """The gradients that grad_apply is asked for."""
        pairs = zip(PLACES, self.given["output_mask"], strict=False)
        spec = NormSpec.of_tensors(self.options, self.dtypes)
        return needs_of(spec, [r for r, need in pairs if need], self.given["dsum"] is not None)

    def results(self) -> tuple[Result, ...]:
        given, lead, layer = self.given, self.lead, self.options.norm == "layer"
        x = given["x"]
        if self.piece.name == "row_sums":
            residual = given["residual"]
            dtype = statistics_dtype(x, residual)
            total = (None, x.dtype) if residual is None else (x.shape, residual.dtype)
            return (lead, dtype), ((*lead, 3) if layer else None, dtype), total
        if self.piece.name == "row_center":
            return (((*lead, 2), given["mean"].dtype),)
        if self.piece.name == "row_apply":
            rstd = lead if given["save"] else None
            numbers = [(shape, given["whole"].dtype) for shape in (rstd if layer else None, rstd)]
            return (x.shape, given["dtype"]), *numbers
        if self.piece.name == "grad_sums":
            return (((*lead, 2) if layer else lead, given["rstd"].dtype),)
        likes = [given[role] for role in ("dy", "x", "gate", "weight", "bias")]
        pairs = zip(self.needs().gradients, likes, strict=True)
        return tuple((t.shape, t.dtype) if need else (None, x.dtype) for need, t in pairs)

    def returned(self, made: Sequence[Tensor | None] | None = None) -> Any:
        """What the op returns: `made`, or tensors like that; empty tensors for absent results."""
        x, found = self.given["x"], []
        for place, (shape, dtype) in enumerate(self.results()):
            if shape is None or made is None:
                found.append(x.new_empty(0 if shape is None else shape, dtype=dtype))
            else:
                found.append(made[place].view(shape))
        return tuple(found) if len(found) > 1 else found[0]

    def read(self) -> dict[str, Any]:
        """What the functions of reference.py take: numbers of rows are (rows,) or (rows, n)."""
        lead, found = self.lead, dict(self.given)
        rows = found["rows"] = prod(lead)
        for port in self.piece.takes:
            t = found[ROLES.get(port.name, port.name)]
            if port.lies in ("part", "whole") and t is not None:
                found[port.name] = t.reshape(rows, *t.shape[len(lead) :])
        return found | ({"needs": self.needs()} if "output_mask" in found else {})


def run(piece: Piece, *arguments):
    """An op, by the implementation that serves the spec. Raises and warns as registry.select."""
    call = Call.of(piece, arguments)
    spec, x, backend = call.spec(), call.given["x"], call.given["backend"]
    if backend == "reference":
        return by_reference(piece, *arguments)
    device, rows = device_of(x.device.type, x.get_device()), x.numel() // (spec.hidden or 1)
    while True:
        # A process may hold nothing of a row: the kernels have nothing to do then.
        chosen = select(spec, rows, device, backend if spec.hidden else "reference")
        try:
            with on_device_of(x):
                return call.returned(chosen.piece(piece.name, spec, device)(call.read()))
        except CompileError as error:
            record_failure(chosen.name, spec, device, error)


def by_reference(piece: Piece, *arguments):
    """An op in PyTorch's own operators, for tensors on any device."""
    call = Call.of(piece, arguments)
    return call.returned(getattr(reference, piece.name)(call.spec(), call.read()))


def fake(piece: Piece, *arguments):
    tell_others()
    return Call.of(piece, arguments).returned()


def schema_of(piece: Piece) -> str:
    """The arguments and results of an op, as in its schema, from its row."""
    makes = ", ".join(f"Tensor {port.name}" for port in piece.makes)
    makes = f"({makes})" if len(piece.makes) > 1 else "Tensor"
    last = f"{OPTIONS}, int dims, {piece.more}str? backend=None"
    return f"({', '.join(taken(piece.takes))}, {last}) -> {makes}"


for _piece in PIECES:
    register(_piece.name, schema_of(_piece), partial(run, _piece), partial(fake, _piece))
