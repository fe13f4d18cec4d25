"""Finds the fastest configuration: compiles all, drops those that cannot win, times the rest.

This module needs no GPU: the caller passes a function that times a configuration.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ..launch.config import Config
from ..launch.plan import ForwardPlan, backward_kind, backward_spec
from ..launch.rope import RopeForwardPlan
from ..launch.target import REGISTERS, Target
from ..launch.toolchain import CompileError
from .candidates import MOST_SPILLED, Search, written
from .precompile import Compiled, Plan, calls_of, compile_call, compiling

# Kernels that run before and after the norm's kernel.
HELPERS = ("clear_slots", "column_sum", "group_sum")
FIRST_SAMPLES, MOST_SAMPLES = 3, 200
ENOUGH_SAMPLES = 12  # with fewer samples the spread does not tell two choices apart
HOPELESS = 1.3  # times the fastest; a slower choice is dropped

Choice = TypeVar("Choice")


@dataclass(frozen=True)
class How:
    """How to search. rows: of the timed input; None is as many as fit. seconds: for timing, after
    compiling. processes: that compile; None is all cores. spilled: bytes that a thread may spill.
    report: called with each line of progress.
    """

    rows: int | None = None
    seconds: float = 20.0
    processes: int | None = None
    spilled: int = MOST_SPILLED
    report: Callable[[str], None] = lambda _: None


@dataclass(frozen=True)
class Candidate:
    """A configuration and its compiled kernels. failed: why it does not compile, or None. together:
    how many blocks of the norm's kernel have to run side by side on a multiprocessor.
    """

    config: Config
    kernels: tuple[Compiled, ...] = ()
    grids: tuple[tuple[int, ...], ...] = ()
    together: int = 1
    failed: str | None = None

    @property
    def spilled(self) -> int:
        return max(kernel.spill_bytes for kernel in self.kernels)


@dataclass(frozen=True)
class Measured:
    """Median of the samples, and their 80th minus their 20th percentile, in microseconds."""

    us: float
    spread_us: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Measured":
        if len(samples) == 1:
            return cls(samples[0], 0.0, 1)
        low, *_, high = statistics.quantiles(samples, n=5, method="inclusive")
        return cls(statistics.median(samples), high - low, len(samples))


def plan_of(search: Search, config: Config) -> Plan:
    """The plan of a training step with this configuration instead of the chosen one."""
    spec, target, needs = search.spec, search.target, search.needs
    if needs is None:
        forward = RopeForwardPlan if spec.rotation else ForwardPlan
        return forward(spec, target, config, True)
    return backward_kind(spec)(backward_spec(spec, needs), target, config, needs)


def compile_candidates(
    search: Search, rows: int, configs: list[Config], how: How
) -> list[Candidate]:
    """Compile each configuration for `rows` contiguous rows into cuTile's cache."""
    compiled = []
    with compiling(partial(_compiled, search, rows), configs, how.processes) as results:
        for candidate in results:
            compiled.append(candidate)
            if len(compiled) % 20 == 0 or len(compiled) == len(configs):
                how.report(f"compiled {len(compiled)} of {len(configs)}")
    return compiled


def prune(
    candidates: list[Candidate],
    target: Target,
    spilled: int = MOST_SPILLED,
    keep: Config | None = None,
) -> dict[Config, str | None]:
    """The reason why each configuration is not timed, or None if it is timed.

    spilled: bytes that a thread may spill. If all spill more, those that spill least are timed.
    keep: this configuration is timed although it spills or its blocks wait for each other.
    """
    reasons = {
        c.config: c.failed or _too_large(c, target, 1 if c.config == keep else c.together)
        for c in candidates
    }
    fitting = [c for c in candidates if not reasons[c.config]]
    most = max(spilled, min((c.spilled for c in fitting), default=0))
    first = {}
    for candidate in fitting:
        code = (candidate.grids, *(kernel.code for kernel in candidate.kernels))
        if candidate.spilled > most and candidate.config != keep:
            reasons[candidate.config] = f"spills {candidate.spilled} bytes a thread"
        elif first.setdefault(code, candidate) is not candidate:
            reasons[candidate.config] = f"same code as {written(first[code].config)}"
    return reasons


def rank(
    choices: Sequence[Choice],
    sample: Callable[[Choice], float],
    seconds: float,
    report: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> list[tuple[Choice, Measured]]:
    """(choice, measurement), the fastest first, by successive halving.

    sample(choice) returns one time in microseconds. Each round doubles the samples of each choice
    and keeps the faster half. Choices are sampled in turns, so that changes of the GPU's clock
    affect all. The search ends when the two fastest differ by more than their spread, after
    MOST_SAMPLES samples, or when the time is over. A choice without a sample is left out.
    """
    deadline = clock() + seconds
    taken, measured = {choice: [] for choice in choices}, {}
    alive, count = list(choices), FIRST_SAMPLES
    while alive:
        for choice in alive * count:
            if late := clock() >= deadline:
                break
            taken[choice].append(sample(choice))
        measured = {c: Measured.of(samples) for c, samples in taken.items() if samples}
        alive = sorted((c for c in alive if c in measured), key=lambda c: measured[c].us)
        if alive:
            best = measured[alive[0]]
            report(f"{len(alive)} left after {best.samples} samples, best {best.us:.2f} µs")
        if late or _settled([measured[c] for c in alive[:2]]):
            break
        count = len(taken[alive[0]])
        hopeful = [c for c in alive if measured[c].us <= HOPELESS * best.us]
        alive = hopeful[: max(2, (len(alive) + 1) // 2)]
    dropped = [c for c in measured if c not in alive]
    dropped.sort(key=lambda c: (-measured[c].samples, measured[c].us))
    return [(choice, measured[choice]) for choice in (*alive, *dropped)]


def _settled(fastest: list[Measured]) -> bool:
    """Whether the fastest of (at most) two choices is certain."""
    if len(fastest) < 2:
        return True
    best, second = fastest
    if best.samples >= MOST_SAMPLES:
        return True
    apart = second.us - best.us > max(best.spread_us, second.spread_us)
    return apart and min(best.samples, second.samples) >= ENOUGH_SAMPLES


def _compiled(search: Search, rows: int, config: Config) -> Candidate:
    """Runs in a worker. Kernels cannot be pickled, so the worker makes the calls itself."""
    plan = plan_of(search, config)
    calls = calls_of(plan, rows)
    try:
        kernels = tuple(compile_call(call, search.target.arch) for call in calls)
    except CompileError as error:
        return Candidate(config, failed=f"does not compile: {str(error).partition(chr(10))[0]}")
    # In a persistent grid whose blocks share rows, blocks wait for those that do not fit.
    waits = search.needs is not None and plan.chunks > 1
    together = (config.hints.occupancy or 1) if waits else 1
    return Candidate(config, kernels, tuple(call.grid for call in calls), together)


def _too_large(candidate: Candidate, target: Target, together: int) -> str | None:
    """The reason why the blocks do not fit on a multiprocessor, or None.

    One block of each helper kernel and `together` blocks of the norm's kernel have to fit. Only
    persistent blocks that share rows have to fit `occupancy` at a time. A grid with more blocks
    than fit at once can otherwise be the fastest.
    """
    for kernel in candidate.kernels:
        blocks = together if kernel.kernel not in HELPERS else 1
        registers = kernel.threads * kernel.registers
        if blocks * registers > REGISTERS:
            return f"{blocks} × {registers} registers a block, of {REGISTERS}"
        if blocks * kernel.shared_bytes > target.shared_bytes:
            return f"{blocks} × {kernel.shared_bytes} shared bytes, of {target.shared_bytes}"
    return None
