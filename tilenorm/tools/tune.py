"""Finds the fastest configuration on the current GPU: compiles all, drops those that cannot win,
compares their results with the reference's, and times them.
"""

import datetime
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from ..launch import forced, user_table
from ..launch.config import Config
from ..launch.plan import plan_backward, plan_forward
from ..launch.target import REGISTERS, Target
from ..launch.toolchain import CompileError, driver_release
from ..launch.user_table import Entry
from ..ops.passes import cutile, reference
from ..spec import NormSpec
from .candidates import MOST_SPILLED, Search, written
from .precompile import (
    RESOURCES,
    Compiled,
    Plan,
    arguments,
    calls_of,
    compile_call,
    compiling,
    resources_of,
)
from .specs import moved_bytes, options_of, token_rows

ELEMENTS = 1 << 26  # elements of a matrix that is timed
MOST_CHECKED = 1 << 25  # elements of a matrix that is compared with the reference
# The sets of inputs together are this many times as large as the L2, with at most MOST_SETS sets.
L2_MULTIPLE = 4
MOST_SETS = 64
SAMPLE_BYTES = 2_000_000_000  # a sample moves at least this: half a millisecond on an H200
MOST_CALLS = 128
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
    with forced(config):
        if needs is None:
            return plan_forward(spec, target, True)
        return plan_backward(spec, target, needs)


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


def dry_run(searches: Sequence[Search], how: How) -> Iterator[str]:
    """Compile every candidate, and list which would be timed and why the others would not."""
    for search in searches:
        configs = search.configs
        rows = whole_rows(search.spec, how.rows or 65536)
        results = compile_candidates(search, rows, configs, how)
        reasons = prune(results, search.target, how.spilled, configs[0])
        timed = sum(reason is None for reason in reasons.values())
        yield f"{search} on {search.target.arch}: {timed} of {len(configs)} to be timed"
        yield f"  {RESOURCES}"
        for candidate in results:
            reason = reasons[candidate.config]
            main = [kernel for kernel in candidate.kernels if kernel.kernel not in HELPERS]
            numbers = resources_of(main[0]) if main else " " * 21
            yield f"  {numbers} {written(candidate.config)}{f': {reason}' if reason else ''}"


def tuned(searches: Sequence[Search], path: Path, how: How) -> Iterator[str]:
    """Tune on this GPU, and write the fastest configurations into the table at a path."""
    for search in searches:
        how.report(str(search))
        entry = tune(search, how)
        user_table.write(path, search.target.arch, [entry])
        measured = f"{entry.us} µs, spread {entry.spread:.2%}, {entry.gb_s} GB/s"
        yield f"{search}: {measured}, {entry.samples} samples"
        yield f"  {written(entry.config)}"
    if searches:
        yield f"written to {path}"


