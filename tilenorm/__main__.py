"""python -m tilenorm info | explain | precompile"""

import argparse
import sys

from . import __version__
from .launch.precompile import Compiled, precompile
from .launch.target import MULTIPROCESSORS, Target
from .launch.toolchain import cache_folder
from .ops.arguments import ROUNDINGS
from .ops.explain import explain_spec, options_of, planned_device
from .ops.info import information
from .ops.registry import DTYPES, refusals
from .spec import OPS, NormSpec


def main(argv: list[str] | None = None) -> int:
    """Run a command; the exit status is 0 unless something is wrong."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        return options.run(options)
    except RefusedError as refused:
        parser.error(str(refused))


class RefusedError(Exception):
    """What was asked for cannot be done, and why."""


def info(_: argparse.Namespace) -> int:
    """Print versions, GPUs, compiler, cache, what serves each op, and what is wrong."""
    lines, wrong = information()
    print("\n".join(lines))
    return 1 if wrong else 0


def explain(options: argparse.Namespace) -> int:
    """Print the implementation and the launches of each spec on an architecture."""
    for spec in _specs(options):
        print(explain_spec(spec, options.rows, planned_device(options.arch)))
    return 0


def compile_ahead(options: argparse.Namespace) -> int:
    """Compile each spec into cuTile's cache and print what came of it."""
    if cache_folder() is None:
        raise RefusedError("cuTile's cache is off (CUDA_TILE_CACHE_DIR): nothing would be kept")
    specs = _specs(options)
    for spec in specs:
        if reason := refusals(spec, 1, planned_device(options.arch))["cutile"]:
            raise RefusedError(reason)
    for spec in specs:
        print(f"{spec.op} {spec.hidden} {spec.dtype} ({options_of(spec)}) for {options.arch}")
        print(f"  {'kernel':<14} {'hints':<40} seconds  regs spill B  smem B")
        for compiled in precompile(spec, Target.of(options.arch), options.processes):
            print(_row(compiled))
    return 0


def _row(c: Compiled) -> str:
    read = [str(v) if v is not None else "?" for v in (c.registers, c.spill_bytes, c.shared_bytes)]
    numbers = f"{c.seconds:>7.2f} {read[0]:>5} {read[1]:>7} {read[2]:>7}"
    return f"  {c.kernel:<14} {c.hints:<40} {numbers}"


def _specs(options: argparse.Namespace) -> list[NormSpec]:
    if options.residual_dtype and not options.op.startswith("add_"):
        raise RefusedError(f"--residual-dtype: {options.op} takes no residual")
    if options.gate_first and not options.op.startswith("gated_"):
        raise RefusedError(f"--gate-first: {options.op} takes no gate")
    affine = options.bias or not options.no_weight
    specs = []
    for hidden in options.hidden:
        for dtype in options.dtype:
            parameter = options.weight_dtype or dtype
            fields = {
                "weight": None if options.no_weight else parameter,
                "bias": parameter if options.bias else None,
                "offset": options.offset,
                # As a call has it: one head, or heads without parameters, are none.
                "heads": options.heads if options.heads > 1 and affine else 0,
                "rounding": options.rounding,
                "gate_first": options.gate_first,
            }
            if options.residual_dtype:
                fields["residual"] = options.residual_dtype
            specs.append(NormSpec.of(options.op, hidden, dtype, **fields))
    return specs


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tilenorm", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True)
    commands.add_parser("info", help=info.__doc__).set_defaults(run=info)
    for name, run in (("explain", explain), ("precompile", compile_ahead)):
        command = commands.add_parser(name, help=run.__doc__)
        command.set_defaults(run=run)
        command.add_argument("--arch", required=True, choices=MULTIPROCESSORS)
        command.add_argument("--op", default="rms_norm", choices=OPS)
        command.add_argument("--hidden", type=_positive, nargs="+", required=True, metavar="N")
        command.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=DTYPES)
        command.add_argument("--weight-dtype", choices=DTYPES, help="default: as --dtype")
        command.add_argument("--no-weight", action="store_true")
        command.add_argument("--bias", action="store_true", help="with a bias, dtype as the weight")
        command.add_argument("--offset", type=float, default=0.0, help="added to the weight")
        command.add_argument("--heads", type=_positive, default=0, help="with a weight each")
        command.add_argument("--rounding", default="late", choices=ROUNDINGS)
        command.add_argument("--residual-dtype", choices=DTYPES, help="default: as --dtype")
        command.add_argument("--gate-first", action="store_true", help="gate, then normalise")
        if run is explain:
            command.add_argument("--rows", type=_positive, default=8192, metavar="M")
        else:
            command.add_argument("--processes", type=_positive, help="default: all cores")
    return parser


def _positive(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, takes a positive number")
    return value


if __name__ == "__main__":
    sys.exit(main())
