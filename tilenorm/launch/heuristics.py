"""Chooses the configuration for a spec and a target.

A user's table comes first, then the shipped table, then rules about resources. The rules are not
timed. They estimate the registers of a kernel: about four float32 values for each element of a tile
in the backward pass, and two in the forward pass. A block without TMA has 128 threads (4 warps).
"""

from dataclasses import replace
from itertools import accumulate

from ..spec import ITEM_BYTES, NormSpec
from ..table import MODULATION
from . import forcing, user_table
from .calls import Needs
from .config import (
    Backward,
    ColumnSum,
    Config,
    Hints,
    RopeBackward,
    RopeForward,
    RowForward,
    Served,
    SharedForward,
    cdiv,
    tile_width,
)
from .order import (
    Rule,
    backward_rule,
    fewest_rows,
    forward_rule,
    order_by_slices,
    prescribed,
    unit_of,
)
from .target import REGISTERS, Target
from .tuned import rules
from .tuned.quantized import MOST_OF_ROWS
from .tuned.tables import TABLES


def chosen(spec: NormSpec, target: Target, needs: Needs | None = None) -> Config:
    """The configuration of a forward pass, or, with `needs`, of a backward pass.

    A norm whose output is quantised, or has a dtype of its own, has the configuration, and so the
    bits, of the plain one. A quantised norm may have fewer rows in a tile, with the same bits.
    """
    quantized = spec.quantized if needs is None else None
    spec, op = spec.unquantized if needs else spec.uncast, ""
    if config := forcing.of_direction("forward" if needs is None else "backward"):
        return _forced(spec, target, config)
    if tabled := _tabled(spec, target, needs):
        config, op, _ = tabled
    elif spec.rotation:
        config = _rotated(spec, needs)
    elif needs is None:
        read = (spec.dtype, spec.residual, spec.gate, spec.addend, spec.skip)
        inputs = 1 if spec.inner else sum(dtype is not None for dtype in read)
        rule = forward_rule(spec)
        config = _by_rule(spec, inputs, rule) if rule else _forward(spec, inputs)
    elif spec.modulated:
        config = _by_group(spec, needs)
    elif rule := backward_rule(spec, target):
        config = _backward_by_rule(spec, target, needs, rule)
    else:
        config = _backward(spec, target, needs)
    # A chain's or a modulated norm's own table has the op's name. Else a plain norm's table serves.
    if needs is None and spec.op not in op:
        config = _around(spec, target, config)
    config = with_room(spec, config)
    return _with_few_rows(spec, config) if quantized else config


def _forced(spec: NormSpec, target: Target, config: Config) -> Config:
    """The configuration of a block of forcing.forced. Raises ValueError where it cannot serve."""
    reason = config.refusal(Served(spec.hidden, spec.widest_item, spec.aligned, target))
    if isinstance(config, RopeForward) != bool(spec.rotation):
        reason = f"{type(config).__name__} is for other kernels"
    if reason:
        raise ValueError(
            f"{spec.op}: the argument 'config' of tilenorm.launch.forced takes a configuration that"
            f" serves rows of {spec.hidden} {spec.dtype}, got {config}: {reason}"
        )
    return config


def _with_few_rows(spec: NormSpec, config: Config) -> Config:
    """A plain norm's configuration, for a quantised norm: with fewer rows in a tile where a thread
    would have too many elements. A row is added up in the same order, so that q has its bits.

    spec: of the plain norm.
    """
    many = config.rows > 1 and config.elements_of_thread(spec.hidden) > MOST_OF_ROWS
    return fewest_rows(spec, config) if many and spec.aligned else config


