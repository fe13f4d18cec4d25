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
    """What is computed, as far as the arrays that a kernel gets do not tell (arrays.py)."""

    LAYER: bool  # a LayerNorm: the mean is subtracted
    # act(gate) multiplies the rows before they are normalised, and not the normalised rows.
    GATE_FIRST: bool
    OFFSET: float  # is added to the weight
    # x̂ is rounded to y's dtype before the weight multiplies it. The product is rounded too where
    # the weight has that dtype.
    EARLY: bool
    SIGMOID: bool  # act is the sigmoid, not silu
    DROPOUT_SCALE: float  # multiplies the dropout mask
    QUANT: tuple  # a Quant as a tuple; () where y is not quantised
    # The Norm, as a tuple, of x before it is added to the residual; () where x itself is added.
    INNER: tuple


@dataclass(frozen=True)
class Quant:
    """How y is quantised."""

    MOST: float  # the largest number of q's dtype
    GROUP: int  # how many elements of a row share a scale; 0 where a whole row does
    GIVEN: bool  # the caller gives the one scale of all rows
    MX: bool  # scales are powers of two, rounded up, and stored as bytes
    POWER_OF_2: bool  # factors are powers of two, rounded down
    # 0: the scales of a row lie side by side. Otherwise the scales of a column of groups do, and
    # each column has as many as there are rows, rounded up to a multiple of PADDED.
    PADDED: int
    SWIZZLED: bool  # scales lie in tiles of 128 rows and 4 groups
    # y stays in 16 bits while the largest magnitude of a row is found, and is then converted to
    # float32 a second time.
    PACKED: bool

    @property
    def BY_ROW(self):
        return self.GROUP == 0 and not self.GIVEN


@dataclass(frozen=True)
class Grouped:
    """Which sums a backward pass by group makes (group_backward.py)."""

    A: bool  # Σ dy · x̂ of each group
    B: bool  # Σ dy of each group
    C: bool  # Σ ds · x of each group
    DW: bool  # PARTIALS gets dW
    DB: bool  # PARTIALS gets dB
    WHOLE: bool  # no two blocks have rows of the same group


@dataclass(frozen=True)
class Rope:
    """Which elements of a head are rotated, and how heads are cut into tiles (rotation.py)."""

    HEAD: int  # D, the elements of a head
    HALF: int  # half of the elements that are rotated
    PAIRS: bool  # elements 2i and 2i + 1 are rotated into each other, not i and i + HALF
    FULL: bool  # cos and sin have a column for each rotated element, not one for two
    ALIGNED: bool  # heads, halves of heads and tables are whole vectors of 16 bytes
    WIDTH: int  # columns of a tile: a power of two, at least HALF
    ROWS: int  # rows of a tile
    TILES: int  # how many tiles a block has at once
    # Where a norm spans all heads of a token: how many heads the input has, and the key. Else ().
    WHOLE: tuple

    def spanned(self, NUMBER):
        """How many heads a norm of the input (0) or of the key (1) spans; 0 where it spans one."""
        return self.WHOLE[NUMBER] if len(self.WHOLE) > 0 else 0


@dataclass(frozen=True)
class How:
    """How a schedule works. Each schedule reads the fields that concern it."""

    # Inputs of 16 bits stay in 16 bits over the sums, and are then converted a second time.
    PACKED: bool = False
    TMA: bool = False  # rows are read by tile loads, not by gathers
    STORE: bool = False  # rows are written by tile stores, not by scatters
    FETCH: bool = False  # weight and bias are read with the row, not after its sums
    TOGETHER: int = 1  # without FETCH: of how many segments the weights are read at once
    BY_ROWS: bool = False  # each row of a tile reads weight and bias, see outputs.columns_of
    # The threads of a block, where a pass prescribes the order of its sums; else 0.
    THREADS: int = 0
    # The weight is read again for every tile, and dx is written last. Both save registers.
    REREAD: bool = False
    OVERLAP: bool = False  # the kernel may start before the kernel before it has ended: turns.py
    # Of a kernel with a block for each tile: up to so many blocks start early, and up to so many
    # let the next kernel start beside them.
    EARLY: int = 0
    BESIDE: int = 0
    # These two are read where blocks share a row.
    PADDED_CHUNKS: int = 0  # the smallest power of two that holds the chunks of a row
    # How often a block asks for the numbers of the other blocks before it computes them itself.
    POLLS: int = 0
