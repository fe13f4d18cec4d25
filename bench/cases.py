"""What is measured, as data: operations, with what they read and write, and suites of shapes.

A new operation is one more ``Op`` in ``OPS``; nothing else here or in the harness knows its name.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

EPS = 1e-6
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
# What a suite measures if nothing is asked for, shown in GB/s, and what is shown in µs: a forward
# without grad, as a decode step has it, and a forward with its backward, as a training step.
DIRECTIONS = ("forward", "backward")
LATENCIES = ("inference", "training")
HOST = "host"  # what a call takes of the host, of one shape


class Traffic(NamedTuple):
    """Tensors that the mathematics moves: of the input's shape, and of the parameters'."""

    rows: int
    columns: int


@dataclass(frozen=True)
class Op:
    """An operation on M rows of N: on inputs ``rows`` and parameters ``columns``, in that order.

    The inputs are (M, N) and the parameters (N,). With ``heads`` each head has parameters of its
    own, (heads, N), and the inputs are (M / heads, heads, N), each the first third of a fused
    projection (M / heads, 3, heads, N), as queries are: there are gaps between the tokens.

    ``forward`` and ``backward`` count each input once and each output once, the same for every
    provider and without anybody's workspace. ``reference`` is differentiable PyTorch, run in
    float64 as the oracle; ``eager`` is what a model in PyTorch does.
    """

    name: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    outputs: tuple[str, ...]
    forward: Traffic
    backward: Traffic
    reference: Callable
    eager: Callable
    heads: int | None = None

    def shapes(self, m: int, n: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape of an input or output, and that of a parameter."""
        if self.heads is None:
            return (m, n), (n,)
        return (m // self.heads, self.heads, n), (self.heads, n)

    def bytes(self, direction: str, m: int, n: int, itemsize: int) -> int:
        """Bytes moved by one call."""
        passes = {"backward": (self.backward,), "training": (self.forward, self.backward)}
        row, column = map(math.prod, self.shapes(m, n))
        return itemsize * sum(
            traffic.rows * row + traffic.columns * column
            for traffic in passes.get(direction, (self.forward,))
        )

    def inputs(self, m: int, n: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
        """Random inputs, the same at every call.

        Weights lie in [0.25, 0.75]: a backward that overwrites the gradient it is given, as
        Liger's does, is repeated on its own result, which must not overflow.
        """
        make = torch.Generator(device).manual_seed(m * n + n)
        like = {"generator": make, "dtype": torch.float32, "device": device}
        row, column = self.shapes(m, n)
        fused = row[0], 1 if self.heads is None else 3, *row[1:]
        rows = [torch.randn(fused, **like).to(dtype)[:, 0] for _ in self.rows]
        columns = [(0.25 + 0.5 * torch.rand(column, **like)).to(dtype) for _ in self.columns]
        return rows + columns

    def output_grads(self, m: int, n: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
        """Random gradients of the outputs, the same at every call."""
        make = torch.Generator(device).manual_seed(m * n + n + 1)
        shape, _ = self.shapes(m, n)
        return [torch.randn(shape, generator=make, device=device).to(dtype) for _ in self.outputs]


def _rms_norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def _layer_norm(x, weight, bias):
    return _rms_norm(x - x.mean(-1, keepdim=True), weight) + bias


def _gated_rms_norm(x, gate, weight):
    return _rms_norm(x, weight) * gate * torch.sigmoid(gate)


def _eager_rms_norm(x, weight):
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def _eager_layer_norm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def _eager_gated_rms_norm(x, gate, weight):
    return F.rms_norm(x, x.shape[-1:], weight, EPS) * F.silu(gate)


def _eager_head_rms_norm(x, weight):
    # PyTorch's own takes weights of the normalised shape alone.
    return F.rms_norm(x, x.shape[-1:], eps=EPS) * weight


def _of_sum(norm: Callable) -> Callable:
    """The norm of x + residual, and that sum."""

    def add_norm(x, residual, *parameters):
        total = x + residual
        return norm(total, *parameters), total

    return add_norm


OPS = {
    op.name: op
    for op in (
        Op(
            name="rms_norm",
            rows=("x",),
            columns=("weight",),
            outputs=("y",),
            forward=Traffic(rows=2, columns=1),  # x, weight -> y
            backward=Traffic(rows=3, columns=2),  # x, dy, weight -> dx, dweight
            reference=_rms_norm,
            eager=_eager_rms_norm,
        ),
        Op(
            name="layer_norm",
            rows=("x",),
            columns=("weight", "bias"),
            outputs=("y",),
            forward=Traffic(rows=2, columns=2),  # x, weight, bias -> y
            backward=Traffic(rows=3, columns=3),  # x, dy, weight -> dx, dweight, dbias
            reference=_layer_norm,
            eager=_eager_layer_norm,
        ),
        Op(
            name="add_rms_norm",
            rows=("x", "residual"),
            columns=("weight",),
            outputs=("y", "sum"),
            forward=Traffic(rows=4, columns=1),  # x, residual, weight -> y, sum
            # sum, dy, dsum, weight -> dx, dweight; dresidual is dx
            backward=Traffic(rows=4, columns=2),
            reference=_of_sum(_rms_norm),
            eager=_of_sum(_eager_rms_norm),
        ),
        Op(
            name="add_layer_norm",
            rows=("x", "residual"),
            columns=("weight", "bias"),
            outputs=("y", "sum"),
            forward=Traffic(rows=4, columns=2),  # x, residual, weight, bias -> y, sum
            # sum, dy, dsum, weight -> dx, dweight, dbias; dresidual is dx
            backward=Traffic(rows=4, columns=3),
            reference=_of_sum(_layer_norm),
            eager=_of_sum(_eager_layer_norm),
        ),
        Op(
            name="gated_rms_norm",
            rows=("x", "gate"),
            columns=("weight",),
            outputs=("y",),
            forward=Traffic(rows=3, columns=1),  # x, gate, weight -> y
            backward=Traffic(rows=5, columns=2),  # x, gate, dy, weight -> dx, dgate, dweight
            reference=_gated_rms_norm,
            eager=_eager_gated_rms_norm,
        ),
        Op(
            name="head_rms_norm",
            rows=("x",),
            columns=("weight",),
            outputs=("y",),
            forward=Traffic(rows=2, columns=1),  # x, weight -> y
            backward=Traffic(rows=3, columns=2),  # x, dy, weight -> dx, dweight
            reference=_rms_norm,
            eager=_eager_head_rms_norm,
            heads=32,
        ),
    )
}


@dataclass(frozen=True)
class Case:
    """One shape of one operation in one dtype, all by name so that it can be written down."""

    op: str
    dtype: str
    m: int
    n: int

    def shrunk(self, elements: int) -> "Case":
        """The same case with at most ``elements`` elements, by taking fewer rows, but at least
        one, or one a head."""
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
_POWERS = tuple(1 << k for k in range(8, 19))
_FULL = tuple(sorted((*_POWERS, 1536, 3072, 5120, 7168, 12288, 20480, 49152)))

SUITES = {
    # Few shapes, since torch.compile and some peers spend seconds of compiling on each.
    "quick": _sweep(16 * _MI, ("rms_norm",), (1024, 4096, 16384), ("bfloat16",))
    + _sweep(16 * _MI, ("rms_norm",), (4096,), ("float32",))
    + _sweep(16 * _MI, ("layer_norm",), (4096,), ("float16",))
    + _sweep(16 * _MI, (*_PLAIN[2:], "gated_rms_norm"), (4096,), ("bfloat16",))
    + _sweep(16 * _MI, ("head_rms_norm",), (128,), ("bfloat16",)),
    # Published sweeps: RMSNorm at 4096 rows, and that of Triton's LayerNorm tutorial.
    "seeds": _of_4096_rows("rms_norm", (1024, 2048, 4096, 8192, 16384))
    + _of_4096_rows("layer_norm", range(1024, 15872 + 1, 512), ("float16",)),
    "full": _sweep(64 * _MI, _PLAIN, _FULL)
    + _sweep(64 * _MI, ("gated_rms_norm",), (128, 1024, 4096, 8192))
    + _sweep(64 * _MI, ("head_rms_norm",), (32, 64, 128, 256, 512)),
    # Decoding and short batches.
    "latency": tuple(
        Case(op, "bfloat16", 1 << k, n)
        for op in _PLAIN[:3]
        for n in (2048, 4096, 8192, 16384)
        for k in range(10)
    ),
    # One norm of Llama 3 8B, on 8 sequences of 4096 tokens.
    "layer": (Case("rms_norm", "bfloat16", 8 * 4096, 4096),),
}
SUITE_DIRECTIONS = {"latency": ("inference",), "layer": ("training",)}


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
