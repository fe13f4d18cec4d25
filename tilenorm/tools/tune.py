"""Tunes on the current GPU: makes inputs, checks the results of plans, and times them."""

import datetime
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..launch import user_table
from ..launch.toolchain import driver_release
from ..launch.user_table import Entry
from ..ops import cutile, reference
from ..spec import NormSpec
from .candidates import Search, written
from .explain import moved_bytes, options_of, token_rows
from .precompile import RESOURCES, arguments, resources_of
from .search import HELPERS, How, compile_candidates, plan_of, prune, rank

ELEMENTS = 1 << 26  # elements of a matrix that is timed
MOST_CHECKED = 1 << 25  # elements of a matrix that is compared with the reference
# The sets of inputs together are this many times as large as the L2, with at most MOST_SETS sets.
L2_MULTIPLE = 4
MOST_SETS = 64
SAMPLE_BYTES = 2_000_000_000  # a sample moves at least this: half a millisecond on an H200
MOST_CALLS = 128


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
            # With early rounding the rounded value may be larger than the result.
            scale = largest if self.spec.rounding == "early" else expected.abs()
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

        found = arguments(self.spec, self.needs, rows, normal)
        if self.needs is None:
            return found
        dy, dsum, saved, *others = found
        pairs = zip(self.spec.kept, saved, strict=True)
        saved = [t.abs() + 0.5 if role.endswith(("mean", "rstd")) else t for role, t in pairs]
        return dy, dsum, saved, *others


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