class Trials:
    """Inputs for the plans of a search, on a device.

    There are so many sets of inputs that every call finds a cold L2. One more set, of `checked`
    rows, serves to compare results with the reference. `run` launches the calls of a plan.
    """

    def __init__(
        self,
        search: Search,
        rows: int,
        checked: int,
        device: torch.device,
        run: cutile.Run = cutile.on_device,
    ):
        self.spec, self.needs, self._run = search.spec, search.needs, run
        self.bytes = moved_bytes(search.spec, rows, search.terms)[self.needs is not None]
        copies, self._pool = 1, None
        if device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()  # nobody reads the results of two graphs
            l2 = torch.cuda.get_device_properties(device).L2_cache_size
            copies = min(MOST_SETS, max(2, -(-L2_MULTIPLE * l2 // self.bytes)))
        generator = torch.Generator(device).manual_seed(0)
        self._sets = [self._inputs(rows, device, generator) for _ in range(copies)]
        self._checked = self._inputs(checked, device, generator)
        if self.needs is None:
            expected = reference.bind_forward(self.spec)
        else:
            expected = reference.bind_backward(self.spec, self.needs)
        self._expected = expected(*self._checked)

    def wrong(self, plan) -> str | None:
        """How the results of a plan differ from the reference, or None if only by rounding."""
        for number, (got, expected) in enumerate(
            zip(cutile.bind(plan, self._run)(*self._checked), self._expected, strict=True)
        ):
            if got is None:
                continue
            got, expected, dtype = got.float(), expected.float(), expected.dtype
            # Both results are rounded, so two units of the dtype, and the error of float32 sums.
            largest = expected.abs().max()
            # What is rounded before an addition, or early, may be larger than the result.
            early = self.spec.rounding == "early" or self.spec.skip
            scale = largest if early else expected.abs()
            budget = 2 * torch.finfo(dtype).eps * scale + 1e-5 * largest
            outside = ~((got - expected).abs() <= budget)
            if outside.any():
                return f"result {number} differs from the reference in {int(outside.sum())} places"
        return None

    def sampler(self, plan) -> Callable[[], float]:
        """A function that returns microseconds of a call. It replays a CUDA graph of several calls,
        so that the GPU never waits for the host.
        """
        copies = len(self._sets)
        calls = min(MOST_CALLS, -(-SAMPLE_BYTES // self.bytes) + copies - 1) // copies * copies
        call = cutile.bind(plan, self._run)
        kept: list = [None] * copies  # keeps results alive, so that the next call writes elsewhere
        kept[0] = call(*self._sets[0])  # may load code, which a graph cannot capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            for i in range(calls):
                kept[i % copies] = call(*self._sets[i % copies])
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def sample() -> float:
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) * 1e3 / calls

        return sample

    def _inputs(self, rows: int, device, generator) -> tuple:

        def normal(dtype: str, *shape: int) -> Tensor:
            kind = getattr(torch, dtype)
            return torch.randn(shape, generator=generator, device=device, dtype=kind)

        tensors_and_eps = arguments(self.spec, self.needs, rows, normal)
        if self.needs is None:
            return tensors_and_eps
        tensors, eps = tensors_and_eps
        roles = ("dy", "dsum", *self.spec.kernel_reads)
        positive = [i for i, role in enumerate(roles) if role.endswith(("mean", "rstd"))]
        return tuple([t.abs() + 0.5 if i in positive else t for i, t in enumerate(tensors)]), eps


def tune(search: Search, how: How) -> Entry:
    """The fastest configuration on the current GPU, which is search.target, with its measurement.

    Without how.rows the timed input has 64 Mi elements, or fewer if memory is short.
    Raises ValueError if no table serves the spec. Raises RuntimeError if no candidate compiles or
    gives right results, if the time is too short, or if cuTile's cache is off.
    """
    spec, target, report, key = search.spec, search.target, how.report, search.key()
    index, name = torch.cuda.current_device(), f"{spec.op} {spec.hidden}"
    rows = whole_rows(spec, how.rows or _rows_in_memory(spec, search.terms))
    before, *_ = configs = search.configs
    compiled = compile_candidates(search, rows, configs, how)
    reasons = prune(compiled, target, how.spilled, before)
    timed = {c.config: c for c in compiled if reasons[c.config] is None}
    report(f"{len(timed)} of {len(configs)} to be timed")
    if not timed:
        raise RuntimeError(f"{name}: {reasons[before]}")
    # Every block of a persistent grid handles two tiles.
    tiles = max((c.hints.occupancy or 1) * c.rows for c in timed)
    most = min(2 * target.multiprocessors * tiles + 16, MOST_CHECKED // spec.hidden)
    checked = min(rows, whole_rows(spec, most))
    trials = Trials(search, rows, checked, torch.device("cuda", index))
    plans = {config: plan_of(search, config) for config in timed}
    for config, plan in list(plans.items()):
        try:
            reason = trials.wrong(plan)
        except RuntimeError as error:  # the driver refuses the launch
            reason = f"does not run: {error}"
        if reason:
            report(f"dropped {written(config)}: {reason}")
            del plans[config]
    if not plans:
        raise RuntimeError(f"{name}: no candidate gives the reference's results")
    samplers = {config: trials.sampler(plan) for config, plan in plans.items()}
    for sample in samplers.values():
        sample()  # not counted: an idle GPU is slow at first
    ranking = rank(list(samplers), lambda config: samplers[config](), how.seconds, report)
    if not ranking:
        raise RuntimeError(f"{name}: {how.seconds} s are too short to time anything")
    config, best = ranking[0]
    if then := dict(ranking).get(before):
        report(f"{best.us:.2f} µs; before, {then.us:.2f} µs by {written(before)}")
    kernels = timed[config].kernels
    return Entry(
        key=key,
        config=config,
        us=round(best.us, 3),
        spread=round(best.spread_us / best.us, 4),
        samples=best.samples,
        gb_s=round(trials.bytes / best.us / 1e3, 1),
        rows=rows,
        spec=f"{name} {spec.dtype}, {options_of(spec, search.terms)}",
        registers={kernel.kernel: kernel.registers for kernel in kernels},
        spills={kernel.kernel: kernel.spill_bytes for kernel in kernels if kernel.spill_bytes},
        gpu=torch.cuda.get_device_name(index),
        driver=driver_release(),
        date=datetime.date.today().isoformat(),
    )


def whole_rows(spec: NormSpec, rows: int) -> int:
    """Round rows down to whole tokens and a multiple of 16 (for which candidates compile)."""
    unit = 16 * token_rows(spec)
    return max(1, rows // unit) * unit


def _rows_in_memory(spec: NormSpec, terms: int) -> int:
    """The rows of ELEMENTS elements, or fewer: two sets of inputs and outputs have to fit in half
    of the free memory.
    """
    torch.cuda.empty_cache()  # frees what the previous search used
    free, _ = torch.cuda.mem_get_info()
    row = max(moved_bytes(spec, 1 << 20, terms)) >> 20
    return min(ELEMENTS // spec.hidden, free // (4 * row))
