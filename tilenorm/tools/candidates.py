"""Configurations that can serve a spec: those worth trying, and why another cannot."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ..launch.config import (
    Backward,
    Config,
    Hints,
    RowForward,
    Served,
    SharedForward,
    StreamForward,
    cdiv,
    tile_width,
)
from ..launch.target import Target
from ..spec import NormSpec

# What is tried of each field. Blocks without TMA have 4 warps, with 8 half the registers a thread.
WARPS = {False: (None, 8), True: (4, 8)}
ONE_TILE_OCCUPANCY = (None, 2, 3, 4, 8, 12, 16)  # of a block a tile it bounds the registers only
PACKED_OCCUPANCY = (None, 1, 2, 3, 4)
FETCH_OCCUPANCY = (None, 2, 3, 4, 6)
LOOP_OCCUPANCY = (1, 2, 3, 4, 5, 6, 8)
TMA_OCCUPANCY = (1, 2, 3, 4)
BACKWARD_OCCUPANCY = (1, 2, 3, 4, 5, 6)  # each block has partial sums
CHUNK_OCCUPANCY = (4, 5, 6, 7, 8, 10)  # in the forward pass: it bounds the registers only
CHUNKS = {"forward": (2048, 4096, 8192), "backward": (1024, 2048, 4096, 8192)}
CHUNK_SEGMENTS = {"forward": (1, 2, 4, 8), "backward": (1, 2)}
CHUNK_TOGETHER = (1, 2, 4)  # where a thread reads one vector of a segment

# Segments at most of different widths, and of one, and the narrowest of each.
MOST_SEGMENTS, NARROWEST_SEGMENT = 5, 512
MOST_EQUAL_SEGMENTS, NARROWEST_EQUAL_SEGMENT = 9, 128
# Elements of a tile of gathered rows, more for a wider row.
TILES = {"forward": (512, 8192), "backward": (512, 4096)}
LARGEST_AHEAD = 4096  # elements of a tile of which a loop gathers the next one ahead
FEWEST_A_THREAD = 8  # elements, for 8 warps to be worth a try
NARROWEST_LOAD = 1024  # columns of a row by tile loads
NARROWEST_PACKED = 2048
NARROWEST_FETCHED = 1024
NARROWEST_SHARED = 8192
NARROWEST_REREAD = 6144  # columns of a row whose weights take registers that it lacks
WIDEST = {"forward": 32768, "backward": 16384}  # columns of a row that is held whole
WIDEST_GATHERED = 8192  # in the backward pass, and not packed
REGISTERS = 65536  # of a multiprocessor
THREADS = 2048
# Elements that the blocks of a multiprocessor have of chunks, each with about four float32 values.
BACKWARD_CHUNKS = REGISTERS // 4
# Partial sums that the blocks of a multiprocessor have where those of a tile's rows are apart.
HEADS_SCRATCH = 6 * 2048


def candidates(spec: NormSpec, target: Target, direction: str) -> list[Config]:
    """What the tuner tries, simple ones first. direction: "forward" or "backward"."""
    if direction == "forward":
        found = (*_forward(spec), *_forward_chunks(spec))
    else:
        found = (*_backward(spec), *_backward_chunks(spec, target))
    served = Served(spec.hidden, spec.widest_item, spec.aligned, target)
    return [c for c in dict.fromkeys(found) if not c.refusal(served)]


def explicit(config: Config, hidden: int) -> Config:
    """The same configuration with its widths written out."""
    return config if config.widths else replace(config, widths=(tile_width(hidden),))


def segmentations(hidden: int) -> list[tuple[int, ...]]:
    """Ways to cut a row into segments of powers of two in descending order, the widest first.

    Of each largest width: as many as fit and what is left, exactly or padded to one power of two
    or to one more of the same width.
    """
    found = [(tile_width(hidden),)]
    width = found[0][0] // 2
    while width >= NARROWEST_EQUAL_SEGMENT and cdiv(hidden, width) <= MOST_EQUAL_SEGMENTS:
        count, left = divmod(hidden, width)
        head = (width,) * count
        if left:
            exact = tuple(1 << b for b in reversed(range(left.bit_length())) if left >> b & 1)
            found += [head + exact, head + (tile_width(left),), head + (width,)]
        else:
            found.append(head)
        width //= 2
    return [widths for widths in dict.fromkeys(found) if _few(widths)]


def _few(widths: tuple[int, ...]) -> bool:
    if len(set(widths)) == 1:
        return len(widths) <= MOST_EQUAL_SEGMENTS
    return len(widths) <= MOST_SEGMENTS and widths[-1] >= NARROWEST_SEGMENT


def _forward(spec: NormSpec) -> Iterator[RowForward | StreamForward]:
    for widths in segmentations(spec.hidden) if spec.hidden <= WIDEST["forward"] else ():
        for rows in _rows(widths, "forward"):
            elements = rows * sum(widths)
            for hints in _hints(ONE_TILE_OCCUPANCY, elements):
                yield RowForward(rows, hints, widths)
            if rows == 1 or elements <= LARGEST_AHEAD:
                for hints in _hints(LOOP_OCCUPANCY, elements, REGISTERS):
                    yield StreamForward(rows, hints, widths)
        if _packs(spec):
            for hints in _hints(PACKED_OCCUPANCY, sum(widths)):
                yield RowForward(1, hints, widths, packed=True)
        if spec.norm == "rms" and spec.weight and spec.hidden >= NARROWEST_FETCHED:
            for packed in _packings(spec):
                for hints in _hints(FETCH_OCCUPANCY, sum(widths)):
                    yield RowForward(1, hints, widths, packed=packed, fetch=True)
        for hints, store in _loads(spec, widths):
            yield StreamForward(1, hints, widths, tma=True, store=store)


def _backward(spec: NormSpec) -> Iterator[Backward]:
    for widths in segmentations(spec.hidden) if spec.hidden <= WIDEST["backward"] else ():
        for rows in _rows(widths, "backward") if spec.hidden <= WIDEST_GATHERED else ():
            most = HEADS_SCRATCH if spec.heads and rows > 1 else REGISTERS
            for hints in _hints(BACKWARD_OCCUPANCY, rows * sum(widths), most):
                yield Backward(widths, rows, hints=hints)
        if _packs(spec):
            for hints in _hints(BACKWARD_OCCUPANCY, sum(widths), REGISTERS):
                yield Backward(widths, hints=hints, packed=True)
        for hints, store in _loads(spec, widths):
            config = Backward(widths, tma=True, hints=hints, store=store)
            yield config
            if spec.weight and spec.hidden >= NARROWEST_REREAD:
                yield replace(config, reread=True)
                if _packs(spec):
                    yield replace(config, packed=True, reread=True)


def _forward_chunks(spec: NormSpec) -> Iterator[SharedForward]:
    for width, packed in _chunks(spec, "forward"):
        for hints in _hints(CHUNK_OCCUPANCY, width):
            for widths in _cuts(spec, width, hints, "forward"):
                for together in _together(spec, widths, hints):
                    yield SharedForward(hints, widths, packed=packed, together=together)


def _backward_chunks(spec: NormSpec, target: Target) -> Iterator[Backward]:
    for width, packed in _chunks(spec, "backward"):
        sharing = cdiv(spec.hidden, width) * (spec.heads or 1)
        for hints in _hints(BACKWARD_OCCUPANCY, width, BACKWARD_CHUNKS):
            # More than are resident wait, in every row, for some that start when others have ended.
            if sharing <= target.multiprocessors * hints.occupancy:
                for widths in _cuts(spec, width, hints, "backward"):
                    config = Backward(widths, hints=hints, packed=packed)
                    yield config
                    if spec.weight:
                        yield replace(config, reread=True)


def _chunks(spec: NormSpec, direction: str) -> Iterator[tuple[int, bool]]:
    """(columns of a chunk, packed) where blocks share rows."""
    if spec.hidden >= NARROWEST_SHARED:
        widths = [width for width in CHUNKS[direction] if width < spec.hidden]
        yield from product(widths, _packings(spec))


def _cuts(spec: NormSpec, width: int, hints: Hints, direction: str) -> list[tuple[int, ...]]:
    """The segments of a chunk of so many columns, of which every thread has a vector at least."""
    least = hints.vectors(spec.widest_item)
    counts = CHUNK_SEGMENTS[direction]
    return [(width // n,) * n for n in counts if n == 1 or width // n >= least]


def _together(spec: NormSpec, widths: tuple[int, ...], hints: Hints) -> list[int]:
    """Of how many segments of a chunk the weights may be read at once."""
    read = spec.weight or spec.bias
    several = read and widths[0] == hints.vectors(spec.widest_item)
    return [n for n in CHUNK_TOGETHER if n == 1 or (several and n < len(widths))]


def _packings(spec: NormSpec) -> tuple[bool, ...]:
    return (False, True) if _packs(spec) else (False,)


def _packs(spec: NormSpec) -> bool:
    """Whether a row is so wide that it pays to keep it in its own 16 bits."""
    return spec.widest_item == 2 and spec.hidden >= NARROWEST_PACKED


def _rows(widths: tuple[int, ...], direction: str) -> list[int]:
    """How many rows a tile of gathered rows may have."""
    least, most = TILES[direction]
    counts = [1 << i for i in range(most.bit_length())]
    found = [n for n in counts if least <= n * sum(widths) <= most]
    return found or [1]


def _loads(spec: NormSpec, widths: tuple[int, ...]) -> Iterator[tuple[Hints, bool]]:
    """(hints, store) of rows that tile loads read."""
    if spec.hidden >= NARROWEST_LOAD:
        hints = _hints(TMA_OCCUPANCY, sum(widths), REGISTERS, tma=True)
        yield from product(hints, (False, True))


def _hints(
    occupancies: tuple, elements: int, most: int | None = None, tma: bool = False
) -> list[Hints]:
    """elements: those that a block holds; most: those that all of a multiprocessor may hold."""
    found = []
    for occupancy, warps in product(occupancies, WARPS[tma]):
        hints = Hints(occupancy, warps)
        blocks, threads = occupancy or 1, hints.threads
        idle = warps == 8 and not tma and elements < FEWEST_A_THREAD * threads
        if (most is None or blocks * elements <= most) and blocks * threads <= THREADS and not idle:
            found.append(hints)
    return found
