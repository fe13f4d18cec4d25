"""Configurations that can serve a spec: those worth trying, and why another cannot."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

from ..spec import NormSpec
from .config import Backward, Forward, Hints, Wide, tile_width
from .target import Target

Config = Forward | Backward | Wide

# What is tried of each field. Blocks without TMA have 4 warps, with 8 half the registers a thread.
WARPS = {False: (None, 8), True: (4, 8)}
ONE_TILE_OCCUPANCY = (None, 4, 8, 12, 16)  # of a block a tile it bounds the registers only
LOOP_OCCUPANCY = (1, 2, 3, 4, 5, 6, 8)
TMA_OCCUPANCY = (1, 2, 3, 4)
BACKWARD_OCCUPANCY = (1, 2, 3, 4, 5)  # each block has partial sums
CHUNKS = (1024, 2048, 4096, 8192)

MOST_SEGMENTS = 5
NARROWEST_SEGMENT = 512
TILES = (512, 4096)  # elements of a tile of gathered rows, more for a wider row
NARROWEST_LOAD = 1024  # columns of a row by tile loads
NARROWEST_WIDE = 8192
# Columns of the widest row that is held whole, and of the widest that is gathered.
WIDEST = {"forward": (32768, 32768), "backward": (16384, 8192)}
REGISTERS = 65536  # of a multiprocessor
# Partial sums that the blocks of a multiprocessor have where those of a tile's rows are apart.
HEADS_SCRATCH = 6 * 2048


def candidates(spec: NormSpec, target: Target, direction: str) -> list[Config]:
    """What the tuner tries, simple ones first. direction: "forward" or "backward"."""
    tried = _forward if direction == "forward" else _backward
    found = [*tried(spec), *_wide(spec, direction)]
    row = spec.hidden, spec.aligned
    return [c for c in dict.fromkeys(found) if not refusal(c, *row, target, direction)]


def explicit(config: Config, hidden: int) -> Config:
    """The same configuration with its widths written out."""
    if isinstance(config, Wide) or config.widths:
        return config
    return replace(config, widths=(tile_width(hidden),))


def refusal(
    config: Config, hidden: int, aligned: bool, target: Target, direction: str
) -> str | None:
    """Why a configuration cannot serve rows of so many elements in a direction, or None."""
    if not isinstance(config, (Wide, Forward if direction == "forward" else Backward)):
        return f"{type(config).__name__} is none of the {direction} pass"
    if isinstance(config, Wide):
        whole = _power_of_two(config.tile) and config.tile >= 16
        return None if whole and 1 <= config.occupancy <= 32 else "no such chunks"
    if not _power_of_two(config.rows):
        return f"rows {config.rows} is no power of two"
    hints = config.hints
    if not 1 <= (hints.occupancy or 1) <= 32 or not _power_of_two(hints.num_worker_warps or 1):
        return f"no such hints: {hints}"
    if config.tma and not (config.rows == 1 and aligned and target.has_tma):
        return "tile loads take one row at a time, of whole vectors, and a GPU that has them"
    if config.store and not config.tma:
        return "tile stores come with tile loads"
    if isinstance(config, Forward) and config.tma and not config.loop:
        return "tile loads come with a loop"
    return _wrong_widths(config.widths or (tile_width(hidden),), hidden)


def segmentations(hidden: int) -> list[tuple[int, ...]]:
    """Ways to cut a row into segments of powers of two in descending order, the widest first.

    Of each largest width: as many as fit and what is left, exactly or padded to one power of two
    or to one more of the same width.
    """
    whole = tile_width(hidden)
    found = [(whole,)]
    width = whole // 2
    while width >= NARROWEST_SEGMENT and -(-hidden // width) <= MOST_SEGMENTS:
        count, left = divmod(hidden, width)
        head = (width,) * count
        if left:
            exact = tuple(1 << b for b in reversed(range(left.bit_length())) if left >> b & 1)
            found += [head + exact, head + (tile_width(left),), head + (width,)]
        else:
            found.append(head)
        width //= 2
    return [
        widths
        for widths in dict.fromkeys(found)
        if len(widths) <= MOST_SEGMENTS and (widths[-1] >= NARROWEST_SEGMENT or len(widths) == 1)
    ]


def _forward(spec: NormSpec) -> Iterator[Forward]:
    widest, _ = WIDEST["forward"]
    for widths in segmentations(spec.hidden) if spec.hidden <= widest else ():
        for rows in _rows(widths):
            for hints in _hints(ONE_TILE_OCCUPANCY, False):
                yield Forward(rows, hints, widths)
            for hints in _hints(LOOP_OCCUPANCY, False, rows * sum(widths)):
                yield Forward(rows, hints, widths, loop=True)
        if spec.hidden >= NARROWEST_LOAD:
            for hints, store in product(_hints(TMA_OCCUPANCY, True, sum(widths)), (False, True)):
                yield Forward(1, hints, widths, loop=True, tma=True, store=store)


def _backward(spec: NormSpec) -> Iterator[Backward]:
    widest, gathered = WIDEST["backward"]
    for widths in segmentations(spec.hidden) if spec.hidden <= widest else ():
        for rows in _rows(widths) if spec.hidden <= gathered else ():
            most = HEADS_SCRATCH if spec.heads and rows > 1 else REGISTERS
            for hints in _hints(BACKWARD_OCCUPANCY, False, rows * sum(widths), most):
                yield Backward(widths, rows, hints=hints)
        if spec.hidden >= NARROWEST_LOAD:
            for hints, store in product(_hints(TMA_OCCUPANCY, True, sum(widths)), (False, True)):
                yield Backward(widths, tma=True, hints=hints, store=store)


def _wide(spec: NormSpec, direction: str) -> Iterator[Wide]:
    """Chunks. The forward pass has no looping kernel, and so no use for an occupancy."""
    occupancies = (Wide.occupancy,) if direction == "forward" else BACKWARD_OCCUPANCY
    if spec.hidden >= NARROWEST_WIDE:
        for tile, occupancy in product(CHUNKS, occupancies):
            yield Wide(tile, occupancy)


def _rows(widths: tuple[int, ...]) -> list[int]:
    """How many rows a tile of gathered rows may have."""
    least, most = TILES
    counts = [1 << i for i in range(most.bit_length())]
    found = [n for n in counts if least <= n * sum(widths) <= most]
    return found or [1]


def _hints(occupancies: tuple, tma: bool, elements: int = 0, most: int = REGISTERS) -> list[Hints]:
    """elements: those that a block holds; most: those that all of a multiprocessor may hold."""
    return [
        Hints(occupancy, warps)
        for occupancy, warps in product(occupancies, WARPS[tma])
        if (occupancy or 1) * elements <= most
    ]


def _wrong_widths(widths: tuple[int, ...], hidden: int) -> str | None:
    # Of descending powers of two each starts at a multiple of its width, as tile loads need it.
    descend = all(a >= b for a, b in pairwise(widths))
    if not descend or not all(_power_of_two(width) for width in widths):
        return f"widths {widths} are no descending powers of two"
    if not sum(widths) - widths[-1] < hidden <= sum(widths):
        return f"widths {widths} do not end with a row of {hidden}"
    return None


def _power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0
