"""Where one kernel normalises rows and quantises them, so that q has the bits of the plain norm."""

from dataclasses import replace

from ..spec import NormSpec
from .config import Config, Hints
from .target import Target

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
    ("add_rms_norm", 2): ((range(4097, 8192), 2),),
    ("add_layer_norm", 2): ((range(1537, 8193), 2), (range(20481, 24577), 2)),
    ("layer_norm", 4): ((range(1537, 3073), 2),),
    ("add_layer_norm", 4): ((range(257, 4097), 2), (range(4097, 5121), 6)),
}


def _operation(spec: NormSpec) -> tuple[str, int]:
    return spec.unquantized.op, spec.widest_item


def hints_in_order(spec: NormSpec, config: Config) -> Hints:
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
