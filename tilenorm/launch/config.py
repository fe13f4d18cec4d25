"""Everything about a launch that can be tuned. The tables and the heuristics produce these."""

from dataclasses import dataclass


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
