"""The options of the command line that say how a norm's output is quantised."""

import argparse

from ..spec import FP8, GROUPS, LAYOUTS, Quantization


def add_options(command: argparse.ArgumentParser) -> None:
    layouts = sorted({layout for found in LAYOUTS.values() for layout in found})
    command.add_argument("--scaling", default="row", choices=GROUPS, help="of a quantised norm")
    command.add_argument("--fp8", default="float8_e4m3fn", choices=FP8, help="what it writes")
    command.add_argument("--power-of-2", action="store_true", help="its scales are powers of two")
    command.add_argument("--layout", choices=layouts, help="of its scales")
    command.add_argument("--return-output", action="store_true", help="it writes y too")


def of_options(options: argparse.Namespace, hidden: int) -> Quantization:
    """What the options ask for, of rows of `hidden` elements.

    Raises ValueError where they do not fit each other.
    """
    scaling, group = options.scaling, GROUPS[options.scaling] or 1
    layout = options.layout or LAYOUTS[scaling][0]
    if layout not in LAYOUTS[scaling]:
        takes = " or ".join(LAYOUTS[scaling])
        raise ValueError(f"--layout: takes {takes} with --scaling {scaling}, got {layout}")
    if hidden % group:
        raise ValueError(f"--hidden: takes a multiple of {group} with --scaling {scaling}")
    if options.power_of_2 and scaling not in ("row", "block"):
        raise ValueError("--power-of-2: takes --scaling row or block")
    given = (options.fp8, options.power_of_2, layout, options.return_output)
    return Quantization(scaling, *given)
