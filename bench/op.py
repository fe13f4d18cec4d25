"""A measured operation: its tensors, the bytes that it has to move, and random inputs; and the
norms as a PyTorch model calls them. In float64 they are the oracle, too.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tilenorm import table
from tilenorm.launch.calls import Sizes
from tilenorm.spec import NormSpec
from tilenorm.tools.specs import moved_bytes

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
EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """One shape of one operation in one dtype, with plain values that a record can hold.

    ``m``: the rows. ``groups``: how many groups of rows share a row of what lies by group.
    """

    op: str
    dtype: str
    m: int
    n: int
    groups: int = 1

    @property
    def shape(self) -> dict:
        """The fields that every kind of line has."""
        return {"op": self.op, "dtype": self.dtype, "m": self.m, "n": self.n}


@dataclass(frozen=True)
class Op:
    """An operation on M rows of N elements, whose arguments are rows, columns and groups in order.

    ``eager`` is the code of a PyTorch model. The inputs ``rows`` have the shape (M, N), and the
    parameters ``columns`` the shape (N,). With ``heads``, the parameters have the shape (heads, N)
    and the inputs the shape (M / heads, heads, N). Each input is then the first third of a fused
    projection of shape (M / heads, 3, heads, N), as the queries of attention are, so there are gaps
    between tokens. With parameters ``by_group``, which have the shape (groups, N), the inputs have
    the shape (groups, M / groups, N). These parameters are chunks of one projection.

    The first word of ``name`` is the op of tilenorm's table, which says what bytes it moves.
    """

    name: str
    eager: Callable
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    outputs: tuple[str, ...]
    by_group: tuple[str, ...] = ()
    heads: int = 0
    key_heads: int = 0

    directions = (*DIRECTIONS, INFERENCE)
    coded: ClassVar[float | None] = None

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*self.rows, *self.columns, *self.by_group)

    @property
    def trained(self) -> tuple[str, ...]:
        """The inputs that have a gradient."""
        return self.inputs

    @property
    def reference(self) -> Callable:
        """What is true in float64."""
        return self.eager

    @property
    def unit(self) -> int:
        """How many rows stand together."""
        return self.heads + self.key_heads or 1

    @property
    def axis(self) -> int:
        """A dimension of the inputs along which they can be cut; parameters stay whole."""
        return 1 if self.by_group else 0

    def cut(self, name: str, tensor: Tensor, start: int, count: int) -> Tensor:
        """Rows of an input, or a parameter."""
        return tensor.narrow(self.axis, start, count) if name in self.rows else tensor

    def shrunk(self, case: Case, elements: int) -> Case:
        """The same case with fewer rows, so that it has at most ``elements`` elements.

        At least one row is left, or one row for each head or group.
        """
        least = self.unit * case.groups
        return replace(case, m=max(least, min(case.m, elements // case.n) // least * least))

    def decoded(self, outputs: tuple[Tensor, ...], inputs: list[Tensor]) -> tuple[Tensor, ...]:
        """The outputs as the reference has them."""
        return outputs

    def small(self, n: int) -> Case:
        """A shape that a GPU finishes before the host has prepared the next call."""
        return Case(self.name, "bfloat16", 1024 if self.by_group else 32 * self.unit, n)

    def shapes(self, case: Case) -> dict[str, tuple[int, ...]]:
        """The shape of every input and output, by its name."""
        m, n, row = case.m, case.n, (case.m, case.n)
        if self.heads:
            row = m // self.heads, self.heads, n
        elif self.by_group:
            row = case.groups, m // case.groups, n
        by_name = dict.fromkeys((*self.rows, *self.outputs), row)
        by_name |= dict.fromkeys(self.columns, (self.heads, n) if self.heads else (n,))
        return by_name | dict.fromkeys(self.by_group, (case.groups, n))

    def spec(self, case: Case, **fields) -> NormSpec:
        """The norm, or the chain of norms, as tilenorm describes it. fields: more of NormSpec's."""
        row = table.OPS[self.name.split()[0].removeprefix("head_")]
        affine = {name: case.dtype for name in self.columns if not name.startswith("next_")}
        if row.calls:
            return NormSpec.chained(
                *[NormSpec.of(stage.op, case.n, case.dtype, **affine) for stage in row.calls]
            )
        for port in row.takes:
            if port.dims == table.MOD_SCALE.dims and port.name in self.by_group:
                fields[port.role] = case.dtype
        if self.by_group and "residual" in self.rows:
            fields["residual"] = case.dtype
        return NormSpec.of(row.name, case.n, case.dtype, heads=self.heads, **affine, **fields)

    def sizes(self, case: Case) -> Sizes | None:
        """Of heads that are rotated, how many there are."""
        return None

    def bytes(self, direction: str, case: Case) -> int:
        """The bytes that one call has to read and write, the same for every provider.

        A forward reads every input and writes every output once. A backward reads the gradients of
        the outputs and what is saved, and writes the gradients of the inputs.
        """
        groups = case.groups if self.by_group else 0
        moved = moved_bytes(self.spec(case), case.m, 1, self.sizes(case), groups)
        return moved[direction == "backward"]

    def made(self, case: Case, device: str) -> list[Tensor]:
        """Random inputs, equal at every call, with requires_grad where they have a gradient.

        Weights, and 1 + scale, lie in [0.25, 0.75]. The backward of Liger overwrites the gradient
        that it is given, so a repeated backward runs on its own result, which must not overflow.
        """
        make = torch.Generator(device).manual_seed(case.m * case.n + case.n)
        like: dict[str, Any] = {"generator": make, "dtype": torch.float32, "device": device}
        dtype, shapes, tensors = DTYPES[case.dtype], self.shapes(case), []
        for name in self.rows:
            first, *others = shapes[name]
            fused = first, 3 if self.heads else 1, *others
            tensors.append(torch.randn(fused, **like).to(dtype)[:, 0])
        for name in self.columns:
            tensors.append((0.25 + 0.5 * torch.rand(shapes[name], **like)).to(dtype))
        if self.by_group:
            projected = torch.rand(case.groups, 6 * case.n, **like) * 0.5 - 0.75
            tensors += projected.to(dtype).chunk(6, -1)[: len(self.by_group)]
        return [x.requires_grad_() for x in tensors]

    def output_grads(self, case: Case, device: str) -> list[Tensor]:
        """Random gradients of the outputs, equal at every call."""
        make = torch.Generator(device).manual_seed(case.m * case.n + case.n + 1)
        shapes, dtype = self.shapes(case), DTYPES[case.dtype]
        return [
            torch.randn(shapes[name], generator=make, device=device).to(dtype)
            for name in self.outputs
        ]


def rms_norm(x, weight=None):
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def layer_norm(x, weight=None, bias=None):
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def head_rms_norm(x, weight):
    # F.rms_norm takes only weights of the normalised shape.
    return rms_norm(x) * weight


def of_sum(norm: Callable) -> Callable:
    """A function that returns the norm of x + residual, and x + residual."""

    def add_norm(x, residual, *parameters):
        total = x + residual
        return norm(total, *parameters), total

    return add_norm
