"""The backward pass of a piece of each row: some of its columns, the rest of which others hold.

grad_sums reads load -> sum -> store, and grad_apply is the schedule of norm_backward. Between the
two, whoever launches them adds up what grad_sums stored over the pieces of a row. A kernel divides
its sums by the length of the whole row, so that what is added up is a mean.
"""

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from .backward import Pass, add_up, copied, walk
from .constants import BackwardHow, Constants, Needs, Norm
from .inputs import saved_of
from .split_forward import put
from .statistics import order_of_dots
from .tiles import Cut


@dataclass(frozen=True)
class Arrays:
    """As backward.Arrays, without Y and SLOTS, and DY is a tuple of one array. DOT, TOTAL: (rows,)
    float32 with any stride, for the means of g · x̂ and, for LAYER, of g. grad_sums stores the
    piece's parts of them.
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
    PARTIALS: Any
    DOT: Any
    TOTAL: Any


@ct.kernel
def grad_sums(
    first: int,
    step: int,
    ARRAYS: tuple,
    share: float,
    rows: int,
    NORM: Constants[Norm],
    CUT: Constants[Cut],
):
    """dot = Σ g · x̂ · share, and for LAYER total = Σ g · share, with g = dy · (w + offset).

    share: 1 / the length of a whole row. Block (0, y, z) adds up tile `first` + z · `step` + y,
    chunk by chunk.
    """
    a, norm, cut = Arrays(*ARRAYS), Norm(*NORM), Cut(*CUT)
    how = BackwardHow(False, False, False, False, 0, 0, False)
    needs = Needs(True, False, False, False, False, False, 1, False)
    order = order_of_dots(a.X, cut, rows, False)
    this = Pass(a, norm, cut, how, needs, rows, order, ())
    i = first + ct.bid(2) * step + ct.bid(1)
    dot, total = dots_of(this, i, 0)
    if cut.CHUNKS > 1:
        for chunk in range(1, cut.CHUNKS):
            more, more_total = dots_of(this, i, chunk)
            dot = dot + more
            total = total + more_total
    tile = this.tile(i, 0)
    put(a.DOT, tile, dot * share)
    if norm.LAYER:
        put(a.TOTAL, tile, total * share)


def dots_of(this, i, chunk):
    """Σ g · x̂ and Σ g over a chunk of each row of tile i."""
    row = saved_of(this.norm, this.needs, *this.gather(i, chunk))
    weights = this.weights(this.tile(i, chunk))
    number = ct.astype(i, ct.float32)
    dots = add_up(this, row, weights, number, (), ())[1]
    return dots.dot, dots.total


@ct.kernel
def grad_apply(
    ARRAYS: tuple,
    rows: int,
    NORM: Constants[Norm],
    CUT: Constants[Cut],
    HOW: Constants[BackwardHow],
    NEEDS: Constants[Needs],
):
    """The formula of norm_backward, with the means of g · x̂ and of g over whole rows as given."""
    a, norm, cut, how = Arrays(*ARRAYS), Norm(*NORM), Cut(*CUT), BackwardHow(*HOW)
    order = order_of_dots(a.X, cut, rows, copied(norm, cut, how))
    dots = (a.DOT, a.TOTAL) if norm.LAYER else (a.DOT,)
    walk(Pass(a, norm, cut, how, Needs(*NEEDS), rows, order, dots))
