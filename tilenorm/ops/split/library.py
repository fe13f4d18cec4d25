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

from ...launch.toolchain import CompileError
from ...spec import PLAIN, NormSpec, Options
from ..plans import heads_of, spec_of
from ..registry import device_of, on_device_of, record_failure, select
from ..schemas import LIBRARY, OPTIONS
from ..sharding import register_where_loaded
from ..tensors import Saved, Tensors, dtype_of, merged_needs, statistics_dtype
from . import reference
from .rules import STRATEGIES

_FIELDS = len(Options._fields)
_LAST = f"{OPTIONS}, int dims"
SCHEMAS = (
    f"row_sums(Tensor input, Tensor? residual, Tensor? gate, {_LAST}, str? backend=None)"
    " -> (Tensor part, Tensor own, Tensor sum)",
    f"row_center(Tensor input, Tensor mean, Tensor own, {_LAST}, str? backend=None) -> Tensor",
    "row_apply(Tensor input, Tensor? gate, Tensor? weight, Tensor? bias, Tensor whole,"
    f" Tensor? centered, {_LAST}, float eps, ScalarType dtype, bool save, str? backend=None)"
    " -> (Tensor output, Tensor mean, Tensor rstd)",
    "grad_sums(Tensor grad_output, Tensor input, Tensor? gate, Tensor? weight, Tensor? mean,"
    f" Tensor rstd, {_LAST}, str? backend=None) -> Tensor",
    "grad_apply(Tensor grad_output, Tensor? grad_sum, Tensor input, Tensor? gate, Tensor? weight,"
    f" Tensor? bias, Tensor? mean, Tensor rstd, Tensor? dots, {_LAST}, bool added,"
    " bool[5] output_mask, str? backend=None) -> (Tensor grad_input, Tensor grad_residual,"
    " Tensor grad_gate, Tensor grad_weight, Tensor grad_bias)",
)


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

    def spec(self, tensors: Tensors, dtypes: Tensors | None = None) -> NormSpec:
        """The spec of a piece: its `hidden` is what the piece has of a row.

        tensors: the dtypes of the spec, unless `dtypes` has them.
        Raises RuntimeError where weight or bias are not of the piece's shape.
        """
        piece = tensors[0].shape[len(self.lead(tensors[0])) :]
        for name, parameter in zip(("weight", "bias"), tensors[3:PLAIN], strict=True):
            if parameter is not None and parameter.shape[-self.dims :] != piece:
                raise RuntimeError(
                    f"tilenorm: argument {name!r} takes a shape that ends in that of the piece,"
                    f" {list(piece)}, got {list(parameter.shape)}"
                )
        width = piece.numel()
        dtypes = Tensors(*map(dtype_of, tensors)) if dtypes is None else dtypes
        heads = heads_of(tensors[3], tensors[4], width)
        return spec_of(self.options._replace(hidden=width), dtypes, heads)

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
    call, tensors = call_of(others), Tensors(x, residual, gate)
    lead, dtype = call.lead(x), statistics_dtype(x, residual)
    spec = call.spec(tensors)
    part, own, total = call.run("row_sums", spec, x, tensors, lead.numel(), call.options.hidden)
    return (
        part.view(lead),
        x.new_empty(0, dtype=dtype) if own is None else own.view(*lead, 3),
        x.new_empty(0) if total is None else total,
    )


def row_sums_fake(x, residual, gate, *others) -> tuple[Tensor, ...]:
    register_where_loaded(STRATEGIES)
    call, dtype = call_of(others), statistics_dtype(x, residual)
    lead = call.lead(x)
    own = (*lead, 3) if call.options.norm == "layer" else (0,)
    total = x.new_empty(0) if residual is None else residual.new_empty(x.shape)
    return x.new_empty(lead, dtype=dtype), x.new_empty(own, dtype=dtype), total


def row_center(x, mean, own, *others) -> Tensor:
    call = call_of(others)
    numbers = mean.reshape(-1), own.reshape(-1, 3)
    centered = call.run("row_center", call.spec(Tensors(x)), x, *numbers, call.options.hidden)
    return centered.view(*mean.shape, 2)


