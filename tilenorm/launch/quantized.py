"""How a norm with a quantised output is compiled, so that q has the bits of the plain norm."""

from dataclasses import replace

from ..kernels.constants import Quant
from ..spec import FP8, NormSpec
from .config import Config, RowForward, SharedForward, cdiv
from .order import order_by_slices
from .target import REGISTERS, Target
from .tuned.quantized import (
    FEW_OF_ROWS,
    MANY_ROWS,
    MOST_OUTPUT_UNPACKED,
    MOST_TOGETHER,
    MOST_UNPACKED,
    MOST_UNPACKED_SUM,
    ONE_ROW,
    SHARED,
)


def compiled_as(spec: NormSpec, config: Config, ordered: bool) -> Config:
    """The configuration that the kernel of a quantised norm is compiled with.

    config: that of the plain norm. q has to have the plain norm's bits, so that the rows of a tile,
    its threads and the order of its sums stay the same. A quantised norm has more instructions, and
    writes less. So the other fields are chosen anew: where a row is cut into segments, what is read
    early or kept in 16 bits, and how many blocks a multiprocessor has. Without an occupancy the
    compiler mostly chooses that of the plain norm. ordered: the kernel prescribes the order in
    which it adds up a row.
    """
    if config.rows == 1 and not ordered:
        return _with(config, None)
    if isinstance(config, SharedForward):
        return _sharing(spec, config)
    if isinstance(config, RowForward) and config.rows == 1:
        return _of_one_row(spec, config)
    elements, sixteen = config.elements_of_thread(spec.hidden), spec.widest_item == 2
    if config.rows > 1 and elements > FEW_OF_ROWS and sixteen and not spec.residual:
        return _with(config, _resident(config, MANY_ROWS, elements))
    return config


def _sharing(spec: NormSpec, config: SharedForward) -> SharedForward:
    """The configuration of blocks that share a row."""
    elements = config.elements_of_thread(spec.hidden)
    fewer = _resident(config, SHARED[spec.norm, spec.residual is not None], elements)
    together = config.together if elements <= MOST_TOGETHER else 1
    return _with(config, min(fewer, config.hints.occupancy or 1), together=together)


def _of_one_row(spec: NormSpec, config: RowForward) -> RowForward:
    """The configuration of a block that has a row."""
    sixteen = spec.widest_item == 2
    if sixteen:
        config = _in_slices(spec, config)
    elements = config.elements_of_thread(spec.hidden)
    # Rows of float32, and those with a residual, spill earlier.
    wide = elements * 1.25 ** ((not sixteen) + bool(spec.residual))
    rows = ONE_ROW[spec.quantized.group > 0]
    # Rows of 16 bits are packed there, and those of float32 take all registers.
    fits = sixteen or wide <= rows[-1][0]
    occupancy = _resident(config, rows, wide) if fits else None
    if spec.residual:  # more blocks than the plain norm's were not faster
        plain = config.hints.occupancy
        fewer = min(plain, occupancy or plain) if plain else None
        how = {"packed": elements > MOST_UNPACKED_SUM, "fetch": False} if sixteen else {}
        return _with(config, fewer, **how)
    packed = sixteen and elements > MOST_UNPACKED[spec.quantized.scaling == "row"]
    return _with(config, occupancy, packed=packed, fetch=False)


def _in_slices(spec: NormSpec, config: RowForward) -> RowForward:
    """The configuration with segments of one slice each. A row is added up slice by slice, so that
    the order of its sums stays the same.
    """
    slices = order_by_slices(spec, config).slices
    if len(slices) > 1:
        return config
    return replace(config, widths=(slices[0].width,) * cdiv(spec.hidden, slices[0].width))


def _with(config: Config, occupancy: int | None, **fields) -> Config:
    return replace(config, hints=replace(config.hints, occupancy=occupancy), **fields)


def quant_of(spec: NormSpec, config: Config) -> Quant:
    """The kernel's constants. config: that of the plain norm."""
    how = spec.quantized
    sixteen = "float32" not in (spec.dtype, spec.skip)
    fetches = isinstance(config, RowForward) and config.fetch
    many = config.elements_of_thread(spec.hidden) > MOST_OUTPUT_UNPACKED[fetches]
    return Quant(
        MOST=FP8[how.dtype],
        GROUP=how.group,
        GIVEN=how.scaling == "tensor",
        MX=how.scaling == "mx",
        POWER_OF_2=how.power_of_2,
        PADDED={"column": 1, "column_tma": 4}.get(how.layout, 0),
        SWIZZLED=how.layout == "swizzled",
        PACKED=sixteen and many,
    )


def _resident(config: Config, rows: tuple[tuple[int, int], ...], elements: float) -> int:
    """How many blocks fit on a multiprocessor whose threads have so many elements.

    rows: (most elements of a thread, registers of a thread), in ascending order.
    """
    registers = next((registers for most, registers in rows if elements <= most), rows[-1][1])
    return REGISTERS // (registers * config.hints.threads)


def cast_apart(spec: NormSpec, target: Target, config: Config) -> str | None:
    """Why PyTorch's operations cast what the plain norm's kernels write; None where one kernel does
    both.
    """
    if not target.has_fp8:
        return f"{target.arch}: cuTile has no 8-bit floats before sm_90"
    group = spec.quantized.group
    if group and any(width % group for width in config.segments(spec.hidden)):
        return f"the configuration {config} cuts groups of {group} elements"
    return None
