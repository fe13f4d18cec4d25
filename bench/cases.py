"""What is measured, as data: operations, with what they read and write, and suites of shapes.

A new operation is one more ``Op`` in ``OPS``; nothing else here or in the harness knows its name.
"""

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
DIRECTIONS = ("forward", "backward")


class Traffic(NamedTuple):
    """Tensors that the mathematics moves: of shape (M, N), and of shape (N,)."""

    rows: int
    columns: int


@dataclass(frozen=True)
class Op:
    """An operation on (M, N) inputs ``rows`` and (N,) inputs ``columns``, passed in that order.

    ``forward`` and ``backward`` count each input once and each output once, the same for every
    provider and without anybody's workspace. ``reference`` is differentiable PyTorch, run in
    float64 as the oracle; ``eager`` is what PyTorch itself offers.
    """

    name: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    outputs: tuple[str, ...]
    forward: Traffic
    backward: Traffic
    reference: Callable
    eager: Callable

    def bytes(self, direction: str, m: int, n: int, itemsize: int) -> int:
        """Bytes moved by one call."""
        traffic = self.forward if direction == "forward" else self.backward
        return (traffic.rows * m * n + traffic.columns * n) * itemsize

    def inputs(self, m: int, n: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
        """Random inputs, the same at every call.

        Weights lie in [0.25, 0.75]: a backward that overwrites the gradient it is given, as
        Liger's does, is repeated on its own result, which must not overflow.
        """
        make = torch.Generator(device).manual_seed(m * n + n)
        like = {"generator": make, "dtype": torch.float32, "device": device}
        rows = [torch.randn(m, n, **like).to(dtype) for _ in self.rows]
        columns = [(0.25 + 0.5 * torch.rand(n, **like)).to(dtype) for _ in self.columns]
        return rows + columns

    def output_grads(self, m: int, n: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
        """Random gradients of the outputs, the same at every call."""
        make = torch.Generator(device).manual_seed(m * n + n + 1)
        return [torch.randn(m, n, generator=make, device=device).to(dtype) for _ in self.outputs]


def _rms_norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def _eager_rms_norm(x, weight):
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


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
        """The same case with at most ``elements`` elements, by taking fewer rows."""
        return replace(self, m=max(1, min(self.m, elements // self.n)))


def _sweep(elements: int, hidden: tuple[int, ...], dtypes=tuple(DTYPES)) -> tuple[Case, ...]:
    return tuple(
        Case(op, dtype, elements // n, n) for op in OPS for dtype in dtypes for n in hidden
    )


_MI = 1 << 20
_FULL = (256, 512, 1024, 1536, 2048, 3072, 4096, 5120, 7168, 8192, 12288, 16384, 32768, 65536)

SUITES = {
    # Few shapes, since torch.compile and some peers spend seconds of compiling on each.
    "quick": _sweep(16 * _MI, (1024, 4096, 8192, 16384), ("bfloat16",))
    + _sweep(16 * _MI, (4096,), ("float16", "float32")),
    "seeds": tuple(
        Case(op, dtype, 4096, n)
        for op in OPS
        for dtype in DTYPES
        for n in (1024, 2048, 4096, 8192, 16384)
    ),
    "full": _sweep(64 * _MI, (*_FULL, 131072)),
}


def select(suite: str, ops=None, dtypes=None, hidden=None) -> list[Case]:
    """The cases of a suite, narrowed to the given names and sizes where these are given."""
    return [
        case
        for case in SUITES[suite]
        if (not ops or case.op in ops)
        and (not dtypes or case.dtype in dtypes)
        and (not hidden or case.n in hidden)
    ]
