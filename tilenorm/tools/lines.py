"""The lines that the commands print. Each line is yielded as soon as it is known."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..launch import user_table
from ..launch.target import Target
from ..spec import NormSpec
from .explain import options_of
from .precompile import Compiled, piece_training_calls, precompile
from .search import HELPERS, compile_candidates, prune
from .shipped import written
from .tune import ordered_candidates, tune, whole_rows

RESOURCES = " regs spill B  smem B"
Searches = Sequence[tuple[NormSpec, str]]  # (spec, direction) of each
Report = Callable[[str], None]


def compiled(
    specs: list[NormSpec], target: Target, processes: int | None, pieces: bool = False
) -> Iterator[str]:
    """Compile each spec into cuTile's cache, and list the kernels with their resources.

    pieces: the kernels for pieces of rows (see precompile.piece_training_calls).
    """
    results = precompile(specs, target, processes, *[piece_training_calls] * pieces)
    for spec, kernels in zip(specs, results, strict=True):
        yield f"{_title(spec)} for {target.arch}"
        yield f"  {'kernel':<14} {'hints':<40} seconds {RESOURCES}"
        for kernel in kernels:
            name = f"  {kernel.kernel:<14} {kernel.hints:<40} {kernel.seconds:>7.2f}"
            yield f"{name} {_resources(kernel)}"


def candidates(
    searches: Searches,
    target: Target,
    rows: int | None,
    processes: int | None,
    spills: int,
    report: Report,
) -> Iterator[str]:
    """Compile every candidate, and list which would be timed and why the others would not."""
    for spec, direction in searches:
        configs = ordered_candidates(spec, target, direction)
        search = (spec, target, direction, whole_rows(spec, rows or 65536), configs)
        results = compile_candidates(*search, processes, report)
        reasons = prune(results, target, spills, configs[0])
        timed = sum(reason is None for reason in reasons.values())
        yield (
            f"{_title(spec)} {direction} on {target.arch}: {timed} of {len(configs)} to be timed"
        )
        yield f"  {RESOURCES}"
        for candidate in results:
            reason = reasons[candidate.config]
            main = [k for k in candidate.kernels if k.kernel not in HELPERS]
            numbers = _resources(main[0]) if main else " " * 21
            yield f"  {numbers} {written(candidate.config)}{f': {reason}' if reason else ''}"


def tuned(
    searches: Searches,
    arch: str,
    path: Path,
    rows: int | None,
    seconds: float,
    processes: int | None,
    spills: int,
    report: Report,
) -> Iterator[str]:
    """Tune each spec on this GPU, and write the fastest configuration into the table at a path."""
    for spec, direction in searches:
        title = f"{_title(spec)} {direction}"
        report(title)
        entry = tune(spec, direction, rows, seconds, processes, spills, report=report)
        user_table.write(path, arch, [entry])
        measured = f"{entry.us} µs, spread {entry.spread:.2%}, {entry.gb_s} GB/s"
        yield f"{title}: {measured}, {entry.samples} samples"
        yield f"  {written(entry.config)}"
    if searches:
        yield f"written to {path}"


def _title(spec: NormSpec) -> str:
    return f"{spec.op} {spec.hidden} {spec.dtype} ({options_of(spec)})"


def _resources(kernel: Compiled) -> str:
    return f"{kernel.registers:>5} {kernel.spill_bytes:>7} {kernel.shared_bytes:>7}"
