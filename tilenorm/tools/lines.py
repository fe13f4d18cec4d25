"""The lines that the commands print. Each line is yielded as soon as it is known."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..launch import user_table
from ..launch.calls import Call
from ..launch.target import Target
from ..spec import NormSpec
from .explain import options_of
from .precompile import Compiled, precompile, training_calls
from .search import HELPERS, compile_candidates, prune
from .shipped import written
from .tune import ordered_candidates, tune, whole_rows

RESOURCES = " regs spill B  smem B"
Searches = Sequence[tuple[NormSpec, str]]  # (spec, direction) of each
Report = Callable[[str], None]


def compiled(
    specs: list[NormSpec],
    target: Target,
    processes: int | None,
    calls: Callable[[NormSpec, Target], list[Call]] = training_calls,
) -> Iterator[str]:
    """Compile each spec into cuTile's cache, and list the kernels with their resources.

    calls: see precompile.precompile.
    """
    results = precompile(specs, target, processes, calls)
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
    terms: int = 1,
) -> Iterator[str]:
    """Compile every candidate, and list which would be timed and why the others would not."""
    for spec, direction in searches:
        configs = ordered_candidates(spec, target, direction, terms)
        search = (spec, target, direction, whole_rows(spec, rows or 65536), configs)
        results = compile_candidates(*search, processes, report, terms)
        reasons = prune(results, target, spills, configs[0])
        timed = sum(reason is None for reason in reasons.values())
        yield (
            f"{_title(spec, terms)} {direction} on {target.arch}:"
            f" {timed} of {len(configs)} to be timed"
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
    terms: int = 1,
) -> Iterator[str]:
    """Tune each spec on this GPU, and write the fastest configuration into the table at a path."""
    for spec, direction in searches:
        title = f"{_title(spec, terms)} {direction}"
        report(title)
        entry = tune(spec, direction, rows, seconds, processes, spills, report, terms)
        user_table.write(path, arch, [entry])
        measured = f"{entry.us} µs, spread {entry.spread:.2%}, {entry.gb_s} GB/s"
        yield f"{title}: {measured}, {entry.samples} samples"
        yield f"  {written(entry.config)}"
    if searches:
        yield f"written to {path}"


def _title(spec: NormSpec, terms: int = 1) -> str:
    return f"{spec.op} {spec.hidden} {spec.dtype} ({options_of(spec, terms)})"


def _resources(kernel: Compiled) -> str:
    return f"{kernel.registers:>5} {kernel.spill_bytes:>7} {kernel.shared_bytes:>7}"
