"""The measured operations and the suites of shapes, as data.

A new operation is one more ``Op`` in ``OPS`` and one line in each provider that has it. The rest of
the bench does not know the operations' names.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from bench import formulas

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
# These directions are shown in GB/s. A suite measures them unless it has other directions.
DIRECTIONS = ("forward", "backward")
# This direction is shown as a time: a forward without grad, as in a decode step.
INFERENCE = "inference"
# The time that the host needs for a call, measured on one shape.
HOST = "host"


class Traffic(NamedTuple):
    """How many tensors the mathematics reads and writes.

    ``rows`` counts tensors of the input's shape, and ``columns`` counts tensors of the parameters'
    shape.
    """

    rows: int
    columns: int


class Norm(NamedTuple):
    """``reference`` is differentiable PyTorch code, which runs in float64 as the oracle.

    ``eager`` is the code of a PyTorch model.
    """

    columns: tuple[str, ...]
    reference: Callable
    eager: Callable


@dataclass(frozen=True)
class Op:
    """An operation on M rows of N elements. Its arguments are ``rows`` and then ``columns``.

    The inputs ``rows`` have the shape (M, N), and the parameters ``columns`` have the shape (N,).
    With ``heads``, the parameters have the shape (heads, N) and the inputs have the shape
    (M / heads, heads, N). Each input is then the first third of a fused projection of shape
    (M / heads, 3, heads, N), as the queries of attention are, so there are gaps between tokens.

    A forward reads every input and writes every output once. ``backward`` counts what the
    mathematics of the gradients reads and writes. The counts are the same for every provider and
    contain no workspace. ``form`` makes the op's function from the norm's.
    """

    name: str
    norm: Norm
    form: Callable[[Callable], Callable]
    rows: tuple[str, ...]
    outputs: tuple[str, ...]
    backward: Traffic
    heads: int | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        return self.norm.columns

    @property
    def reference(self) -> Callable:
        return self.form(self.norm.reference)

    @property
    def eager(self) -> Callable:
        return self.form(self.norm.eager)

    @property
    def forward(self) -> Traffic:
        return Traffic(len(self.rows) + len(self.outputs), len(self.columns))

    def shapes(self, m: int, n: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape of an input or output, and the shape of a parameter."""
        if self.heads is None:
            return (m, n), (n,)
        return (m // self.heads, self.heads, n), (self.heads, n)

    def bytes(self, direction: str, m: int, n: int, itemsize: int) -> int:
        """The bytes that one call has to read and write."""
        traffic = self.backward if direction == "backward" else self.forward
        row, column = map(math.prod, self.shapes(m, n))
        return itemsize * (traffic.rows * row + traffic.columns * column)

    def inputs(self, m: int, n: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
        """Random inputs, equal at every call.

        Weights lie in [0.25, 0.75]. The backward of Liger overwrites the gradient that it is given,
        so a repeated backward runs on its own result, and that result must not overflow.
        """
        make = torch.Generator(device).manual_seed(m * n + n)
        like: dict[str, Any] = {"generator": make, "dtype": torch.float32, "device": device}
        row, column = self.shapes(m, n)
        fused = row[0], 1 if self.heads is None else 3, *row[1:]
        rows = [torch.randn(fused, **like).to(dtype)[:, 0] for _ in self.rows]
        columns = [(0.25 + 0.5 * torch.rand(column, **like)).to(dtype) for _ in self.columns]
        return rows + columns

    def output_grads(self, m: int, n: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
        """Random gradients of the outputs, equal at every call."""
        make = torch.Generator(device).manual_seed(m * n + n + 1)
        shape, _ = self.shapes(m, n)
        return [torch.randn(shape, generator=make, device=device).to(dtype) for _ in self.outputs]


RMS = Norm(("weight",), formulas.rms_norm, formulas.eager_rms_norm)
LAYER = Norm(("weight", "bias"), formulas.layer_norm, formulas.eager_layer_norm)
HEADS = Norm(("weight",), formulas.rms_norm, formulas.eager_head_rms_norm)

OPS = {
    op.name: op
    for op in (
        # x, dy, weight -> dx, dweight, dbias if there is a bias
        Op("rms_norm", RMS, formulas.alone, ("x",), ("y",), Traffic(3, 2)),
        Op("layer_norm", LAYER, formulas.alone, ("x",), ("y",), Traffic(3, 3)),
        # sum, dy, dsum, weight -> dx, dweight, dbias; dresidual equals dx
        Op("add_rms_norm", RMS, formulas.of_sum, ("x", "residual"), ("y", "sum"), Traffic(4, 2)),
        Op(
            "add_layer_norm", LAYER, formulas.of_sum, ("x", "residual"), ("y", "sum"), Traffic(4, 3)
        ),
        # x, dy, weight -> dx, dweight, dbias; dskip is dy
        Op("rms_norm_add", RMS, formulas.added_to, ("x", "skip"), ("y",), Traffic(3, 2)),
        Op("layer_norm_add", LAYER, formulas.added_to, ("x", "skip"), ("y",), Traffic(3, 3)),
        # x, gate, dy, weight, bias -> dx, dgate, dweight, dbias
        Op("gated_rms_norm", RMS, formulas.gated, ("x", "gate"), ("y",), Traffic(5, 2)),
        Op("gated_layer_norm", LAYER, formulas.gated, ("x", "gate"), ("y",), Traffic(5, 4)),
        Op("head_rms_norm", HEADS, formulas.alone, ("x",), ("y",), Traffic(3, 2), heads=32),
    )
}


@dataclass(frozen=True)
class Case:
    """One shape of one operation in one dtype, with plain values that a record can hold."""

    op: str
    dtype: str
    m: int
    n: int

    def shrunk(self, elements: int) -> "Case":
        """The same case with fewer rows, so that it has at most ``elements`` elements.

        At least one row is left, or one row for each head.
        """
        heads = OPS[self.op].heads or 1
        return replace(self, m=max(heads, min(self.m, elements // self.n) // heads * heads))


def _sweep(elements: int, ops, hidden, dtypes=tuple(DTYPES)) -> tuple[Case, ...]:
    return tuple(
        Case(op, dtype, elements // n, n) for op in ops for dtype in dtypes for n in hidden
    )


def _of_4096_rows(op: str, hidden, dtypes=tuple(DTYPES)) -> tuple[Case, ...]:
    return tuple(Case(op, dtype, 4096, n) for dtype in dtypes for n in hidden)


_MI = 1 << 20
_PLAIN = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")
_AFTER, _GATED = ("rms_norm_add", "layer_norm_add"), ("gated_rms_norm", "gated_layer_norm")
_POWERS = tuple(1 << k for k in range(8, 19))
_FULL = tuple(sorted((*_POWERS, 1536, 3072, 5120, 7168, 12288, 20480, 49152)))

SUITES = {
    # Few shapes, because torch.compile and some peers compile for seconds on each shape.
    "quick": _sweep(16 * _MI, ("rms_norm",), (1024, 4096, 16384), ("bfloat16",))
    + _sweep(16 * _MI, ("rms_norm",), (4096,), ("float32",))
    + _sweep(16 * _MI, ("layer_norm",), (4096,), ("float16",))
    + _sweep(16 * _MI, (*_PLAIN[2:], *_AFTER, *_GATED), (4096,), ("bfloat16",))
    + _sweep(16 * _MI, ("head_rms_norm",), (128,), ("bfloat16",)),
    # Published sweeps: RMSNorm on 4096 rows, and the sweep of Triton's LayerNorm tutorial.
    "seeds": _of_4096_rows("rms_norm", (1024, 2048, 4096, 8192, 16384))
    + _of_4096_rows("layer_norm", range(1024, 15872 + 1, 512), ("float16",)),
    "full": _sweep(64 * _MI, _PLAIN, _FULL)
    + _sweep(64 * _MI, (*_AFTER, *_GATED), (128, 1024, 4096, 8192))
    + _sweep(64 * _MI, ("head_rms_norm",), (32, 64, 128, 256, 512)),
    # Decode steps and small batches.
    "latency": tuple(
        Case(op, "bfloat16", 1 << k, n)
        for op in _PLAIN[:3]
        for n in (2048, 4096, 8192, 16384)
        for k in range(10)
    ),
}
SUITE_DIRECTIONS = {"latency": (INFERENCE,)}


def select(suite: str, ops=None, dtypes=None, hidden=None) -> list[Case]:
    """The cases of a suite, or only those with the given names and sizes.

    The cases are in the order of ``hidden`` if it is given, with all ops and dtypes of an N side by
    side: a run that is cut off has then measured the first sizes completely.
    """
    cases = [
        case
        for case in SUITES[suite]
        if (not ops or case.op in ops)
        and (not dtypes or case.dtype in dtypes)
        and (not hidden or case.n in hidden)
    ]
    return sorted(cases, key=lambda case: hidden.index(case.n)) if hidden else cases
