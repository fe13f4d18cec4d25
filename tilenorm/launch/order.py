"""What decides the last bits of the sums over a row: one row, one result.

A kernel adds up a row in an order that its plan prescribes (kernels/statistics.py): slice by slice,
then the elements that a thread has of the last slice, then the threads of a block, then the blocks
that share the row. `forward_order` tells the order of a configuration of a forward pass.
`prescribed` tells the one that every norm of a row has, so that add_rms_norm(x, r) has the bits of
rms_norm(x + r): without it no table and no rule may choose a configuration.

The contract holds between the norms of one kind (RMSNorm or LayerNorm) of rows of one size and one
dtype, which is the dtype of the sum where a residual is added. Rows without a prescribed order:

- rows that do not fill 16-byte vectors, which are read element by element: with an order
  layer_norm of 4097 took 2.5 times as long (an H200);
- heads that are rotated, and rows that are sharded over processes.

TILENORM_ONE_RESULT=1 extends the contract. Without it these have orders of their own, too:

- forward passes of norms with a gate, which read three matrices;
- forward passes of modulated norms, which took up to 1.10 times as long with the plain norm's order
  (an H100);
- backward passes: dx in one order for all norms cost up to 15% (an H100).

With it dx has the same bits with and without a residual, whichever gradients are asked for, and
neither a gate that multiplies by 1 nor a modulation by zeros changes a bit of y. Also with it these
keep orders of their own, beside the rows above:

- forward passes of a gate before the norm whose elements have another size than the input's: a
  thread has other elements of the product. Rows of 512 bfloat16 with a float32 gate had other bits
  in 10 to 15% of elements (an H100);
- backward passes of norms with a gate, which read one more matrix and write one more, and have
  their own tables;
- backward passes of rows modulated by group, which another kernel adds up (group_backward.py);
- backward passes of 16-bit rows with a float32 dy, which a float32 out_dtype or skip gives them: by
  the machine code for sm_90, threads have other elements of rows of 256, 512, 896, 1024 and 2048.
"""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

from ..settings import settings
from ..spec import ITEM_BYTES, NormSpec
from .config import Config, Hints, RowForward, cdiv, tile_width
from .target import Target
from .tuned import orders


@cache
def one_result() -> bool:
    """Whether TILENORM_ONE_RESULT is set. It is read once: all plans of a process agree."""
    return settings().one_result


class Slice(NamedTuple):
    """Slices from the column `start` on: `width` columns each, of which a thread reads `unit` at
    once. Slices of one width are added up element by element."""

    start: int
    width: int
    unit: int


class RowOrder(NamedTuple):
    """The order in which a row is added up. Equal orders give equal bits.

    kind: "slices"; "halves", where vectors are added by halves; "fused", where the additions are
    fused multiply-adds; or "compiler", where the compiler chooses. chunk: the columns of each block
    that shares the row, or 0. free: what else the compiler's choice may depend on.
    """

    kind: str
    hidden: int
    chunk: int
    slices: tuple[Slice, ...]
    free: Config | None = None

    @property
    def prescribes(self) -> bool:
        """Whether the order is the same whatever the compiler chooses."""
        return self.kind in ("slices", "halves")


def forward_order(spec: NormSpec, config: Config) -> RowOrder:
    """The order of a forward pass with this configuration, as statistics.order_of prescribes it."""
    if spec.aligned:
        return order_by_slices(spec, config)
    widths = config.segments(spec.hidden)
    chunk = _chunk_of(spec, config)
    segments = slices_of(widths, 1, 0, 1)
    fetches = isinstance(config, RowForward) and config.fetch
    if chunk or fetches:
        return RowOrder("halves", spec.hidden, chunk, segments)
    kind = "fused" if config.rows > 1 else "compiler"
    return RowOrder(kind, spec.hidden, chunk, segments, None if config.rows > 1 else config)


def order_by_slices(spec: NormSpec, config: Config) -> RowOrder:
    """The order that a pass of either direction prescribes with this configuration."""
    widths, threads = config.segments(spec.hidden), config.hints.threads
    slices = slices_of(widths, config.rows, threads, unit_of(spec))
    return RowOrder("slices", spec.hidden, _chunk_of(spec, config), slices)


