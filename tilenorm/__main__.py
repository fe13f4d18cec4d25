"""Inspect this machine, explain calls, precompile, tune, and compare compiled code."""

import argparse
import sys
from collections.abc import Iterable
from functools import partial
from itertools import product
from pathlib import Path

from . import __version__
from .launch import user_table
from .launch.target import MULTIPROCESSORS, Target
from .launch.toolchain import CUDA_TILE_MISSING, CompileError, cache_problem
from .ops.registry import DTYPES, Device, refusals
from .spec import MAX_TERMS, OPS, QUANTIZED_OPS, WORDS, NormSpec
from .tools import quantization
from .tools.candidates import MOST_SPILLED, served_op
from .tools.explain import explain_spec, gpu, planned_device
from .tools.info import information

TERMS = range(1, MAX_TERMS + 1)  # of dy
COMPILED_TERMS = (1, 2, 3)  # what a compiled step of a transformer makes of q, k, v and of gate, up


def main(argv: list[str] | None = None) -> int:
    """Run a command; the exit status is 0 unless something is wrong."""
    parser = _parser()
    options = parser.parse_args(argv)
    if CUDA_TILE_MISSING and options.run not in (info, explain):
        parser.error(CUDA_TILE_MISSING)
    try:
        return options.run(options)
    except RefusedError as refused:
        parser.error(str(refused))
    except CompileError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1


class RefusedError(Exception):
    """The command cannot run; the message says why."""


def info(_: argparse.Namespace) -> int:
    """Print versions, GPUs, compiler, cache, what serves each op, and what is wrong."""
    text, wrong = information()
    print("\n".join(text))
    return 1 if wrong else 0


def explain(options: argparse.Namespace) -> int:
    """Print the implementation and the launches of each spec on an architecture."""
    for spec in _specs(options):
        print(explain_spec(spec, options.rows, planned_device(options.arch), terms=options.terms))
    return 0


def compile_ahead(options: argparse.Namespace) -> int:
    """Compile each spec into cuTile's cache and print the resources of the kernels."""
    from .tools import lines  # imports cuda.tile, as those of the other commands
    from .tools.precompile import piece_training_calls, training_calls

    specs = _served(options, planned_device(options.arch))
    target, terms = Target.of(options.arch), tuple(options.terms or COMPILED_TERMS)
    calls = partial(training_calls, terms=terms, output=options.output)
    if options.pieces:
        if terms != (1,) or options.output:
            raise RefusedError("--pieces: rows in pieces take one term of dy and no --output")
        calls = piece_training_calls
    return _print(lines.compiled(specs, target, options.processes, calls))


def digests(options: argparse.Namespace) -> int:
    """Print a digest of the code of every plan, to compare before and after a change."""
    from .tools import digests as code

    _check_cache()
    return _print(code.digests(options.arch, options.processes))


def tune(options: argparse.Namespace) -> int:
    """Find the fastest configuration of each spec on this GPU, for the table that plans read."""
    from .tools import lines, shipped

    if not options.hidden and not options.shipped:
        raise RefusedError("--hidden: needs at least one size")
    device = _tuned_device(options)
    searches, target = _searches(options, device), device.target
    if options.dry_run:
        shown = (options.rows, options.processes, options.spills, _report, options.terms)
        return _print(lines.candidates(searches, target, *shown))
    try:
        path = options.out or user_table.path_of(target.arch)
    except FileNotFoundError as error:
        raise RefusedError(str(error)) from error
    limits = (options.rows, options.seconds, options.processes, options.spills)
    _print(lines.tuned(searches, target.arch, path, *limits, _report, options.terms))
    if options.shipped:
        try:
            print(shipped.render(user_table.read(path, target.arch), target.arch), end="")
        except (OSError, ValueError) as error:
            raise RefusedError(f"--shipped: {error}") from error
    return 0


def _tuned_device(options: argparse.Namespace) -> Device:
    """This machine's GPU, or, in a dry run, a GPU of the architecture from --arch."""
    if options.dry_run and not options.arch:
        raise RefusedError("--dry-run: needs --arch")
    if options.arch and options.hidden and not options.dry_run:
        raise RefusedError("--arch: tune times on this GPU; only --dry-run takes an architecture")
    try:
        return planned_device(options.arch) if options.arch else gpu()
    except RuntimeError as error:
        raise RefusedError(str(error)) from error


def _searches(options: argparse.Namespace, device: Device) -> list[tuple[NormSpec, str]]:
    """(spec, direction) of each search. Refuses specs that no table can serve."""
    directions = options.direction
    if options.terms > 1:
        directions = [name for name in directions if name == "backward"]
        if not directions:
            raise RefusedError("--terms: the forward pass takes none; tune --direction backward")
    searches = list(product(_served(options, device), directions))
    for spec, direction in searches:
        try:
            served_op(spec, direction)
        except ValueError as error:
            raise RefusedError(str(error)) from error
    return searches


def _print(text: Iterable[str]) -> int:
    for line in text:
        print(line, flush=True)
    return 0


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _check_cache() -> None:
    if problem := cache_problem():
        raise RefusedError(f"{problem}: nothing would be kept")


def _served(options: argparse.Namespace, device: Device) -> list[NormSpec]:
    """The specs. Refuses specs that the kernels do not serve, and a cache that is off."""
    _check_cache()
    specs = _specs(options)
    for spec in specs:
        if reason := refusals(spec, 1, device)["cutile"]:
            raise RefusedError(reason)
    return specs


