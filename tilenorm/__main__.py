"""Inspect this machine, explain calls, precompile, tune, and compare compiled code."""

import argparse
import sys
from collections.abc import Iterable
from functools import partial

from . import __version__
from .launch import user_table
from .launch.target import TARGETS, Target
from .launch.toolchain import CompileError, cuda_tile_missing
from .tools import options
from .tools.explain import explain_spec, planned_device
from .tools.info import information
from .tools.options import RefusedError

COMPILED_TERMS = (1, 2, 3)  # what a compiled step of a transformer makes of q, k, v and of gate, up


def main(argv: list[str] | None = None) -> int:
    """Run a command; the exit status is 0 unless something is wrong."""
    parser = _parser()
    asked = parser.parse_args(argv)
    if asked.run not in (info, explain) and (missing := cuda_tile_missing()):
        parser.error(missing)
    try:
        return asked.run(asked)
    except RefusedError as refused:
        parser.error(str(refused))
    except CompileError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1


def info(_: argparse.Namespace) -> int:
    """Print versions, GPUs, compiler, cache, what serves each op, and what is wrong."""
    text, wrong = information()
    print("\n".join(text))
    return 1 if wrong else 0


def explain(asked: argparse.Namespace) -> int:
    """Print the implementation and the launches of each spec on an architecture."""
    device = planned_device(asked.arch)
    return _print(
        str(explain_spec(spec, asked.rows, device, terms=asked.terms))
        for spec in options.specs_of(asked)
    )


def compile_ahead(asked: argparse.Namespace) -> int:
    """Compile each spec into cuTile's cache and print the resources of the kernels."""
    from .tools import precompile  # imports cuda.tile, as those of the other commands

    specs = options.served(asked, planned_device(asked.arch))
    terms = tuple(asked.terms or COMPILED_TERMS)
    calls = partial(precompile.training_calls, terms=terms, output=asked.output)
    return _print(precompile.listed(specs, Target.of(asked.arch), asked.processes, calls))


def digests(asked: argparse.Namespace) -> int:
    """Print a digest of the code of every plan, to compare before and after a change."""
    from .tools.dev import digests as code

    options.check_cache()
    return _print(code.digests(asked.arch, asked.processes))


def build(asked: argparse.Namespace) -> int:
    """Compile the part of tilenorm that serves repeated calls, for this PyTorch and this Python."""
    from .ops.passes.native.build import BuildError
    from .ops.passes.native.build import build as build_extension

    try:
        build_extension(partial(print, flush=True), asked.aside)
    except BuildError as error:
        raise RefusedError(f"build: {error}") from error
    return 0


def tune(asked: argparse.Namespace) -> int:
    """Find the fastest configuration of each spec on this GPU, for the table that plans read."""
    from .tools import tune as tuning

    device = options.tuned_device(asked)
    searches, arch = options.searches(asked, device), device.target.arch
    report = partial(print, file=sys.stderr, flush=True)
    how = tuning.How(asked.rows, asked.seconds, asked.processes, asked.spills, report)
    if asked.dry_run:
        return _print(tuning.dry_run(searches, how))
    try:
        path = asked.out or user_table.path_of(arch)
    except FileNotFoundError as error:
        raise RefusedError(str(error)) from error
    _print(tuning.tuned(searches, path, how))
    return _shipped(path, arch) if asked.shipped else 0


def _shipped(path, arch: str) -> int:
    """Print a user's table as in launch/tuned/."""
    from .tools.dev import shipped

    try:
        print(shipped.render(user_table.read(path, arch), arch), end="")
    except (OSError, ValueError) as error:
        raise RefusedError(f"--shipped: {error}") from error
    return 0


def _print(text: Iterable[str]) -> int:
    for line in text:
        print(line, flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tilenorm", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True)

    def add(name: str, run, *added, needs_arch: bool = True) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
        command.set_defaults(run=run)
        if added:
            command.add_argument("--arch", required=needs_arch, choices=TARGETS)
        for add_options in added:
            add_options(command)
        return command

    spec = partial(options.add_spec, size={"required": True})
    add("info", info)
    options.add_aside(add("build", build))
    add("digests", digests, options.add_processes)
    add("explain", explain, spec, options.add_rows, options.add_terms)
    ahead = (spec, options.add_processes, options.add_calls)
    add("precompile", compile_ahead, *ahead)
    any_size = partial(options.add_spec, size={"default": []})
    tuning = (any_size, options.add_processes, options.add_terms, options.add_tuning)
    add("tune", tune, *tuning, needs_arch=False)
    return parser


if __name__ == "__main__":
    sys.exit(main())
