"""python -m tilenorm info | explain | precompile | tune"""

import argparse
import sys
from itertools import product
from pathlib import Path

from . import __version__
from .launch import user_table
from .launch.target import MULTIPROCESSORS, Target
from .launch.toolchain import cache_folder
from .ops.arguments import ROUNDINGS
from .ops.registry import DTYPES, Device, refusals
from .spec import OPS, NormSpec
from .tools import shipped
from .tools.explain import explain_spec, options_of, planned_device
from .tools.info import information
from .tools.precompile import Compiled, precompile
from .tools.search import MOST_SPILLED, compile_candidates, prune
from .tools.tune import gpu, ordered_candidates, served_op, whole_rows
from .tools.tune import tune as tuned


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
    specs = _served(options, planned_device(options.arch))
    results = precompile(specs, Target.of(options.arch), options.processes)
    for spec, compiled in zip(specs, results, strict=True):
        print(f"{spec.op} {spec.hidden} {spec.dtype} ({options_of(spec)}) for {options.arch}")
        print(f"  {'kernel':<14} {'hints':<40} seconds {RESOURCES}")
        for kernel in compiled:
            name = f"  {kernel.kernel:<14} {kernel.hints:<40} {kernel.seconds:>7.2f}"
            print(f"{name} {_resources(kernel)}")
    return 0


def tune(options: argparse.Namespace) -> int:
    """Find the fastest configuration of each spec on this GPU, for the table that plans read."""
    if not options.hidden and not options.shipped:
        raise RefusedError("--hidden: takes at least one size")
    if options.dry_run:
        return _list_candidates(options)
    if options.arch and options.hidden:
        raise RefusedError("--arch: this GPU is what is tuned for; --dry-run takes another")
    try:
        device = planned_device(options.arch) if options.arch else gpu()
    except RuntimeError as error:
        raise RefusedError(str(error)) from error
    arch = device.target.arch
    path = options.out or user_table.path_of(arch)
    for spec, direction in _searches(options, device):
        title = f"{spec.op} {spec.hidden} {spec.dtype} ({options_of(spec)}) {direction}"
        _report(title)
        limits = (options.rows, options.seconds, options.processes, options.spills)
        entry = tuned(spec, direction, *limits, report=_report)
        user_table.write(path, arch, [entry])
        measured = f"{entry.us} µs, spread {entry.spread:.2%}, {entry.gb_s} GB/s"
        print(f"{title}: {measured}, {entry.samples} samples")
        print(f"  {shipped.written(entry.config)}")
    if options.hidden:
        print(f"written to {path}")
    if options.shipped:
        try:
            print(shipped.render(user_table.read(path, arch), arch), end="")
        except (OSError, ValueError) as error:
            raise RefusedError(f"--shipped: {error}") from error
    return 0


def _list_candidates(options: argparse.Namespace) -> int:
    """What would be timed, and why the rest would not."""
    if not options.arch:
        raise RefusedError("--dry-run: takes an --arch")
    device = planned_device(options.arch)
    for spec, direction in _searches(options, device):
        configs = ordered_candidates(spec, device.target, direction)
        rows = whole_rows(spec, options.rows or 65536)
        how = (spec, device.target, direction)
        compiled = compile_candidates(*how, rows, configs, options.processes, _report)
        reasons = prune(compiled, device.target, options.spills, configs[0])
        timed = sum(reason is None for reason in reasons.values())
        print(f"{spec.op} {spec.hidden} {spec.dtype} ({options_of(spec)}) {direction}", end="")
        print(f" on {options.arch}: {timed} of {len(configs)} to be timed\n  {RESOURCES}")
        for candidate in compiled:
            reason = reasons[candidate.config]
            # Others empty slots, or add up what blocks have of the sums over rows.
            main = [k for k in candidate.kernels if k.kernel == f"norm_{direction}"]
            numbers = _resources(main[0]) if main else " " * 21
            config = shipped.written(candidate.config)
            print(f"  {numbers} {config}{f': {reason}' if reason else ''}")
    return 0


def _searches(options: argparse.Namespace, device: Device) -> list[tuple[NormSpec, str]]:
    """What is to be tuned; refused where no table would serve it."""
    searches = list(product(_served(options, device), options.direction))
    for spec, direction in searches:
        try:
            served_op(spec, direction)
        except ValueError as error:
            raise RefusedError(str(error)) from error
    return searches


RESOURCES = " regs spill B  smem B"


def _resources(kernel: Compiled) -> str:
    return f"{kernel.registers:>5} {kernel.spill_bytes:>7} {kernel.shared_bytes:>7}"


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _served(options: argparse.Namespace, device: Device) -> list[NormSpec]:
    """Specs that the kernels serve, with a cache to compile them into; others are refused."""
    if cache_folder() is None:
        raise RefusedError("cuTile's cache is off (CUDA_TILE_CACHE_DIR): nothing would be kept")
    specs = _specs(options)
    for spec in specs:
        if reason := refusals(spec, 1, device)["cutile"]:
            raise RefusedError(reason)
    return specs


def _specs(options: argparse.Namespace) -> list[NormSpec]:
    affine = options.bias or not options.no_weight
    specs = []
    for op, hidden, dtype in product(options.op, options.hidden, options.dtype):
        if options.residual_dtype and not op.startswith("add_"):
            raise RefusedError(f"--residual-dtype: {op} takes no residual")
        if options.gate_first and not op.startswith("gated_"):
            raise RefusedError(f"--gate-first: {op} takes no gate")
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
        specs.append(NormSpec.of(op, hidden, dtype, **fields))
    return specs


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tilenorm", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True)
    commands.add_parser("info", help=info.__doc__).set_defaults(run=info)
    for name, run in (("explain", explain), ("precompile", compile_ahead), ("tune", tune)):
        tunes = run is tune
        command = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
        command.set_defaults(run=run)
        command.add_argument("--arch", required=not tunes, choices=MULTIPROCESSORS)
        command.add_argument("--op", nargs="+", default=["rms_norm"], choices=OPS)
        size = {"default": []} if tunes else {"required": True}
        command.add_argument("--hidden", type=_positive, nargs="+", metavar="N", **size)
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
        if tunes:
            _add_tuning(command)
    return parser


def _add_tuning(command: argparse.ArgumentParser) -> None:
    both = ("forward", "backward")
    command.add_argument("--direction", nargs="+", default=both, choices=both)
    command.add_argument("--rows", type=_positive, metavar="M", help="default: 64 Mi elements")
    command.add_argument(
        "--seconds", type=_positive, default=20, help="of timing, for each spec and direction"
    )
    command.add_argument(
        "--spills", type=int, default=MOST_SPILLED, help="bytes a thread that a candidate may spill"
    )
    command.add_argument("--out", type=Path, help="default: the table that plans read")
    command.add_argument("--dry-run", action="store_true", help="list candidates; needs no GPU")
    command.add_argument("--shipped", action="store_true", help="print it as launch/tuned/ has it")


def _positive(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, takes a positive number")
    return value


if __name__ == "__main__":
    sys.exit(main())
