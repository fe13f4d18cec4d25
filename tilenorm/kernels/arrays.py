"""The arrays that the kernels take.

An array that is absent is an empty tuple, which adds no parameter to the compiled kernel. What a
kernel computes follows from the arrays that it gets.
"""

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct


def given(X):
    """Whether an array, or the tiles that were read of one, is there."""
    return ct.static_eval(not isinstance(X, tuple) or len(X) > 0)


@dataclass(frozen=True)
class ForwardArrays:
    """The arrays of a forward pass. A row has N elements.

    With heads, an array of rows is (tokens, HEADS, N), and a parameter is (HEADS, N).
    """

    X: Any  # (rows, N), with any strides
    Y: Any  # (rows, N)
    W: Any  # (N,)
    B: Any  # (N,)
    RESIDUAL: Any  # (rows, N), with any strides
    GATE: Any  # (rows, N), with any strides
    SUM: Any  # (rows, N), x + residual
    MEAN: Any  # (rows,) float32
    RSTD: Any  # (rows,) float32
    SLOTS: Any = ()  # (rows, n) int32, see exchange.py
    ADDEND: Any = ()  # (rows, N): is added to x before the residual
    SKIP: Any = ()  # (rows, N): is added to the normalised row
    DROPOUT_MASK: Any = ()  # (rows, N) bytes
    LAYER_SCALE: Any = ()  # (N,)
    Q: Any = ()  # (rows, N) of 8-bit floats
    SCALE: Any = ()  # every scale in one dimension, float32 or bytes
    AMAX: Any = ()  # (1,) int32, at first 0
    INNER_W: Any = ()  # those of the inner norm: see Norm.INNER
    INNER_RSTD: Any = ()
    INNER_B: Any = ()
    INNER_MEAN: Any = ()
    MOD_SCALE: Any = ()  # (groups, N), see modulation.py
    MOD_SHIFT: Any = ()  # (groups, N)
    MOD_GATE: Any = ()  # (groups, N)


@dataclass(frozen=True)
class BackwardArrays:
    """The arrays of a backward pass. A row has N elements.

    With heads, an array of rows is (tokens, HEADS, N), and a parameter is (HEADS, N). PARTIALS is
    then (outputs · n, HEADS · N): the blocks that have the heads in turn write one row together.
    """

    X: Any  # (rows, N), with any strides; the sum where a residual was added
    DY: Any  # a tuple of arrays (rows, N), which add up to dy
    GATE: Any  # (rows, N)
    DSUM: Any  # (rows, N): the gradient of the sum
    W: Any  # (N,)
    B: Any  # (N,)
    MEAN: Any  # (rows,) float32
    RSTD: Any  # (rows,) float32
    DX: Any  # (rows, N)
    DRESIDUAL: Any  # (rows, N)
    DGATE: Any  # (rows, N)
    Y: Any  # (rows, N): the output, written once more
    # (outputs · blocks, N) float32. Block b writes its part of dW to row b, and its part of dB to a
    # row behind all rows of dW.
    PARTIALS: Any
    SLOTS: Any  # (rows, n) int32, see exchange.py
    DROPOUT_MASK: Any = ()  # (rows, N) bytes
    LAYER_SCALE: Any = ()  # (N,)
    # The next seven are those of group_backward.py.
    INPUT: Any = ()  # (rows, N): x before the gate by group
    MOD_SCALE: Any = ()  # (groups, N)
    MOD_GATE: Any = ()  # (groups, N)
    DSCALE: Any = ()  # (groups, N)
    DSHIFT: Any = ()  # (groups, N)
    DMOD_GATE: Any = ()  # (groups, N)
    GROUP_SUMS: Any = ()  # (sums · slots, N) float32


@dataclass(frozen=True)
class RopeForwardArrays:
    """The arrays of rope_forward.py, for B sequences of S tokens with H heads each."""

    INPUT: Any  # HeadsIn as a tuple
    KEY: Any  # HeadsIn as a tuple; () without a key
    COS: Any  # (B, S, R) with any strides, also 0; or (P, R) with POSITIONS
    SIN: Any  # as COS
    POSITIONS: Any  # (B, S) of integers: the row of COS and SIN of each token


@dataclass(frozen=True)
class HeadsIn:
    """The heads of a forward pass. A norm spans a head, or all heads of a token."""

    X: Any  # (B, S, H, D), with any strides and a last stride of 1
    W: Any  # (D,), or (H, D) where a norm spans all heads of a token
    Y: Any  # as X
    RSTD: Any  # (B, S, H) float32, or (B, S) where a norm spans all heads of a token


@dataclass(frozen=True)
class RopeBackwardArrays:
    """The arrays of rope_backward.py."""

    INPUT: Any  # HeadsBack as a tuple; () where no gradient is needed
    KEY: Any  # HeadsBack as a tuple; () where no gradient is needed
    COS: Any  # these three as in RopeForwardArrays
    SIN: Any
    POSITIONS: Any
    # (sums · blocks, columns) float32. Block b writes its part of dW to row b, and its part of the
    # key's dW to a row behind all rows of dW. Columns are those of W. Where the key's W has fewer,
    # the columns behind them hold nothing.
    PARTIALS: Any


@dataclass(frozen=True)
class HeadsBack:
    """The heads of a backward pass."""

    X: Any  # these as in HeadsIn
    DY: Any  # as X
    W: Any
    RSTD: Any
    DX: Any  # as X
