"""Where one kernel normalises rows and quantises them, so that q has the bits of the plain norm."""

from dataclasses import replace

from ..kernels.constants import Quant
from ..spec import FP8, NormSpec
from .config import Config, Hints, RowForward, SharedForward
from .target import REGISTERS, Target

# Of the plain norm's operation and the bytes of an element: for which N no occupancy is known that
# keeps the plain norm's order. For float32 from 5121 on none was looked for. All others were
# compiled for sm_90 at three sizes of each entry of its table, with y and without, for scales by
# row, by block and of the caller.
OUT_OF_ORDER = {
    ("layer_norm", 2): range(12289, 32769),
    ("add_layer_norm", 2): range(8193, 16385),
    ("layer_norm", 4): range(4097, 20481),
    ("add_layer_norm", 4): range(5121, 16385),
}
# The occupancy of those that are added up in another order without one, for so many N.
IN_ORDER = {
    ("rms_norm", 2): ((range(20481, 28673), 2),),
    ("add_rms_norm", 2): ((range(4097, 8193), 2),),
    ("add_layer_norm", 2): ((range(1537, 8193), 2), (range(20481, 24577), 2)),
    ("layer_norm", 4): ((range(1537, 3073), 2),),
    ("add_layer_norm", 4): ((range(257, 4097), 2), (range(4097, 5121), 6)),
}
# Where the plain norm's kernel reads the weights with the row, so that its order is prescribed:
# (elements of a thread, at most; registers of a thread), by whether groups have a scale each. More
# blocks on a multiprocessor are faster until they spill. Timed on an H200 (tileiras 13.4.92,
# 2026-11-25) for bfloat16 of 2048, 5120, 8192 and 16384.
FETCHED = {
    False: ((32, 48), (40, 64), (64, 80), (80, 128)),
    True: ((24, 48), (40, 64), (64, 80), (80, 128)),
}
# Where blocks share a row: (elements of a thread, at most; its registers, at least), by norm. Timed
# the same day for rms_norm of bfloat16, 32768 and 65536; the others were only compiled.
SHARED = {"rms": ((32, 72), (64, 96)), "layer": ((32, 96), (64, 128))}
# A thread with more elements keeps rows of 16 bits packed while they are added up.
MOST_UNPACKED = 40
# A thread with more elements keeps y in 16 bits while the largest of a row is found. On the H200,
# rms_norm_quantized of 32768 by row took 98 µs with y in float32, with the best hints, and 78 so.
MOST_OUTPUT_UNPACKED = 32


def _operation(spec: NormSpec) -> tuple[str, int]:
    return spec.unquantized.op, spec.widest_item


def compiled_as(spec: NormSpec, config: Config, free: bool) -> Config:
    """The configuration that the kernel of a quantised norm is compiled with.

    config: the plain norm's. q has to have the plain norm's bits, so that the rows of a tile, its
    segments and its threads are the same. free: the kernel does not prescribe the order in which it
    adds up a row; then the compiler has to choose the same. Otherwise what is read early or kept in
    16 bits, and how many blocks a multiprocessor has, is chosen for the quantised norm, which has
    more instructions and writes less.
    """
    if free:
        return replace(config, hints=_hints_in_order(spec, config))
    elements = _elements(spec, config)
    sixteen = spec.widest_item == 2
    if isinstance(config, SharedForward):
        fewer = _hints(config, _registers(SHARED[spec.norm], elements))
        return replace(config, hints=min(fewer, config.hints, key=_blocks))
    if isinstance(config, RowForward) and config.fetch and not spec.residual:
        wide = elements if sixteen else elements * 1.25  # rows of float32 spill earlier
        hints = _hints(config, _registers(FETCHED[spec.quantized.group > 0], wide))
        packed = sixteen and elements > MOST_UNPACKED
        return replace(config, hints=hints, packed=packed, fetch=False)
    return config


def quant_of(spec: NormSpec, config: Config) -> Quant:
    """The kernel's constants. config: the plain norm's."""
    how, sixteen = spec.quantized, "float32" not in (spec.dtype, spec.skip)
    # Where weights are not read with the row any more, a thread has registers for y.
    fetches = isinstance(config, RowForward) and config.fetch
    return Quant(
        MOST=FP8[how.dtype],
        GROUP=how.group,
        GIVEN=how.scaling == "tensor",
        MX=how.scaling == "mx",
        POWER_OF_2=how.power_of_2,
        PADDED={"column": 1, "column_tma": 4}.get(how.layout, 0),
        SWIZZLED=how.layout == "swizzled",
        OUTPUT=how.output,
        AMAX=how.amax,
        PACKED=sixteen and not fetches and _elements(spec, config) > MOST_OUTPUT_UNPACKED,
    )


def _elements(spec: NormSpec, config: Config) -> float:
    """Elements of a tile for each thread."""
    return config.rows * sum(config.segments(spec.hidden)) / config.hints.threads


def _registers(rows: tuple[tuple[int, int], ...], elements: float) -> int:
    return next((registers for most, registers in rows if elements <= most), rows[-1][1])


def _blocks(hints: Hints) -> int:
    return hints.occupancy or 1


def _hints(config: Config, registers: int) -> Hints:
    """The plain norm's threads, and as many blocks as have so many registers a thread."""
    return replace(config.hints, occupancy=REGISTERS // (registers * config.hints.threads))


def _hints_in_order(spec: NormSpec, config: Config) -> Hints:
    """The hints of a quantised norm whose rows have no prescribed order.

    Its rows have to be added up in the order of the plain norm. The compiler chooses the order, by
    the registers that are left. Without an occupancy it mostly chooses the plain norm's; IN_ORDER
    has the other cases.
    """
    known = IN_ORDER.get(_operation(spec), ())
    occupancy = next((found for sizes, found in known if spec.hidden in sizes), None)
    return replace(config.hints, occupancy=occupancy)


def cast_apart(spec: NormSpec, target: Target, config: Config, free: bool) -> str | None:
    """Why a cast in PyTorch's operations follows the plain norm's kernels, or None where one kernel
    does both.

    free: the kernel does not prescribe the order in which it adds up a row.
    """
    if not target.has_fp8:
        return f"{target.arch}: cuTile has no 8-bit floats before sm_90"
    group = spec.quantized.group
    if group and any(width % group for width in config.segments(spec.hidden)):
        return f"the configuration {config} cuts groups of {group} elements"
    if free and spec.aligned and spec.hidden in OUT_OF_ORDER.get(_operation(spec), ()):
        return "one kernel would add up these rows in another order than the plain norm's"
    return None
