"""Where one kernel normalises rows and quantises them, so that q has the bits of the plain norm."""

from dataclasses import replace

from ..spec import NormSpec
from .config import Config, Hints
from .target import Target

# The occupancy of quantised norms that the compiler adds up in another order without one: by the
# plain norm's operation and the bytes of an element, for each N.
IN_ORDER = {
    ("rms_norm", 2): {24576: 2, 28672: 2},
    ("layer_norm", 2): {16384: 4},
    ("add_layer_norm", 2): {8192: 2, 24576: 2},
    ("layer_norm", 4): {3072: 2, 5120: 2, 6144: 2, 7168: 2, 20480: 2},
    ("add_layer_norm", 4): {4096: 2, 5120: 4},
}
# For which N no occupancy gives the plain norm's order, where that norm has one: code compiled for
# sm_90 shows it at 10080, 11648, 12288, 13104, 13824 and 16384.
OUT_OF_ORDER = {("add_layer_norm", 2): range(8193, 16385)}


def _operation(spec: NormSpec) -> tuple[str, int]:
    return spec.unquantized.op, spec.widest_item


def hints_in_order(spec: NormSpec, config: Config) -> Hints:
    """The hints of a quantised norm whose rows have no prescribed order.

    Its rows have to be added up in the order of the plain norm. The compiler chooses the order, by
    the registers that are left. Without an occupancy it mostly chooses the plain norm's, as code
    compiled for sm_90 shows; IN_ORDER has the occupancy of the other cases.
    """
    return replace(config.hints, occupancy=IN_ORDER.get(_operation(spec), {}).get(spec.hidden))


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
    if free and config.hints.occupancy and spec.hidden in OUT_OF_ORDER.get(_operation(spec), ()):
        return "one kernel would add up these rows in another order than the plain norm's"
    return None
