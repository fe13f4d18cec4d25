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
- norms with a gate, which read three matrices. Each has an order of its own, and keeps it;
- heads that are rotated, and rows that are sharded over processes;
- backward passes: dx in one order for all norms cost LayerNorms up to 13% (an H100).
"""

from typing import NamedTuple

from ..spec import ITEM_BYTES, NormSpec
from .config import Config, RowForward, tile_width
from .tuned import orders


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
    widths = config.segments(spec.hidden)
    chunk = sum(widths) if sum(widths) < spec.hidden else 0
    if spec.aligned:
        slices = slices_of(widths, config.rows, config.hints.threads, unit_of(spec))
        return RowOrder("slices", spec.hidden, chunk, slices)
    segments = slices_of(widths, 1, 0, 1)
    fetches = isinstance(config, RowForward) and config.fetch
    if chunk or fetches:
        return RowOrder("halves", spec.hidden, chunk, segments)
    kind = "fused" if config.rows > 1 else "compiler"
    return RowOrder(kind, spec.hidden, chunk, segments, None if config.rows > 1 else config)


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
    chunk: as in RowOrder.
    """

    largest: int
    warps: int
    width: int
    chunk: int = 0


def forward_rule(spec: NormSpec) -> Rule | None:
    """The rule for a forward pass; None where norms have orders of their own."""
    if spec.gate or spec.rotation or not spec.aligned:
        return None
    item = ITEM_BYTES[spec.residual or spec.dtype]
    rows = (Rule(*row) for row in orders.FORWARD.get((spec.norm, item), ()))
    rule = next((rule for rule in rows if spec.hidden <= rule.largest), None)
    return rule and rule._replace(width=rule.width or tile_width(spec.hidden))


def prescribed(spec: NormSpec) -> RowOrder | None:
    """The order that every forward pass of such rows has, or None where there is no rule."""
    rule = forward_rule(spec)
    if rule is None:
        return None
    read = min(unit_of(spec), rule.width)
    if rule.warps:
        read = max(1, min(read, rule.width // (32 * rule.warps)))
    return RowOrder("slices", spec.hidden, rule.chunk, (Slice(0, rule.width, read),))
