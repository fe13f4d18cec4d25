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

    LAYER: the mean is subtracted. ADD: the input is x + residual; with ADDEND it is (x + addend) +
    residual. GATED: act(gate) multiplies the normalised rows, or, with GATE_FIRST, the rows before
    they are normalised; act is silu, or, with SIGMOID, the sigmoid. WEIGHT, BIAS: the array is
    there. OFFSET is added to the weight. EARLY: x̂ is rounded to y's dtype before the weight, and
    so is its product with a weight of that dtype. SKIP: y is skip + the normalised rows, which are
    rounded to x's dtype first, as EARLY rounds x̂. DROPOUT: before the sum x is x · mask ·
    DROPOUT_SCALE. LAYER_SCALE: then it is multiplied by a vector. SAVE: mean and rstd are written.
    EARLY is for y, and SAVE for the forward pass. QUANT: a Quant as a tuple, or (). INNER: the
    constants of the norm of x that is added to the residual in place of x, as a tuple, or ().
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
    ADDEND: bool
    SKIP: bool
    DROPOUT: bool
    DROPOUT_SCALE: float
    LAYER_SCALE: bool
    QUANT: tuple
    INNER: tuple

    @property
    def BRANCHES(self):
        """Whether x is masked or scaled before it is added to the residual."""
        return self.DROPOUT or self.LAYER_SCALE

    @property
    def GATE_AFTER(self):
        return self.GATED and not self.GATE_FIRST

    @property
    def PEAKS(self):
        """Whether blocks that share a row have to know its largest y."""
        return Quant(*self.QUANT).BY_ROW

    @property
    def OUTPUT(self):
        """Whether y itself is written."""
        return True if len(self.QUANT) == 0 else Quant(*self.QUANT).OUTPUT


@dataclass(frozen=True)
class Quant:
    """How y is quantised.

    MOST: the largest number of q's dtype. GROUP: so many elements of a row share a scale; 0 where a
    row has one. GIVEN: the caller gives the one scale of all rows. MX: scales are powers of two, as
    bytes, rounded up. POWER_OF_2: factors are powers of two, rounded down. PADDED: 0 where the
    scales of a row follow each other; else those of a group do, and each group has as many as there
    are rows, rounded up to a multiple of PADDED. SWIZZLED: scales lie in tiles of 128 rows and 4
    groups. OUTPUT: y is written too. AMAX: so is the largest magnitude of all y. PACKED: y stays in
    16 bits while the largest magnitude of a row is found, and is converted to float32 twice.
    """

    MOST: float
    GROUP: int
    GIVEN: bool
    MX: bool
    POWER_OF_2: bool
    PADDED: int
    SWIZZLED: bool
    OUTPUT: bool
    AMAX: bool
    PACKED: bool

    @property
    def BY_ROW(self):
        return self.GROUP == 0 and not self.GIVEN


@dataclass(frozen=True)
class Needs:
    """Which gradients are written. DSUM: a gradient of the sum with the residual comes in. TERMS:
    how many arrays add up to dy. OUTPUT: y is written once more.
    """

    DX: bool
    DW: bool
    DB: bool
    DRESIDUAL: bool
    DGATE: bool
    DSUM: bool
    TERMS: int
    OUTPUT: bool


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

    @property
    def STORE(self):
        return False


@dataclass(frozen=True)
class StreamHow:
    """How stream_forward works.

    TMA: rows are read by tile loads, not by gathers. STORE: rows are written by tile stores.
    """

    TMA: bool
    STORE: bool

    @property
    def PACKED(self):
        return False


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
