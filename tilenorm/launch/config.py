"""Everything about a launch that can be tuned: one class for each schedule.

The tables and the heuristics make configurations. The method `refusal` of a configuration says why
it cannot serve some rows.
"""

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from types import UnionType
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from .target import Target

VECTOR = 8  # elements of 16 bytes, of the narrowest dtype, as in kernels/tiles.py
MOST_CHUNKS = 1024  # a block loads the partial results of all chunks of a row at once


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. ONNX's integer division, which may compute it, rounds towards zero."""
    return (a + b - 1) // b


def tile_width(hidden: int) -> int:
    """The smallest power of two that holds a row."""
    return 1 << (hidden - 1).bit_length()


@dataclass(frozen=True)
class Hints:
    """Hints for the compiler. With None the compiler chooses."""

    occupancy: int | None = None
    num_worker_warps: int | None = None

    @property
    def threads(self) -> int:
        """Worker threads of a block. A block has 4 worker warps if num_worker_warps is None."""
        return 32 * (self.num_worker_warps or 4)

    def vectors(self, item_bytes: int) -> int:
        """Elements that a block reads at once if each thread reads one 16-byte vector."""
        return 16 // item_bytes * self.threads

    def given(self) -> dict[str, int]:
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Served:
    """The rows that a configuration has to serve."""

    hidden: int  # N
    item_bytes: int  # bytes of an element of the widest tensor that has rows
    aligned: bool  # a row is whole vectors of 16 bytes
    target: Target


class Config:
    """Base class of the configurations. A configuration may have some of these fields alone."""

    direction: ClassVar[str] = "forward"
    hints: Hints
    # The columns of each segment of a row, or of a chunk of a row. None: one segment has a row.
    widths: tuple[int, ...] | None
    rows: int = 1  # of a tile
    tma: bool = False  # rows are read one at a time, by tile loads in place of gathers
    store: bool = False  # rows are written by tile stores, which need tma
    # Inputs of 16 bits stay in 16 bits while a row is summed, and are converted to float32 twice.
    packed: bool = False
    fetch: bool = False  # weights are read with the row, not after its sums
    # Each row reads the weights again, and dx is written last. Both save registers.
    reread: bool = False
    together: int = 1  # of how many segments the weights are read at once, after the sums

    def segments(self, hidden: int) -> tuple[int, ...]:
        return self.widths or (tile_width(hidden),)

    def ends_within_a_chunk(self, hidden: int) -> bool:
        """Whether blocks share a row of so many elements, and the last chunk of it is not full."""
        return hidden % min(hidden, sum(self.segments(hidden))) > 0

    def elements_of_thread(self, hidden: int) -> float:
        """Elements of a tile for each thread."""
        return self.rows * sum(self.segments(hidden)) / self.hints.threads

    def refusal(self, served: Served) -> str | None:
        """The reason why this configuration cannot serve these rows, or None."""
        return next(self._reasons(served), None)

    def _reasons(self, served: Served) -> Iterator[str]:
        hidden = served.hidden
        item_bytes = served.item_bytes
        widths = self.segments(hidden)
        hints = self.hints
        yield from self._wrong_rows()
        # Tile loads need segments that start at a multiple of their width, as segments do whose
        # widths are descending powers of two.
        if not all(a >= b for a, b in pairwise(widths)) or not all(map(_power_of_two, widths)):
            yield f"widths {widths} are not descending powers of two"
        if self.packed and item_bytes != 2:
            yield "packed needs rows with 16-bit elements"
        if self.tma and not (self.rows == 1 and served.aligned and served.target.has_tma):
            yield "tile loads need rows=1, rows of whole vectors, and a GPU with TMA"
        if self.store and not self.tma:
            yield "tile stores need tile loads"
        if self.reread and self.rows != 1:
            yield "reread needs rows=1"
        one_width = len(set(widths)) == 1
        # A segment of at most this width leaves a thread at most two terms when it is folded.
        most = 32 * hints.threads
        if self.fetch and not (one_width and item_bytes <= widths[0] * item_bytes <= most):
            yield f"fetch needs segments of one width, here at most {most} bytes"
        if self.together != 1 and not (one_width and 1 < self.together <= len(widths)):
            yield "together is 1, or at most the number of segments, which then have one width"
        yield from self._wrong_cut(widths, hidden)

    def _wrong_rows(self) -> Iterator[str]:
        hints = self.hints
        if not _power_of_two(self.rows):
            yield f"rows {self.rows} is not a power of two"
        if not 1 <= (hints.occupancy or 1) <= 32 or not _power_of_two(hints.num_worker_warps or 1):
            yield f"hints out of range: {hints}"

    def _wrong_cut(self, widths: tuple[int, ...], hidden: int) -> Iterator[str]:
        """Why the segments are neither one row nor a chunk of a row that blocks share."""
        width = sum(widths)
        if isinstance(self, SharedForward) and width >= hidden:
            yield f"widths {widths} hold a whole row of {hidden}, so that no blocks share it"
        elif isinstance(self, RowForward | StreamForward) or width >= hidden:
            if not sum(widths[:-1]) < hidden <= width:
                yield f"widths {widths} do not fit a row of {hidden}"
        elif self.rows != 1 or self.tma:
            yield "blocks that share rows need rows=1 and no tile loads"
        elif widths[-1] % VECTOR:
            yield f"widths {widths} of a chunk do not end at a whole vector"
        elif hidden > MOST_CHUNKS * width:
            yield f"a row of {hidden} needs more than {MOST_CHUNKS} chunks of {width}"


