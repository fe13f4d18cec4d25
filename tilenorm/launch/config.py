"""Everything about a launch that can be tuned. The tables and the heuristics produce these."""

from dataclasses import dataclass
from itertools import pairwise

from ..kernels.rows import VECTOR
from .target import Target

MOST_CHUNKS = 1024  # whose numbers a block collects at once


def cdiv(a: int, b: int) -> int:
    """How many parts of at most b make a."""
    return -(-a // b)


def tile_width(hidden: int) -> int:
    """The smallest power of two that holds a row."""
    return 1 << (hidden - 1).bit_length()


@dataclass(frozen=True)
class Hints:
    """What the compiler is asked for. None leaves the choice to it."""

    occupancy: int | None = None
    num_worker_warps: int | None = None

    @property
    def threads(self) -> int:
        """Of a block's worker warps, which are 4 if none are asked for."""
        return 32 * (self.num_worker_warps or 4)

    def vectors(self, item_bytes: int) -> int:
        """Elements of so many bytes of which each of these threads reads one vector."""
        return 16 // item_bytes * self.threads

    def given(self) -> dict[str, int]:
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Forward:
    """A tile of `rows` rows a block; or, where `widths` do not span a row, blocks that share it.

    widths: the segments of a row, or of each chunk of it; None is one that holds the row. loop: a
    persistent grid of `hints.occupancy` blocks a multiprocessor, instead of a block a tile. tma:
    with that, read by tile loads instead of gathers, one row at a time. store: with that, write by
    tile stores. packed: keep 16-bit inputs in 16 bits over the sums, and convert them again. fetch:
    weights with the row, else, together: those of so many segments at once, after the sums. What is
    fetched, packing and the occupancy are for rows that queue: few, of the same sums, go without.
    """

    rows: int = 1
    hints: Hints = Hints()
    widths: tuple[int, ...] | None = None
    loop: bool = False
    tma: bool = False
    store: bool = False
    packed: bool = False
    fetch: bool = False
    together: int = 1


@dataclass(frozen=True)
class Backward:
    """A persistent grid of `hints.occupancy` blocks a multiprocessor, `rows` rows at a time.

    widths: the segments of a row, or, where they do not span it, of each chunk of it, whose blocks
    share the row. tma: read by tile loads instead of gathers, one row at a time. store: with that,
    write by tile stores. packed: as in Forward. reread: for rows that fill the registers, weights
    are read again for each instead of kept, and dx is written last.
    """

    widths: tuple[int, ...]
    rows: int = 1
    tma: bool = False
    hints: Hints = Hints()
    store: bool = False
    packed: bool = False
    reread: bool = False


@dataclass(frozen=True)
class ColumnSum:
    """Tiles of rows × tile partial sums, one block a tile of columns."""

    rows: int = 32
    tile: int = 16


Config = Forward | Backward
FORMS = {"forward": Forward, "backward": Backward}


def refusal(
    config: Config, hidden: int, item_bytes: int, aligned: bool, target: Target, direction: str
) -> str | None:
    """Why a configuration cannot serve rows of so many elements in a direction, or None.

    item_bytes: of the widest tensor with rows.
    """
    if not isinstance(config, FORMS[direction]):
        return f"{type(config).__name__} is none of the {direction} pass"
    if not _power_of_two(config.rows):
        return f"rows {config.rows} is no power of two"
    hints = config.hints
    if not 1 <= (hints.occupancy or 1) <= 32 or not _power_of_two(hints.num_worker_warps or 1):
        return f"no such hints: {hints}"
    if config.packed and item_bytes != 2:
        return "packed takes rows of 16 bits an element"
    if config.tma and not (config.rows == 1 and aligned and target.has_tma):
        return "tile loads take one row at a time, of whole vectors, and a GPU that has them"
    if isinstance(config, Backward) and config.reread and config.rows != 1:
        return "weights are read again by tiles of one row"
    if config.store and not config.tma:
        return "tile stores come with tile loads"
    loops = isinstance(config, Forward) and config.loop
    if isinstance(config, Forward) and config.tma and not loops:
        return "tile loads come with a loop"
    widths = config.widths or (tile_width(hidden),)
    if isinstance(config, Forward) and config.fetch:
        if loops or sum(widths) < hidden:
            return "weights are fetched with a whole row, without a loop"
        # What is left of a thread's part of a segment has two terms, which add up in one order.
        most = 32 * hints.threads
        if len(set(widths)) > 1 or not item_bytes <= widths[0] * item_bytes <= most:
            return f"with weights, segments have one width, here at most {most} bytes"
    together = config.together if isinstance(config, Forward) else 1
    if together != 1 and (config.fetch or len(set(widths)) > 1 or not 1 < together <= len(widths)):
        return "weights are read together after the sums, of segments of one width that exist"
    # Of descending powers of two each starts at a multiple of its width, as tile loads need it.
    descend = all(a >= b for a, b in pairwise(widths))
    if not descend or not all(_power_of_two(width) for width in widths):
        return f"widths {widths} are no descending powers of two"
    if sum(widths) < hidden:
        gathers_rows = config.rows == 1 and not config.tma and not loops
        return _wrong_chunks(widths, hidden, gathers_rows)
    if sum(widths) - widths[-1] >= hidden:
        return f"widths {widths} do not end with a row of {hidden}"
    return None


def _wrong_chunks(widths: tuple[int, ...], hidden: int, gathers_rows: bool) -> str | None:
    if not gathers_rows:
        return "blocks that share a row gather one at a time, without a loop or tile stores"
    if widths[-1] % VECTOR:
        return f"widths {widths} of a chunk are no whole vectors"
    if hidden > MOST_CHUNKS * sum(widths):
        return f"a row of {hidden} takes more than {MOST_CHUNKS} chunks of {sum(widths)}"
    return None


def _power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0