def row_center_fake(x, mean, own, *others) -> Tensor:
    register_where_loaded(STRATEGIES)
    return mean.new_empty([*mean.shape, 2])


def row_apply(x, gate, weight, bias, whole, centered, *others) -> tuple[Tensor, ...]:
    *others, eps, dtype, save, backend = (*others, None)[: _FIELDS + 5]
    call, tensors = call_of((*others, backend)), Tensors(x, None, gate, weight, bias)
    lead = call.lead(x)
    # Where a residual was added, x is the sum, whose dtype is not always y's.
    added = None if x.dtype == dtype else x.dtype
    spec = call.spec(tensors, Tensors(dtype, added, *map(dtype_of, tensors[2:])))
    numbers = whole.reshape(-1), None if centered is None else centered.reshape(-1, 2)
    y, *statistics = call.run("row_apply", spec, x, tensors, *numbers, eps, save)
    none = whole.new_empty(0)
    return y, *(none.clone() if not save or t is None else t.view(lead) for t in statistics)


def row_apply_fake(x, gate, weight, bias, whole, centered, *others) -> tuple[Tensor, ...]:
    register_where_loaded(STRATEGIES)
    dtype, save = others[_FIELDS + 2], others[_FIELDS + 3]
    mean = whole.shape if save and centered is not None else (0,)
    rstd = whole.shape if save else (0,)
    return x.new_empty(x.shape, dtype=dtype), whole.new_empty(mean), whole.new_empty(rstd)


def _saved(x, gate, weight, bias, mean, rstd) -> Saved:
    mean = None if mean is None else mean.reshape(-1)
    return Saved(x, gate, weight, bias, mean, rstd.reshape(-1))


def grad_sums(dy, x, gate, weight, mean, rstd, *others) -> Tensor:
    call, saved = call_of(others), _saved(x, gate, weight, None, mean, rstd)
    spec = call.spec(Tensors(dy, x, *saved[1:4]))
    dots = call.run("grad_sums", spec, x, dy, saved, call.options.hidden)
    return dots.view(*rstd.shape, *([2] if mean is not None else []))


def grad_sums_fake(dy, x, gate, weight, mean, rstd, *others) -> Tensor:
    register_where_loaded(STRATEGIES)
    return rstd.new_empty((*rstd.shape, *([2] if mean is not None else [])))


def _grad_apply_of(arguments: tuple) -> tuple:
    """(dy, dsum, what grad_sums read, dots, the tensors of the spec, call, needs)."""
    dy, dsum, *read, dots = arguments[:9]
    end = 9 + _FIELDS
    dims, added, mask, *backend = arguments[end:]
    call = call_of((*arguments[9:end], dims, *backend))
    tensors = Tensors(dy, read[0] if added else None, *read[1:4])
    needs = merged_needs(Tensors(*map(dtype_of, tensors)), dsum is not None, tuple(mask))
    return dy, dsum, read, dots, tensors, call, needs


def grad_apply(*arguments) -> tuple[Tensor, ...]:
    dy, dsum, read, dots, tensors, call, needs = _grad_apply_of(arguments)
    saved, spec = _saved(*read), call.spec(tensors)
    if dots is not None:
        dots = dots.reshape(saved.rstd.numel(), 1 if saved.mean is None else 2)
    grads = call.run("grad_apply", spec, dy, needs, dy, dsum, saved, dots)
    return tuple(dy.new_empty(0) if g is None else g for g in grads)


def grad_apply_fake(*arguments) -> tuple[Tensor, ...]:
    register_where_loaded(STRATEGIES)
    dy, _, read, _, _, _, needs = _grad_apply_of(arguments)
    likes = zip(needs.gradients, (dy, *read[:4]), strict=True)
    return tuple(like.new_empty(like.shape) if need else dy.new_empty(0) for need, like in likes)


for schema, op, fake in zip(
    SCHEMAS,
    (row_sums, row_center, row_apply, grad_sums, grad_apply),
    (row_sums_fake, row_center_fake, row_apply_fake, grad_sums_fake, grad_apply_fake),
    strict=True,
):
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(op.__name__, op, key)
    torch.library.register_fake(f"tilenorm::{op.__name__}", fake, lib=LIBRARY)
