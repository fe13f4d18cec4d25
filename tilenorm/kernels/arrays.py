"""The arrays that the kernels take. An absent one is an empty tuple, which adds no parameter to the
compiled kernel. What a kernel computes follows from the arrays that are given."""

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct


def given(X):
    """Whether an array, or the tiles that were read of one, is there."""
    return ct.static_eval(not isinstance(X, tuple) or len(X) > 0)


@dataclass(frozen=True)
class ForwardArrays:
    """X, RESIDUAL, GATE, ADDEND, SKIP (rows, N) or (tokens, HEADS, N), and so DROPOUT_MASK, of
    bytes; LAYER_SCALE (N,); W and B (N,) or (HEADS, N); Y, SUM (rows, N); MEAN, RSTD (rows,)
    float32; SLOTS (rows, n) int32; Q (rows, N) of 8-bit floats; SCALE: every scale, in one
    dimension, float32 or bytes; AMAX (1,) int32, at first 0; INNER_W and so on: W, B,
    MEAN and RSTD of the inner norm; MOD_SCALE, MOD_SHIFT, MOD_GATE (groups, N), see modulation.py.
    """

    X: Any
    Y: Any
    W: Any
    B: Any
    RESIDUAL: Any
    GATE: Any
    SUM: Any
    MEAN: Any
    RSTD: Any
    SLOTS: Any = ()
    ADDEND: Any = ()
    SKIP: Any = ()
    DROPOUT_MASK: Any = ()
    LAYER_SCALE: Any = ()
    Q: Any = ()
    SCALE: Any = ()
    AMAX: Any = ()
    INNER_W: Any = ()
    INNER_RSTD: Any = ()
    INNER_B: Any = ()
    INNER_MEAN: Any = ()
    MOD_SCALE: Any = ()
    MOD_SHIFT: Any = ()
    MOD_GATE: Any = ()


@dataclass(frozen=True)
class BackwardArrays:
    """X, GATE, DSUM (rows, N) or (tokens, HEADS, N), and so DROPOUT_MASK, of bytes; DY a tuple of
    such arrays, which add up to dy; LAYER_SCALE (N,); W and B (N,) or (HEADS, N); MEAN and RSTD
    (rows,) float32; DX, DRESIDUAL, DGATE, Y (rows, N); SLOTS (rows, n) int32.

    X is the sum where a residual was added. PARTIALS (outputs · blocks, N) float32: block b writes
    its part of dW to row b, and its part of dB to a row behind all rows of dW. With HEADS, PARTIALS
    is (outputs · n, HEADS · N), and a group of blocks, one for each part of the heads, writes one
    row. Of group_backward.py: INPUT (rows, N), x before the gate by group;
    MOD_SCALE and MOD_GATE (groups, N); DSCALE, DSHIFT, DMOD_GATE (groups, N), the gradients of what
    is by group; GROUP_SUMS (sums · slots, N) float32.
    """

    X: Any
    DY: Any
    GATE: Any
    DSUM: Any
    W: Any
    B: Any
    MEAN: Any
    RSTD: Any
    DX: Any
    DRESIDUAL: Any
    DGATE: Any
    Y: Any
    PARTIALS: Any
    SLOTS: Any
    DROPOUT_MASK: Any = ()
    LAYER_SCALE: Any = ()
    INPUT: Any = ()
    MOD_SCALE: Any = ()
    MOD_GATE: Any = ()
    DSCALE: Any = ()
    DSHIFT: Any = ()
    DMOD_GATE: Any = ()
    GROUP_SUMS: Any = ()


@dataclass(frozen=True)
class RopeForwardArrays:
    """Of rope_forward.py. INPUT and KEY: HeadsIn as tuples; no key is ().

    COS, SIN (B, S, R), with any strides, also 0; or (P, R) with POSITIONS (B, S) of integers, the
    rows of the tokens.
    """

    INPUT: Any
    KEY: Any
    COS: Any
    SIN: Any
    POSITIONS: Any


@dataclass(frozen=True)
class HeadsIn:
    """X and Y (B, S, H, D), with any strides and a last stride of 1: B sequences of S tokens, each
    with H heads. W (D,) and RSTD (B, S, H) float32; where a norm spans all heads of a token, W
    (H, D) and RSTD (B, S).
    """

    X: Any
    W: Any
    Y: Any
    RSTD: Any


@dataclass(frozen=True)
class RopeBackwardArrays:
    """Of rope_backward.py. INPUT and KEY: HeadsBack as tuples; () where no gradient is needed.

    COS, SIN, POSITIONS: as in RopeForwardArrays. PARTIALS (sums · blocks, columns) float32: block b
    writes its part of dW to row b, and that of the key's dW to a row behind all rows of dW. Columns
    are those of W; where the key's W has fewer, those behind them hold nothing.
    """

    INPUT: Any
    KEY: Any
    COS: Any
    SIN: Any
    POSITIONS: Any
    PARTIALS: Any


@dataclass(frozen=True)
class HeadsBack:
    """X, W and RSTD as in HeadsIn, and DY, DX like X."""

    X: Any
    DY: Any
    W: Any
    RSTD: Any
    DX: Any