@dataclass(frozen=True)
class RowForward(Config):
    """row_forward: each block has one tile.

    Small batches use a variant without packed, fetch and the hint of occupancy. Its tiles may have
    fewer rows. Its results have the same bits. See ForwardPlan.for_small_batches.
    """

    rows: int = 1
    hints: Hints = Hints()
    widths: tuple[int, ...] | None = None
    packed: bool = False
    fetch: bool = False


@dataclass(frozen=True)
class StreamForward(Config):
    """stream_forward: a persistent grid with `hints.occupancy` blocks on each multiprocessor."""

    rows: int = 1
    hints: Hints = Hints()
    widths: tuple[int, ...] | None = None
    tma: bool = False
    store: bool = False


@dataclass(frozen=True)
class SharedForward(Config):
    """shared_forward: several blocks share a row. `widths` are the segments of a block's chunk."""

    hints: Hints
    widths: tuple[int, ...]
    packed: bool = False
    together: int = 1


@dataclass(frozen=True)
class Backward(Config):
    """norm_backward: a persistent grid with `hints.occupancy` blocks on each multiprocessor.

    Several blocks share a row where all `widths` together are narrower than the row.
    """

    widths: tuple[int, ...]
    rows: int = 1
    tma: bool = False
    hints: Hints = Hints()
    store: bool = False
    packed: bool = False
    reread: bool = False

    direction: ClassVar[str] = "backward"


@dataclass(frozen=True)
class RopeForward(Config):
    """rope_forward: the rows of a tile are tokens, and a block has `tiles` heads of these.

    Where a norm spans all heads of a token, the rows of a tile are heads, and a block has a token.
    """

    rows: int = 4
    tiles: int = 4
    hints: Hints = Hints()
    widths = None

    def _reasons(self, served: Served) -> Iterator[str]:
        yield from self._wrong_rows()
        if not _power_of_two(self.tiles):
            yield f"tiles {self.tiles} is not a power of two"


@dataclass(frozen=True)
class RopeBackward(RopeForward):
    """rope_backward: the same tiles, in a persistent grid of `hints.occupancy` blocks on each
    multiprocessor.
    """

    direction: ClassVar[str] = "backward"


FORMS = (RowForward, StreamForward, SharedForward, Backward, RopeForward, RopeBackward)


@dataclass(frozen=True)
class ColumnSum:
    """column_sum: each block adds up `tile` columns, `rows` rows of partial sums at a time."""

    rows: int = 32
    tile: int = 16


def built(form: type, data: dict) -> Any:
    """A dataclass from its fields in JSON. Fields that have their defaults may be left out.

    Raises ValueError, TypeError or KeyError for missing or unknown fields and for other types.
    """
    known = {field.name: field.default for field in fields(form)}
    needed = {name for name, default in known.items() if default is MISSING}
    if not needed <= set(data) <= set(known):
        raise ValueError(f"{form.__name__} has {', '.join(data)}; it takes {', '.join(known)}")
    values = {}
    kinds = _kinds(form)
    for name, value in data.items():
        kind = kinds[name]
        if kind is Config:
            values[name] = config_of(value)
            continue
        if is_dataclass(kind):
            value = built(kind, value)
        elif isinstance(value, list):
            value = tuple(value)
        options = get_args(kind) if isinstance(kind, UnionType) else (kind,)
        if type(value) not in {get_origin(option) or option for option in options}:
            raise ValueError(f"{form.__name__}: {name} is {value!r}")
        values[name] = value
    return form(**values)


_kinds = cache(get_type_hints)


def config_of(data: dict) -> Config:
    """A configuration from the name of its class and its fields in JSON."""
    data = dict(data)
    forms = {form.__name__: form for form in FORMS}
    return built(forms[data.pop("form")], data)


def data_of(config: Config) -> dict[str, Any]:
    """What config_of takes, without the fields that have their defaults."""
    form = type(config)
    values = {n: v for n, v in vars(config).items() if n != "hints" and v != getattr(form, n, ...)}
    usual = config.hints == getattr(form, "hints", None)
    return {"form": form.__name__} | ({} if usual else {"hints": config.hints.given()}) | values


def _power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0
