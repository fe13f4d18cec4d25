"""The configurations that the tuner tries for a spec."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import chain, product

from ..launch import heuristics
from ..launch.calls import Needs, every_gradient
from ..launch.config import (
    Backward,
    Config,
    Hints,
    RopeBackward,
    RopeForward,
    RowForward,
    Served,
    SharedForward,
    StreamForward,
    cdiv,
    tile_width,
)
from ..launch.target import REGISTERS, Target
from ..launch.user_table import Key
from ..spec import SHARED_FROM, NormSpec
from .specs import title

# Bytes that a thread may spill. One in eight of the configurations shipped for the H200 spills,
# because no configuration without spills is as fast. Most of them spill less than this.
MOST_SPILLED = 64
# The values that are tried for each field. Blocks without TMA have 4 warps by default; with 8 warps
# a thread has half the registers.
WARPS = {False: (None, 8), True: (4, 8)}
ONE_TILE_OCCUPANCY = (None, 2, 3, 4, 5, 8, 12, 16)  # here it only bounds the registers
PACKED_OCCUPANCY = (None, 1, 2, 3, 4)
FETCH_OCCUPANCY = (None, 2, 3, 4, 6)
LOOP_OCCUPANCY = (1, 2, 3, 4, 5, 6, 8)
TMA_OCCUPANCY = (1, 2, 3, 4)
BACKWARD_OCCUPANCY = (1, 2, 3, 4, 5, 6)  # each block has partial sums
CHUNK_OCCUPANCY = (4, 5, 6, 7, 8, 10)  # forward; here it only bounds the registers
ROPE_OCCUPANCY = {"forward": (None, 2, 3, 4, 6), "backward": BACKWARD_OCCUPANCY}
CHUNKS = {"forward": (2048, 4096, 8192), "backward": (1024, 2048, 4096, 8192)}
CHUNK_SEGMENTS = {"forward": (1, 2, 4, 8), "backward": (1, 2)}
CHUNK_TOGETHER = (1, 2, 4)  # if a thread reads one vector of each segment

# The most segments of a row, and the narrowest: of different widths, and of equal width.
MOST_SEGMENTS, NARROWEST_SEGMENT = 5, 512
MOST_EQUAL_SEGMENTS, NARROWEST_EQUAL_SEGMENT = 9, 128
# The fewest and the most elements of a tile of gathered rows. A wider row is a tile of its own.
TILES = {"forward": (512, 8192), "backward": (512, 4096)}
LARGEST_AHEAD = 4096  # elements of a tile that a loop prefetches by gathers
FEWEST_A_THREAD = 8  # elements; with fewer, 8 warps are not tried
NARROWEST_LOAD = 1024  # columns of a row that tile loads read
NARROWEST_PACKED = 2048
NARROWEST_FETCHED = 1024
NARROWEST_REREAD = 6144  # columns; narrower rows have registers for the weights
WIDEST = {"forward": 32768, "backward": 18432}  # columns of a row that one block holds
WIDEST_GATHERED = 8192  # columns of a gathered backward row that is not packed
THREADS = 2048  # threads of a multiprocessor
# The most elements of all chunks on a multiprocessor. Each element takes about four float32 values.
BACKWARD_CHUNKS = REGISTERS // 4
# The most partial sums of all blocks on a multiprocessor if each row of a tile has its own.
HEADS_SCRATCH = 6 * 2048


@dataclass(frozen=True)
class Search:
    """What is tuned: a pass of a spec on a target. direction: "forward" saves what the backward
    pass needs; "backward" computes every gradient. terms: how many tensors make up dy.
    """

    spec: NormSpec
    target: Target
    direction: str
    terms: int = 1

    def __str__(self) -> str:
        return f"{title(self.spec, self.terms)} {self.direction}"

    @property
    def needs(self) -> Needs | None:
        """The gradients of the backward pass; None is the forward pass."""
        if self.direction == "forward":
            return None
        return every_gradient(self.spec)._replace(terms=self.terms)

    def key(self) -> Key:
        """What an entry of a table serves. Raises ValueError if no table serves the spec."""
        spec = self.spec
        if spec.quantized:
            plain = spec.unquantized.op
            raise ValueError(
                f"{spec.op} takes the configuration, and the bits, of {plain}: tune that"
            )
        if (spec.rotation or spec.modulated) and self.terms > 1:
            raise ValueError(f"{spec.op} takes one term of dy")
        if spec.branches:
            raise ValueError(
                f"{spec.op} with a mask or a layer scale has no table: tune it without"
            )
        op = heuristics.operation(spec, self.needs)
        if op is None:
            raise ValueError(
                f"no table serves {spec.op} {self.direction} with a gate first, weight and bias"
            )
        return Key.of(spec, self.direction, op, self.terms)

    @property
    def configs(self) -> list[Config]:
        """The candidates. What serves without tuning is the first, and is always timed."""
        chosen = explicit(heuristics.chosen(self.spec, self.target, self.needs), self.spec.hidden)
        return list(dict.fromkeys([chosen, *self.candidates()]))

    def candidates(self) -> list[Config]:
        """The configurations that the tuner tries, simple ones first."""
        spec, target = self.spec, self.target
        if spec.rotation:
            tried = _rotated(spec, self.direction)
        elif self.direction == "forward":
            tried = chain(_forward(spec), _forward_chunks(spec))
        else:
            tried = chain(_backward(spec), _backward_chunks(spec, target))
        served = Served(spec.hidden, spec.widest_item, spec.aligned, target)
        served_by = [config for config in dict.fromkeys(tried) if not config.refusal(served)]
        # Tuning changes no bits: another order would be passed over.
        needs = self.needs
        return [c for c in served_by if heuristics.keeps_order(spec, target, needs, c)]


def explicit(config: Config, hidden: int) -> Config:
    """The same configuration with its widths written out, if it has any."""
    if config.widths or isinstance(config, RopeForward):
        return config
    return replace(config, widths=(tile_width(hidden),))


def written(value) -> str:
    """The Python call that creates a dataclass, without arguments that are the default."""
    if not hasattr(value, "__dataclass_fields__"):
        return repr(value)
    arguments = (
        f"{field.name}={written(getattr(value, field.name))}"
        for field in fields(value)
        if getattr(value, field.name) != field.default
    )
    return f"{type(value).__name__}({', '.join(arguments)})"


def segmentations(hidden: int) -> list[tuple[int, ...]]:
    """Ways to cut a row into segments: powers of two in descending order.

    A row starts with as many segments of one width as fit. The rest of the row is cut exactly, or
    is padded to one power of two, or is padded to one more segment of the same width.
    """
    cuts = [(tile_width(hidden),)]
    width = cuts[0][0] // 2
    while width >= NARROWEST_EQUAL_SEGMENT and cdiv(hidden, width) <= MOST_EQUAL_SEGMENTS:
        count, rest = divmod(hidden, width)
        head = (width,) * count
        if rest:
            exact = tuple(1 << b for b in reversed(range(rest.bit_length())) if rest >> b & 1)
            cuts += [head + exact, head + (tile_width(rest),), head + (width,)]
        else:
            cuts.append(head)
        width //= 2
    return [widths for widths in dict.fromkeys(cuts) if _is_tried(widths)]


def _is_tried(widths: tuple[int, ...]) -> bool:
    """Whether there are not too many segments, and none is too narrow."""
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
            for packed in (False, True)[: 1 + _packs(spec)]:
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
        if spec.modulated:  # tiles of whole rows, which are gathered, alone
            continue
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


def _rotated(spec: NormSpec, direction: str) -> Iterator[RopeForward | RopeBackward]:
    """Tiles of 1 to 8 elements for each thread, of up to 64 over the heads of a block."""
    how, width = spec.rotation, heuristics.rope_width(spec)
    form = RopeForward if direction == "forward" else RopeBackward
    parts = 2 * (1 + cdiv(how.head - how.dim, 2 * width))  # tiles of a head
    for elements, tiles in product((1, 2, 4, 8), (1,) if spec.by_token else (1, 2, 4, 8)):
        if spec.by_token or parts * elements * tiles <= 64:
            for occupancy, warps in product(ROPE_OCCUPANCY[direction], WARPS[True]):
                hints = Hints(occupancy, warps)
                if (occupancy or 1) * hints.threads <= THREADS:
                    yield form(max(1, elements * hints.threads // width), tiles, hints)


def _forward_chunks(spec: NormSpec) -> Iterator[SharedForward]:
    for widths, packed, hints in _chunks(spec, "forward", CHUNK_OCCUPANCY):
        vectors = widths[0] == hints.vectors(spec.widest_item)
        for together in CHUNK_TOGETHER if vectors and (spec.weight or spec.bias) else (1,):
            if together == 1 or together < len(widths):
                yield SharedForward(hints, widths, packed=packed, together=together)


def _backward_chunks(spec: NormSpec, target: Target) -> Iterator[Backward]:
    for widths, packed, hints in _chunks(spec, "backward", BACKWARD_OCCUPANCY, BACKWARD_CHUNKS):
        # Blocks that share a row wait for each other at every row, so all have to be resident.
        sharing = cdiv(spec.hidden, sum(widths)) * (spec.heads or 1)
        if sharing <= target.multiprocessors * hints.occupancy:
            config = Backward(widths, hints=hints, packed=packed)
            yield config
            if spec.weight:
                yield replace(config, reread=True)


def _chunks(
    spec: NormSpec, direction: str, occupancies: tuple, most: int | None = None
) -> Iterator[tuple[tuple[int, ...], bool, Hints]]:
    """(widths, packed, hints) for rows that blocks share. Each thread has a vector of each segment.
    most: elements of all chunks on a multiprocessor.
    """
    chunks = [n for n in CHUNKS[direction] if n < spec.hidden and spec.hidden >= SHARED_FROM]
    for width, packed in product(chunks, (False, True)[: 1 + _packs(spec)]):
        for hints in _hints(occupancies, width, most):
            for count in CHUNK_SEGMENTS[direction]:
                if count == 1 or width // count >= hints.vectors(spec.widest_item):
                    yield (width // count,) * count, packed, hints


def _packs(spec: NormSpec) -> bool:
    """Whether rows have 16 bits and are so wide that it pays to keep them in 16 bits."""
    return spec.widest_item == 2 and spec.hidden >= NARROWEST_PACKED


def _rows(widths: tuple[int, ...], direction: str) -> list[int]:
    """The row counts that are tried for a tile of gathered rows."""
    least, most = TILES[direction]
    counts = [1 << i for i in range(most.bit_length())]
    return [n for n in counts if least <= n * sum(widths) <= most] or [1]


def _loads(spec: NormSpec, widths: tuple[int, ...]) -> Iterator[tuple[Hints, bool]]:
    """(hints, store) for rows that tile loads read."""
    if spec.hidden >= NARROWEST_LOAD:
        hints = _hints(TMA_OCCUPANCY, sum(widths), REGISTERS, tma=True)
        yield from product(hints, (False, True))


def _hints(
    occupancies: tuple, elements: int, most: int | None = None, tma: bool = False
) -> list[Hints]:
    """The hints that are tried. elements: what one block holds. most: what all blocks on a
    multiprocessor may hold.
    """
    candidates = []
    for occupancy, warps in product(occupancies, WARPS[tma]):
        hints = Hints(occupancy, warps)
        blocks, threads = occupancy or 1, hints.threads
        idle = warps == 8 and not tma and elements < FEWEST_A_THREAD * threads
        if (most is None or blocks * elements <= most) and blocks * threads <= THREADS and not idle:
            candidates.append(hints)
    return candidates
