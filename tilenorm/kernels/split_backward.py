"""The backward pass of a piece of each row: some of its columns, the rest of which others hold.

grad_sums reads load -> sum -> store, and grad_apply is the schedule of norm_backward. Between the
two, whoever launches them adds up what grad_sums stored over the pieces of a row. A kernel divides
its sums by the length of the whole row, so that what is added up is a mean.
"""

import cuda.tile as ct

from .arrays import BackwardArrays
from .backward import Pass, add_up, walk
from .constants import Constants, How, Norm
from .inputs import saved_of
from .statistics import order_of_dots
from .tiles import Cut, write_number


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
    a, norm, cut = BackwardArrays(*ARRAYS), Norm(*NORM), Cut(*CUT)
    order = order_of_dots(a.X, cut, rows, False)
    this = Pass(a, norm, cut, How(), rows, order, False, False, THROUGH=True, SUMMED=False)
    i = first + ct.bid(2) * step + ct.bid(1)
    dot, total = dots_of(this, i, 0)
    if cut.CHUNKS > 1:
        for chunk in range(1, cut.CHUNKS):
            more, more_total = dots_of(this, i, chunk)
            dot = dot + more
            total = total + more_total
    tile = this.tile(i, 0)
    write_number(a.DOT, tile, dot * share, tile.in_rows)
    if norm.LAYER:
        write_number(a.TOTAL, tile, total * share, tile.in_rows)


def dots_of(this, i, chunk):
    """Σ g · x̂ and Σ g over a chunk of each row of tile i."""
    row = saved_of(*this.gather(i, chunk))
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
    HOW: Constants[How],
    DW: ct.Constant[bool],
    DB: ct.Constant[bool],
):
    """The formula of norm_backward, with the means of g · x̂ and of g over whole rows as given."""
    walk(ARRAYS, rows, NORM, CUT, HOW, DW, DB, True)