def _around(spec: NormSpec, target: Target, config: Config) -> Config:
    """A plain norm's configuration, for a norm that does more and that was not tuned."""
    if spec.inner and spec.norm == "layer":
        # Two LayerNorms have more registers than the table's occupancies leave for one.
        return replace(config, hints=replace(config.hints, occupancy=None))
    elements = config.rows * sum(config.segments(spec.hidden))
    if not spec.modulated or config.rows == 1 or elements <= rules.MODULATED_TILE:
        return config
    halved = replace(config, rows=config.rows // 2)
    return halved if keeps_order(spec, target, None, halved) else config


def _by_rule(spec: NormSpec, inputs: int, rule: Rule) -> RowForward | SharedForward:
    """A configuration that adds up a row as the rule says."""
    width, warps = rule.width, rule.warps if rule.warps == 8 else None
    if rule.chunk:
        hints = Hints(rules.FORWARD_BLOCKS[min(inputs, 2)], warps)
        count = rule.chunk // width
        return SharedForward(hints, (width,) * count, packed=_packs(spec), together=2)
    if not rule.warps:
        widths = (width,) * cdiv(spec.hidden, width)
        vectors = unit_of(spec) * Hints().threads
        rows = max(rules.TILE // tile_width(sum(widths)), cdiv(vectors, tile_width(width)))
        return RowForward(rows, widths=widths)
    while cdiv(spec.hidden, width) > rules.MOST_SEGMENTS:
        width *= 2
    widths = (width,) * cdiv(spec.hidden, width)
    packed = _packs(spec) and spec.hidden * inputs >= rules.PACKED_FROM
    return RowForward(1, Hints(None, warps), widths, packed=packed)


def _backward_by_rule(spec: NormSpec, target: Target, needs: Needs, rule: Rule) -> Backward:
    """The same for a backward pass. Of each element a thread has float32 values of x̂ and g, of the
    sums over rows, and of what it reads, now and ahead. Blocks that share a row have two more.
    """
    width, rows = rule.width, 1
    while cdiv(rule.chunk or spec.hidden, width) > rules.MOST_SEGMENTS:
        width *= 2
    widths = (rule.chunk,) if rule.chunk else (width,) * cdiv(spec.hidden, width)
    if not rule.warps:
        rows = cdiv((rule.unit or unit_of(spec)) * Hints().threads, tile_width(width))
        if not rule.unit:
            rows = max(rows, rules.TILE // tile_width(sum(widths)))
    of_element = 2 + needs.sums + (1 + needs.terms + needs.dsum) * spec.widest_item // 2
    of_element += 2 if rule.chunk else 0
    values = of_element * rows * sum(widths)  # of a block
    blocks = max(1, min(rules.BACKWARD_BLOCKS, REGISTERS // values))
    room = rules.BACKWARD_VALUES * 32 * rule.warps  # 0 for tiles of several rows, which have it
    tight = rule.chunk > 0 or 0 < room < values
    tma = target.has_tma and (rule.warps == 8 or tight) and not rule.chunk
    hints = Hints(blocks, rule.warps if tma or rule.warps == 8 else None)
    packed, reread = tight and _packs(spec), tight and bool(spec.weight)
    return Backward(widths, rows, tma=tma, hints=hints, packed=packed, reread=reread)


def of_small_batches(spec: NormSpec, config: RowForward) -> RowForward:
    """The configuration for batches whose tiles all run at once, which adds up a row in the same
    order.

    How long one tile takes decides there, and not how many a multiprocessor holds. So the kernel
    has what registers it needs, and a tile has few rows.
    """
    least = 1 if config.hints.occupancy == 1 else None
    hints = replace(config.hints, occupancy=least)
    config = fewest_rows(spec, replace(config, hints=hints, packed=False, fetch=False))
    # A row has fewer segments, too, where that was timed.
    width, segments = tile_width(spec.hidden), config.segments(spec.hidden)
    fewer, most = rules.SMALL_BATCH_JOINED[spec.residual is not None]
    joins = config.rows == 1 and len(segments) >= rules.SMALL_BATCH_SEGMENTS
    timed = spec.residual or spec.widest_item == 2
    fits = width == sum(segments) <= most
    return replace(config, widths=(width // fewer,) * fewer) if joins and timed and fits else config


def with_room(spec: NormSpec, config: Config) -> Config:
    """A configuration for a spec whose input may be masked or scaled.

    Both take registers. With the occupancy of the plain norm, kernels compiled for sm_90 spilled up
    to 288 bytes. One block fewer on a multiprocessor is enough for all but shared_forward, which
    has half as many.
    """
    occupancy = config.hints.occupancy
    if not spec.branches or not occupancy or occupancy == 1:
        return config
    fewer = occupancy // 2 if isinstance(config, SharedForward) else occupancy - 1
    return replace(config, hints=replace(config.hints, occupancy=fewer))


def _forward(spec: NormSpec, inputs: int) -> Config:
    """For a kernel that reads each row once, in so many inputs."""
    width = tile_width(spec.hidden)
    if width > rules.FORWARD_TILE // inputs:
        return _forward_chunk(spec, inputs)
    return RowForward(rows=max(1, rules.TILE // width))


def _forward_chunk(spec: NormSpec, inputs: int) -> SharedForward:
    hints, chunk = Hints(rules.FORWARD_BLOCKS[min(inputs, 2)]), rules.FORWARD_CHUNK
    if not spec.aligned:
        fits = inputs == 1 and spec.norm == "rms"
        return SharedForward(hints, (2 * chunk if fits else chunk,))
    widths = (hints.vectors(spec.widest_item),) * (rules.FORWARD_VECTORS // tile_width(inputs))
    return SharedForward(hints, widths, packed=_packs(spec), together=2)


def _backward(spec: NormSpec, target: Target, needs: Needs) -> Backward:
    width = tile_width(spec.hidden)
    inputs = 1 + needs.terms + (spec.gate is not None) + needs.dsum
    if width <= rules.GATHERED[needs.sums] * 2 // inputs:
        return Backward((width,), max(1, rules.TILE // width), hints=Hints(occupancy=2))
    three_inputs = inputs == 3 and needs.sums == 2
    fits = rules.TMA_TILE_OF_MORE if three_inputs else rules.TMA_TILE
    if width <= fits and target.has_tma and spec.aligned:
        return Backward((width,), tma=True, hints=Hints(1, 8))
    # Rows that are read element by element spill less than those that are read in vectors.
    sixteen = spec.aligned and spec.widest_item == 2
    if spec.gate:
        wide = sixteen and not spec.gate_first and needs.terms == 1
    else:
        wide = not spec.aligned or (sixteen and inputs == 2)
    narrow = rules.CHUNK if inputs == 2 else rules.MORE_CHUNK
    chunk, occupancy = rules.WIDE_CHUNK if wide else narrow
    # Blocks that share a row wait for each other at every row, so all have to be resident at once.
    least = tile_width(cdiv(spec.hidden, target.multiprocessors * occupancy))
    return Backward((max(chunk, least),), hints=Hints(occupancy), packed=_packs(spec))


def _by_group(spec: NormSpec, needs: Needs) -> Backward:
    # dW and dB, a gate and float32 take registers.
    by_group = (getattr(spec, role) for role in MODULATION)
    extra = bool(needs.sums) + bool(spec.mod_gate)
    extra += spec.widest_item > 2 or "float32" in by_group
    known = rules.GROUPED[min(extra, len(rules.GROUPED) - 1)]
    hints = next((its_hints for most, its_hints in known if spec.hidden <= most), Hints(1, 8))
    width = tile_width(spec.hidden)
    if width <= rules.TILE // 2:
        return Backward((width,), rules.TILE // width, hints=hints)
    first = width if width == spec.hidden else width // 2
    rest = spec.hidden - first
    return Backward((first, tile_width(rest)) if rest else (first,), hints=hints)


def column_sum(columns: int) -> ColumnSum:
    return ColumnSum(tile=rules.NARROW_TILE if columns <= rules.NARROW_SUM else rules.WIDE_TILE)


def group_sum(columns: int, slots: int) -> ColumnSum:
    """slots: the blocks that write sums of a group, of which one more may write some."""
    tuned = (config for most, config in rules.GROUP_SUMS if slots <= most)
    return next(tuned, column_sum(columns))


def rope_width(spec: NormSpec) -> int:
    """Columns of a tile of heads: a half of what is rotated, or, if that is little, more."""
    how = spec.rotation
    return max(tile_width(how.dim // 2), tile_width(how.head) // rules.ROPE_TILES)


def _rotated(spec: NormSpec, needs: Needs | None) -> RopeForward | RopeBackward:
    """A thread reads 16 bytes of the widest array at once. So all tiles, of whatever dtype, lie
    alike over the threads; else the tables would pass through shared memory.
    """
    how, width, token = spec.rotation, rope_width(spec), max(spec.hidden, spec.key_hidden)
    form, most, block, hints = rules.ROPE[needs is None]
    both = 2 if how.interleaved else 1  # a thread reads both elements of a pair
    table = ITEM_BYTES[how.table] * (both if how.full else 1)
    elements = max(1, 16 // max(spec.item_bytes * both, table))
    if how.interleaved and not spec.aligned:
        elements = 1  # they do pass through shared memory, element by element
    if needs is not None or spec.by_token:
        elements = min(elements, rules.ROPE_ELEMENTS)
    elif width <= rules.ROPE_NARROW:
        elements = min(elements, rules.ROPE_FORWARD)
    if spec.by_token:
        hints = next(h for columns, h in rules.ROPE_TOKENS if token <= columns)
    # Masks of elements, pairs beside what passes through, and 32 bits take registers.
    masked = not spec.aligned or (how.interleaved and how.dim < how.head)
    blocks = max(1, (hints.occupancy or 1) - (masked or spec.item_bytes > 2))
    hints = replace(hints, occupancy=None if needs is None else blocks)
    if spec.by_token:
        rows = min(elements * hints.threads // width, tile_width(token // how.head))
        return form(max(1, rows), 1, hints)
    tiles = 2 * tile_width(1 + cdiv(how.head - how.dim, 2 * width))  # of a head
    elements = max(1, min(elements, most // tiles))
    heads = min(rules.ROPE_HEADS, (block // 2 if masked else block) // (tiles * elements))
    return form(max(1, elements * hints.threads // width), max(1, heads), hints)


def source(spec: NormSpec, target: Target, needs: Needs | None = None) -> str:
    """The table or rule that the configuration comes from."""
    spec = spec.unquantized if needs else spec.uncast
    if forcing.of_direction("forward" if needs is None else "backward"):
        return "forced"
    tabled = _tabled(spec, target, needs)
    if not tabled:
        return "heuristic, untimed"
    _, op, table = tabled
    timed = "gated_rms_norm" if op == "gate_first" else op
    if spec.gate and timed != f"gated_{spec.norm}_norm":
        return f"{table}, timed as {timed}"
    if spec.modulated and spec.op not in op:
        return f"{table}, timed without modulation"
    if spec.branches:
        return f"{table}, timed without a mask and a scale of the input"
    if needs is None and spec.addend:
        return f"{table}, timed with one residual"
    return table


def operations(spec: NormSpec, needs: Needs | None = None) -> tuple[str, ...]:
    """The operations whose tables serve a forward pass, or, with `needs`, a backward pass: the
    first that has a configuration for its size.

    A norm behind a gate needs more registers with a bias, or with two sums over rows, than the
    tables were tuned for, so that no table serves it. A residual with a gate, and an addend, change
    no table: compiled for sm_90, an addend spills at most 48 bytes more than the table's kernels.
    The table of a backward pass is that of a norm which reads as much and keeps as many sums.
    """
    if spec.gate:
        two_sums = spec.bias if needs is None else needs.sums == 2
        if spec.gate_first:
            return () if two_sums else ("gate_first",)
        return ("gated_layer_norm" if two_sums else "gated_rms_norm",)
    if spec.rotation:
        return (f"{spec.op}, {spec.rotation._replace(positions=None).label}",)
    if needs is None:
        if spec.inner:
            return spec.op, f"{spec.norm}_norm"
        if spec.modulated:
            return _of_modulated(spec)
        return (spec.op,)
    if spec.modulated:
        sums = [f"{needs.sums} sums over all rows"] * bool(needs.sums)
        gate = ["a gate"] * bool(spec.mod_gate)
        return (", ".join([f"{spec.op} by {spec.mod_scale}", *gate, *sums]),)
    norm = "layer_norm" if spec.norm == "layer" or needs.sums == 2 else "rms_norm"
    return (f"add_{norm}" if needs.dsum else norm,)


def _of_modulated(spec: NormSpec) -> tuple[str, ...]:
    added = "add_" if spec.residual else ""
    plain = f"{added}{spec.norm}_norm"
    # Weights, and scales in float32, take registers: the kernels would spill up to 248 bytes.
    wide = spec.weight or spec.bias or "float32" in (spec.mod_scale, spec.mod_shift, spec.mod_gate)
    return (plain,) if wide else (f"{added}{spec.op}", plain)


def operation(spec: NormSpec, needs: Needs | None = None) -> str | None:
    """The operation that the tuner finds a configuration for, or None if no table serves it."""
    return next(iter(operations(spec, needs)), None)


def shipped_op(spec: NormSpec, op: str) -> str:
    """The operation whose shipped table serves an operation that has none for such rows.

    What is added to the normalised rows is one more input. Compiled for sm_90, the configurations
    named here spill at most 32 bytes with it.
    """
    if not spec.skip or not op.endswith("_add"):
        return op
    return f"add_{spec.norm}_norm" if spec.widest_item == 2 else "gated_rms_norm"


def _packs(spec: NormSpec) -> bool:
    """Whether a row can stay in 16 bits: no tensor is wider, and no gate needs it in float32."""
    return spec.widest_item == 2 and spec.gate is None


def _tabled(spec: NormSpec, target: Target, needs: Needs | None) -> tuple[Config, str, str] | None:
    """(configuration, operation, source) from a user's or the shipped table, or None."""
    for op in operations(spec, needs):
        for table in _of_user, _shipped:
            match = table(spec, target, needs, op)
            if match and keeps_order(spec, target, needs, match[0]):
                config, source = match
                return config, op, source
    return None


def keeps_order(spec: NormSpec, target: Target, needs: Needs | None, config: Config) -> bool:
    """Whether a configuration adds up a row as every norm of such rows does (see order.py)."""
    rule = prescribed(spec, target, needs is not None)
    return rule is None or order_by_slices(spec, config) == rule


def _of_user(
    spec: NormSpec, target: Target, needs: Needs | None, op: str
) -> tuple[Config, str] | None:
    """(configuration, source) from a user's table, or None.

    What was measured for one term of dy serves several where nothing was measured for so many: it
    adds up a row in the same order.
    """
    direction, terms = ("backward", needs.terms) if needs else ("forward", 1)
    users = user_table.configs(target.arch)
    for measured, note in ((terms, ""), (1, _untimed(terms))):
        if config := users.get(user_table.Key.of(spec, direction, op, measured)):
            return config, f"user table {user_table.path_of(target.arch)}{note}"
    return None


def _untimed(terms: int) -> str:
    return ", timed with one term of dy" if terms > 1 else ""


def _shipped(
    spec: NormSpec, target: Target, needs: Needs | None, op: str
) -> tuple[Config, str] | None:
    """(configuration, source) from the shipped table, or None."""
    # The shipped tables serve backward rows from 17 elements on, and rows that fill vectors.
    narrow = needs is not None and tile_width(spec.hidden) < 32
    if narrow or not spec.aligned or target.name not in TABLES:
        return None
    table = TABLES[target.name]
    tables = table.forward if needs is None else table.backward
    uneven = table.forward_uneven if needs is None else table.backward_uneven
    for served in dict.fromkeys((op, shipped_op(spec, op))):
        key = served, spec.widest_item
        fitting = (row for row in tables.get(key, ()) if spec.hidden <= row[0])
        largest, config_of_row = next(fitting, (0, None))
        if config_of_row:
            break
    source = f"tuned/{target.name}{_untimed(needs.terms if needs else 1)}"
    source += "" if served == op else f", timed as {served}"
    if of_uneven := _of_uneven(uneven.get(key, ()), spec.hidden, config_of_row):
        config_of_row = of_uneven
    elif needs and (needs.terms > 1 or needs.output):
        for row, least, output, config in table.more.get(key, ()):
            if row == largest and least <= needs.terms and output <= needs.output:
                config_of_row, source = config, f"tuned/{target.name}, untimed"
    return config_of_row and (_for_float16(spec, _fitted(config_of_row, spec.hidden)), source)


def _of_uneven(rows: tuple, hidden: int, config: Config | None) -> Config | None:
    """What serves a row in place of its size's configuration if that leaves the last chunk of the
    row a part of its columns, or None. rows: of the table of such rows.
    """
    if config is None or not config.ends_within_a_chunk(hidden):
        return None
    return next((of_uneven for most, of_uneven in rows if hidden <= most), None)


def _for_float16(spec: NormSpec, config: Config) -> Config:
    """A configuration that was tuned in bfloat16.

    Float16 takes more registers where blocks share a row, each has two segments of it, and the
    kernel reads a residual or a gate: add_rms_norm of 65536 spilled 192 bytes on sm_90. Reading the
    weights again ends the spills. On an H100 and an H200 it took 0.53 and 0.49 of the time there,
    0.98 and 0.95 by gated_rms_norm of 65536, but 1.09 and 1.12 by that of 262144 (2026-11-26).
    """
    two = isinstance(config, Backward) and len(config.widths) > 1 and spec.weight
    gains = spec.residual or (spec.gate and spec.hidden <= rules.GATED_FLOAT16)
    keeps = two and gains and sum(config.widths) < spec.hidden
    return replace(config, reread=True) if keeps and spec.dtype == "float16" else config


def _fitted(config: Config, hidden: int) -> Config:
    """A wider row's configuration, without the segments that a row of `hidden` does not reach."""
    if not config.widths:
        return config
    starts = accumulate(config.widths, initial=0)
    reached = (w for w, start in zip(config.widths, starts, strict=False) if start < hidden)
    return replace(config, widths=tuple(reached))