def fewest_rows(spec: NormSpec, config: Config) -> Config:
    """The configuration of a forward pass with the fewest rows in a tile that adds up a row in the
    same order. A block has half of the warps where half of the rows need that.
    """
    order = forward_order(spec, config)
    while config.rows > 1:
        half, warps = replace(config, rows=config.rows // 2), config.hints.num_worker_warps or 4
        fewer = Hints(config.hints.occupancy, warps // 2 if warps > 8 else None)
        halves = (half, replace(half, hints=fewer))
        kept = next((one for one in halves if forward_order(spec, one) == order), None)
        if kept is None:
            break
        config = kept
    return config


def _chunk_of(spec: NormSpec, config: Config) -> int:
    width = sum(config.segments(spec.hidden))
    return width if width < spec.hidden else 0


def unit_of(spec: NormSpec) -> int:
    """The elements of 16 bytes of what is normalised: the input, or the sum with a residual."""
    return 16 // ITEM_BYTES[spec.residual or spec.dtype]


def slices_of(widths: tuple[int, ...], rows: int, threads: int, unit: int) -> tuple[Slice, ...]:
    """The slices of a row's segments in a tile of so many rows. unit: the elements of 16 bytes.

    threads: 0 where segments are not cut into slices.
    """
    slices: list[Slice] = []
    start = 0
    for segment in widths:
        width = min(segment, unit * threads) if threads else segment
        read = max(1, min(unit, width, rows * width // threads)) if threads else unit
        if not slices or slices[-1][1:] != (width, read):
            slices.append(Slice(start, width, read))
        start += segment
    return tuple(slices)


class Rule(NamedTuple):
    """How every norm of rows of up to `largest` elements adds them up.

    warps: of a block, or 0 for tiles of several rows. width: of a slice, or 0 for the tile's width.
    chunk: as in RowOrder. unit: as in Slice, where a tile of several rows has fewer elements than a
    vector for each thread, else 0.
    """

    largest: int
    warps: int
    width: int
    chunk: int = 0
    unit: int = 0


def forward_rule(spec: NormSpec) -> Rule | None:
    """The rule for a forward pass; None where norms have orders of their own."""
    if spec.rotation or not spec.aligned:
        return None
    if (spec.gate or spec.modulated) and not one_result():
        return None
    if spec.gate and not _gate_lies_like_the_row(spec):
        return None
    return _rule(spec, orders.FORWARD)


def _gate_lies_like_the_row(spec: NormSpec) -> bool:
    """Whether the threads have the elements of what is normalised as without a gate."""
    return not spec.gate_first or ITEM_BYTES[spec.gate] == spec.item_bytes


def backward_rule(spec: NormSpec, target: Target) -> Rule | None:
    """The same for a backward pass. Blocks that share a row wait for each other, so that all have
    to be resident at once: where a GPU has few multiprocessors, chunks are wider.
    """
    if spec.gate or spec.rotation or spec.modulated or not spec.aligned or not one_result():
        return None
    rule = _rule(spec, orders.BACKWARD)
    least = tile_width(cdiv(spec.hidden, target.multiprocessors))
    return rule and rule._replace(chunk=rule.chunk and max(rule.chunk, least))


def _rule(spec: NormSpec, table: dict) -> Rule | None:
    item = ITEM_BYTES[spec.residual or spec.dtype]
    rows = (Rule(*row) for row in table.get((spec.norm, item), ()))
    rule = next((rule for rule in rows if spec.hidden <= rule.largest), None)
    return rule and rule._replace(width=rule.width or tile_width(spec.hidden))


def prescribed(spec: NormSpec, target: Target, backward: bool) -> RowOrder | None:
    """The order that every pass of such rows has, or None where there is no rule."""
    rule = backward_rule(spec, target) if backward else forward_rule(spec)
    if rule is None:
        return None
    read = rule.unit or min(unit_of(spec), rule.width)
    if rule.warps:
        read = max(1, min(read, rule.width // (32 * rule.warps)))
    return RowOrder("slices", spec.hidden, rule.chunk, (Slice(0, rule.width, read),))
