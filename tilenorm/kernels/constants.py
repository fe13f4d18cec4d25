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
    """What is computed, beyond what follows from the arrays that are given (arrays.py).

    LAYER: the mean is subtracted. GATE_FIRST: act(gate) multiplies the rows before they are
    normalised, and not the normalised rows; act is silu, or, with SIGMOID, the sigmoid. OFFSET is
    added to the weight. EARLY: x̂ is rounded to y's dtype before the weight, and so is its product
    with a weight of that dtype. DROPOUT_SCALE: of a mask. QUANT: a Quant as a tuple, or (). INNER:
    the constants of the norm of x that is added to the residual in place of x, as a tuple, or ().
    """

    LAYER: bool
    GATE_FIRST: bool
    OFFSET: float
    EARLY: bool
    SIGMOID: bool
    DROPOUT_SCALE: float
    QUANT: tuple
    INNER: tuple


@dataclass(frozen=True)
class Quant:
    """How y is quantised.

    MOST: the largest number of q's dtype. GROUP: so many elements of a row share a scale; 0 where a
    row has one. GIVEN: the caller gives the one scale of all rows. MX: scales are powers of two, as
    bytes, rounded up. POWER_OF_2: factors are powers of two, rounded down. PADDED: 0 where the
    scales of a row follow each other; else those of a group do, and each group has as many as there
    are rows, rounded up to a multiple of PADDED. SWIZZLED: scales lie in tiles of 128 rows and 4
    groups. PACKED: y stays in 16 bits while the largest magnitude of a row is found, and is
    converted to float32 twice.
    """

    MOST: float
    GROUP: int
    GIVEN: bool
    MX: bool
    POWER_OF_2: bool
    PADDED: int
    SWIZZLED: bool
    PACKED: bool

    @property
    def BY_ROW(self):
        return self.GROUP == 0 and not self.GIVEN


@dataclass(frozen=True)
class Grouped:
    """The sums of a backward pass by group (group_backward.py).

    A, B, C: which sums by group are needed. DW, DB: whether PARTIALS gets dW and dB. WHOLE: no
    group is shared by blocks.
    """

    A: bool
    B: bool
    C: bool
    DW: bool
    DB: bool
    WHOLE: bool


@dataclass(frozen=True)
class Rope:
    """Which elements of a head are rotated, and how heads are cut into tiles (rotation.py).

    HEAD: D, the elements of a head. HALF: half of the number that is rotated. PAIRS: elements 2i
    and 2i + 1 are rotated into each other, not i and i + HALF. FULL: cos and sin have a column for
    each rotated element, not one for two. ALIGNED: heads, halves and tables are whole vectors of 16
    bytes. WIDTH: columns of a tile, a power of two, at least HALF. ROWS: rows of a tile. TILES: how
    many tiles a block has at once. WHOLE: (), or, where a norm spans all heads of a token, how many
    heads the input has, and the key.
    """

    HEAD: int
    HALF: int
    PAIRS: bool
    FULL: bool
    ALIGNED: bool
    WIDTH: int
    ROWS: int
    TILES: int
    WHOLE: tuple

    def spanned(self, NUMBER):
        """How many heads a norm of the input (0) or of the key (1) spans; 0 where it spans one."""
        return self.WHOLE[NUMBER] if len(self.WHOLE) > 0 else 0


@dataclass(frozen=True)
class How:
    """How a schedule works. Each reads what concerns it.

    PACKED: 16-bit inputs stay in 16 bits over the sums, and are converted a second time. TMA: rows
    are read by tile loads, not by gathers. STORE: rows are written by tile stores.

    FETCH: weight and bias are read with the row, not after its sums. TOGETHER: else the weights of
    so many segments are read at once. THREADS: of a block in a forward pass that
    prescribes the order of its sums, else 0. REREAD: the weight is read again for every tile, and
    dx is written last, which saves registers.

    Where blocks share a row, PADDED_CHUNKS is the power of two that holds the chunks of a row.
    POLLS: how often a block asks for the numbers of the others before it computes them itself.
    OVERLAP: the kernel starts before the one that empties the slots has ended.
    """

    PACKED: bool = False
    TMA: bool = False
    STORE: bool = False
    FETCH: bool = False
    TOGETHER: int = 1
    THREADS: int = 0
    REREAD: bool = False
    PADDED_CHUNKS: int = 0
    POLLS: int = 0
    OVERLAP: bool = False
