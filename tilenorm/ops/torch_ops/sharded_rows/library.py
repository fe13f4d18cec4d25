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
from math import prod
from typing import Any

from torch import Tensor

from ....spec import NormSpec, Options
from ....table import PIECES
from ...passes.bound import norm_of
from ...passes.reference import name_of, statistics_dtype
from ...passes.registry import MAX_ROWS, on_device_of
from ...passes.sharded_rows import reference
from ...pytorch.errors import wrong
from ..internal_ops import InternalCall, define
from ..library import Result


class Piece(InternalCall):
    """A call of an op."""

    @property
    def lead(self) -> tuple[int, ...]:
        """The shape of what has a number a row."""
        shape, dims = tuple(self.tensors["x"].shape), self.options["dims"]
        if not 0 < dims <= len(shape):
            raise wrong("tilenorm", "dims", f"1 to {len(shape)}", dims)
        return shape[: len(shape) - dims]

    def _spec_of(self, hidden: int, heads: int = 0) -> NormSpec:
        """Once a residual was added, x is the sum, and stands for the residual. The spec's own
        dtype is that of y.
        """
        x, dy, options = self.x, self.tensors.get("dy"), self.options
        own = options.get("dtype", x.dtype if dy is None else dy.dtype)
        dtypes = self.dtypes | {"x": name_of(own)}
        if options.get("added", dy is not None or own != x.dtype):
            dtypes["residual"] = name_of(x.dtype)
        asked = Options(*[options[name] for name in Options._fields])
        return NormSpec.of_tensors(asked._replace(hidden=hidden), dtypes, heads)

    @property
    def spec(self) -> NormSpec:
        """The spec of whole rows, which have weights of their own shape."""
        return self._spec_of(self.options["hidden"])

    def of_piece(self) -> NormSpec:
        """The spec of the piece: its `hidden` is what the piece has of a row.

        Raises RuntimeError where weight or bias are not of the piece's shape.
        """
        shape, heads = self.tensors["x"].shape[len(self.lead) :], 0
        width = prod(shape)
        for name in ("weight", "bias"):
            parameter = self.tensors.get(name)
            if parameter is None:
                continue
            if parameter.shape[-self.options["dims"] :] != shape:
                takes = f"a shape that ends in that of the piece, {list(shape)}"
                raise wrong("tilenorm", name, takes, list(parameter.shape))
            heads = parameter.numel() // width if width else 0
        return self._spec_of(width, heads)

    def results(self) -> Sequence[Result]:
        given, lead, layer = self.tensors, self.lead, self.options["norm"] == "layer"
        x, found = given["x"], []
        if self.row.name == "row_sums":
            residual = given["residual"]
            dtype = statistics_dtype(x, residual)
            total = (None, x.dtype) if residual is None else (x.shape, residual.dtype)
            found = [(lead, dtype), ((*lead, 3) if layer else None, dtype), total]
        elif self.row.name == "row_center":
            found = [((*lead, 2), given["mean"].dtype)]
        elif self.row.name == "row_apply":
            rstd, dtype = lead if self.options["save"] else None, given["whole"].dtype
            found = [(x.shape, self.options["dtype"]), (rstd if layer else None, dtype)]
            found.append((rstd, dtype))
        elif self.row.name == "grad_sums":
            found = [((*lead, 2) if layer else lead, given["rstd"].dtype)]
        return [Result(*each) for each in found] or super().results()

    def read(self, spec: NormSpec) -> dict[str, Any]:
        """What the functions of reference.py take: numbers of rows are (rows,) or (rows, n); and
        the results by their roles.
        """
        lead, found = self.lead, self.options | self.tensors
        rows = found["rows"] = prod(lead)
        for port in self.row.takes:
            t = found[port.role]
            if port.number and t is not None:
                found[port.role] = t.reshape(rows, *t.shape[len(lead) :])
        roles = [port.role for port in self.row.makes]
        found["results"] = dict(zip(roles, self.results(), strict=True))
        return found | ({"needs": self.needs(spec)} if "output_mask" in found else {})

    def run(self) -> Any:
        """Raises and warns as registry.select."""
        spec, x = self.of_piece(), self.tensors["x"]
        # A process may hold nothing of a row: the kernels have nothing to do then.
        backend = self.options["backend"] if spec.hidden else "reference"
        long = x.numel() > MAX_ROWS * spec.hidden
        norm = norm_of(spec, x.device.type, x.get_device(), long, backend)
        with on_device_of(x):
            return self.returned(norm.piece(self.row.name, self.read(spec)))

    def decomposed(self) -> Any:
        spec = self.of_piece()
        return self.returned(getattr(reference, self.row.name)(spec, self.read(spec)))

    def returned(self, made: Sequence[Tensor | None]) -> Any:
        """What the op returns of what an implementation makes."""
        x, found = self.tensors["x"], []
        for t, of in zip(made, self.results(), strict=True):
            absent = t is None or of.shape is None
            found.append(x.new_empty(0, dtype=of.dtype) if absent else t.view(of.shape))
        return tuple(found) if len(found) > 1 else found[0]


KINDS = {name: type(name, (Piece,), {"row": row}) for name, row in PIECES.items()}
for _kind in KINDS.values():
    define(_kind)