def _specs(options: argparse.Namespace) -> list[NormSpec]:
    affine = options.bias or not options.no_weight
    specs = []
    for op, hidden, dtype in product(options.op, options.hidden, options.dtype):
        after = op.endswith("_add")
        if options.residual_dtype and not (after or op.startswith("add_")):
            raise RefusedError(f"--residual-dtype: {op} takes no residual")
        if options.residuals > 1 and not op.startswith("add_"):
            raise RefusedError(f"--residuals: {op} takes no residual")
        branches = {"--dropout-mask": options.dropout_mask, "--layer-scale": options.layer_scale}
        for name in (name for name, given in branches.items() if given):
            if not op.startswith("add_") or op in QUANTIZED_OPS or options.residuals > 1:
                raise RefusedError(f"{name}: {op} takes none, or not with these options")
        if options.gate_first and not op.startswith("gated_"):
            raise RefusedError(f"--gate-first: {op} takes no gate")
        if options.activation and not op.startswith("gated_"):
            raise RefusedError(f"--activation: {op} takes no gate")
        parameter = options.weight_dtype or dtype
        fields = {
            "weight": None if options.no_weight else parameter,
            "bias": parameter if options.bias else None,
            "offset": options.offset,
            # As in a call: one head, or heads without parameters, count as no heads.
            "heads": options.heads if options.heads > 1 and affine else 0,
            "rounding": options.rounding,
            "gate_first": options.gate_first,
            "activation": options.activation or "silu",
            "addend": dtype if options.residuals > 1 else None,
            "dropout_mask": "bool" if options.dropout_mask else None,
            "dropout_scale": options.dropout_mask or 1.0,
            "layer_scale": parameter if options.layer_scale else None,
        }
        if options.residual_dtype:
            fields["skip" if after else "residual"] = options.residual_dtype
        if op in QUANTIZED_OPS:
            try:
                fields["quantized"] = quantization.of_options(options, hidden)
            except ValueError as error:
                raise RefusedError(str(error)) from error
        specs.append(NormSpec.of(op, hidden, dtype, **fields))
    return specs


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tilenorm", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True)

    def add(name: str, run) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
        command.set_defaults(run=run)
        return command

    add("info", info)
    command = add("digests", digests)
    command.add_argument("--arch", required=True, choices=MULTIPROCESSORS)
    _add_processes(command)
    for name, run in (("explain", explain), ("precompile", compile_ahead), ("tune", tune)):
        command = add(name, run)
        command.add_argument("--arch", required=run is not tune, choices=MULTIPROCESSORS)
        _add_spec(command, {"default": []} if run is tune else {"required": True})
        if run is explain:
            command.add_argument("--rows", type=_positive, default=8192, metavar="M")
        else:
            _add_processes(command)
        if run is compile_ahead:
            command.add_argument(
                "--pieces", action="store_true", help="N is what each process holds of a cut row"
            )
            command.add_argument(
                "--terms",
                **{"type": int, "nargs": "*", "choices": TERMS, "default": [1], "metavar": "K"},
                help="terms of dy, for a compiled step; without K: 1 2 3",
            )
            command.add_argument(
                "--output", action="store_true", help="also gradients that write y once more"
            )
        else:
            command.add_argument(
                "--terms", type=int, default=1, choices=TERMS, help="of dy, backward (1)"
            )
        if run is tune:
            _add_tuning(command)
    return parser


def _add_processes(command: argparse.ArgumentParser) -> None:
    command.add_argument("--processes", type=_positive, help="default: all cores")


def _add_spec(command: argparse.ArgumentParser, size: dict) -> None:
    """Add the options that describe specs. size: whether --hidden is required."""
    command.add_argument("--op", nargs="+", default=["rms_norm"], choices=OPS + QUANTIZED_OPS)
    command.add_argument("--hidden", type=_positive, nargs="+", metavar="N", **size)
    command.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=DTYPES)
    command.add_argument("--weight-dtype", choices=DTYPES, help="default: --dtype")
    command.add_argument("--no-weight", action="store_true")
    command.add_argument("--bias", action="store_true", help="with a bias of the weight's dtype")
    command.add_argument("--offset", type=float, default=0.0, help="added to the weight")
    command.add_argument("--heads", type=_positive, default=0, help="each head has its own weight")
    command.add_argument("--rounding", default="late", choices=WORDS["rounding"])
    command.add_argument("--residual-dtype", choices=DTYPES, help="default: --dtype")
    command.add_argument(
        "--residuals", type=int, default=1, choices=(1, 2), help="how many are added to the input"
    )
    command.add_argument(
        "--dropout-mask", type=float, metavar="S", help="the input is times a mask and times S"
    )
    command.add_argument("--layer-scale", action="store_true", help="the input is times a vector")
    command.add_argument("--gate-first", action="store_true", help="gate, then normalise")
    command.add_argument("--activation", choices=WORDS["activation"], help="of the gate (silu)")
    quantization.add_options(command)


def _add_tuning(command: argparse.ArgumentParser) -> None:
    both = ("forward", "backward")
    command.add_argument("--direction", nargs="+", default=both, choices=both)
    command.add_argument("--rows", type=_positive, metavar="M", help="default: 64 Mi elements")
    command.add_argument(
        "--seconds", type=_positive, default=20, help="time for timing each spec and direction"
    )
    command.add_argument(
        "--spills", type=int, default=MOST_SPILLED, help="bytes that each thread may spill"
    )
    command.add_argument("--out", type=Path, help="default: the table that plans read")
    command.add_argument("--dry-run", action="store_true", help="list candidates; needs no GPU")
    command.add_argument(
        "--shipped", action="store_true", help="print the table as in launch/tuned/"
    )


def _positive(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, takes a positive number")
    return value


if __name__ == "__main__":
    sys.exit(main())
