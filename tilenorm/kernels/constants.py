"""What a kernel is compiled for: its constants in groups.

A kernel's parameter cannot be a dataclass, so the host passes each group as a tuple, and the kernel
reads it back: `norm = Norm(*NORM)`. The annotation names the group: `NORM: Constants[Norm]`.
"""

from dataclasses import dataclass
from typing import Annotated

import cuda.tile as ct


class Constants:
    """The annotation of a parameter that is a group of compile-time constants."""

    def __class_getitem__(cls, group: type):
        return Annotated[ct.Constant[tuple], group]


@dataclass(frozen=True)
class Norm:
    """What is computed.

    LAYER: the mean is subtracted. ADD: the input is x + residual. GATED: act(gate) multiplies the
    normalised rows, or, with GATE_FIRST, the rows before they are normalised; act is silu, or, with
    SIGMOID, the sigmoid. WEIGHT, BIAS: the
    array is there. OFFSET is added to the weight. EARLY: x̂ is rounded to y's dtype before the
    weight, and so is its product with a weight of that dtype. SAVE: mean and rstd are written.
    EARLY and SAVE are for the forward pass alone.
    """

    LAYER: bool
    ADD: bool
    GATED: bool
    GATE_FIRST: bool
    WEIGHT: bool
    BIAS: bool
    OFFSET: float
    EARLY: bool
    SAVE: bool
    SIGMOID: bool

    @property
    def GATE_AFTER(self):
        return self.GATED and not self.GATE_FIRST


@dataclass(frozen=True)
class Needs:
    """Which gradients are written. DSUM: a gradient of the sum with the residual comes in."""

    DX: bool
    DW: bool
    DB: bool
    DRESIDUAL: bool
    DGATE: bool
    DSUM: bool


@dataclass(frozen=True)
class RowHow:
    """How row_forward works.

    PACKED: 16-bit inputs stay in 16 bits over the sums, and are converted a second time. FETCH:
    weight and bias are read with the row, not after its sums. ORDERED: the kernel prescribes the
    order of every sum, so that variants which differ in PACKED, FETCH and Norm.SAVE give the same
    bits.
    """

    PACKED: bool
    FETCH: bool
    ORDERED: bool


@dataclass(frozen=True)
class StreamHow:
    """How stream_forward works.

    TMA: rows are read by tile loads, not by gathers. STORE: rows are written by tile stores.
    """

    TMA: bool
    STORE: bool


@dataclass(frozen=True)
class SharedHow:
    """How shared_forward works.

    PACKED: as in RowHow. TOGETHER: the weights of so many segments are read at once.
    PADDED_CHUNKS: the power of two that holds the chunks of a row. POLLS: how often a block asks
    for the numbers of the others before it computes them itself. OVERLAP: the kernel starts before
    the one that empties the slots has ended.
    """

    PACKED: bool
    TOGETHER: int
    PADDED_CHUNKS: int
    POLLS: int
    OVERLAP: bool


@dataclass(frozen=True)
class BackwardHow:
    """How norm_backward works.

    REREAD: the weight is read again for every tile, and dx is written last, which saves registers.
    The others are as in StreamHow and SharedHow.
    """

    TMA: bool
    STORE: bool
    PACKED: bool
    REREAD: bool
    PADDED_CHUNKS: int
    POLLS: int
    OVERLAP: bool
