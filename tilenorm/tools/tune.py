"""Tunes on the current GPU: makes inputs, checks the results of plans, and times them."""

import datetime
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..launch import heuristics, user_table
from ..launch.calls import every_gradient
from ..launch.config import Config
from ..launch.target import Target
from ..launch.toolchain import driver_release
from ..launch.user_table import Entry, Key
from ..ops import cutile, reference
from ..ops.tensors import Saved, Tensors, trimmed
from ..spec import NormSpec
from .candidates import candidates, explicit, served_op, written
from .explain import gpu, moved_bytes, options_of, title
from .precompile import RESOURCES, Compiled, resources_of
from .search import HELPERS, How, compile_candidates, plan_of, prune, rank

EPS = 1e-6
ELEMENTS = 1 << 26  # elements of a matrix that is timed
MOST_CHECKED = 1 << 25  # elements of a matrix that is compared with the reference
# The sets of inputs together are this many times as large as the L2, with at most MOST_SETS sets.
L2_MULTIPLE = 4
MOST_SETS = 64
SAMPLE_BYTES = 2_000_000_000  # a sample moves at least this: half a millisecond on an H200
MOST_CALLS = 128
HEAD_START = 60_000  # GPU cycles (30 µs) for each call: the host queues a call faster


def dry_run(searches: Sequence[tuple[NormSpec, str]], target: Target, how: How) -> Iterator[str]:
    """Compile every candidate, and list which would be timed and why the others would not."""
    for spec, direction in searches:
        configs = ordered_candidates(spec, target, direction, how.terms)
        rows = whole_rows(spec, how.rows or 65536)
        results = compile_candidates(spec, target, direction, rows, configs, how)
        reasons = prune(results, target, how.spilled, configs[0])
        timed = sum(reason is None for reason in reasons.values())
        name = f"{title(spec, how.terms)} {direction} on {target.arch}"
        yield f"{name}: {timed} of {len(configs)} to be timed"
        yield f"  {RESOURCES}"
        for candidate in results:
            reason = reasons[candidate.config]
            main = [kernel for kernel in candidate.kernels if kernel.kernel not in HELPERS]
            numbers = resources_of(main[0]) if main else " " * 21
            yield f"  {numbers} {written(candidate.config)}{f': {reason}' if reason else ''}"


def tuned(
    searches: Sequence[tuple[NormSpec, str]], arch: str, path: Path, how: How
) -> Iterator[str]:
    """Tune each spec on this GPU, and write the fastest configuration into the table at a path."""
    for spec, direction in searches:
        name = f"{title(spec, how.terms)} {direction}"
        how.report(name)
        entry = tune(spec, direction, how)
        user_table.write(path, arch, [entry])
        measured = f"{entry.us} µs, spread {entry.spread:.2%}, {entry.gb_s} GB/s"
        yield f"{name}: {measured}, {entry.samples} samples"
        yield f"  {written(entry.config)}"
    if searches:
        yield f"written to {path}"


class Trials:
    """Inputs for the plans of one spec and direction, on a device.

    There are so many sets of inputs that every call finds a cold L2. One more set, of `checked`
    rows, serves to compare results with the reference. `run` launches the calls of a plan.
    """

    def __init__(
        self,
        spec: NormSpec,
        direction: str,
        rows: int,
        checked: int,
        device: torch.device,
        run: cutile.Run = cutile.on_device,
        terms: int = 1,
    ):
        self.spec, self.direction, self._run, self._terms = spec, direction, run, terms
        self.bytes = moved_bytes(spec, rows, terms)[direction == "backward"]
        copies = 1
        if device.type == "cuda":
            l2 = torch.cuda.get_device_properties(device).L2_cache_size
            copies = min(MOST_SETS, max(2, -(-L2_MULTIPLE * l2 // self.bytes)))
        generator = torch.Generator(device).manual_seed(0)
        self._sets = [self._inputs(rows, device, generator) for _ in range(copies)]
        self._checked = self._inputs(checked, device, generator)
        self._expected = self._reference(self._checked)

    def bound(self, plan) -> Callable:
        """The bound call of a plan."""
        bind = cutile.bind_forward if self.direction == "forward" else cutile.bind_backward
        return bind(plan, self._run)

    def wrong(self, plan) -> str | None:
        """How the results of a plan differ from the reference, or None if only by rounding."""
        for number, (got, expected) in enumerate(
            zip(self.bound(plan)(*self._checked), self._expected, strict=True)
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

    def sample(self, plan) -> float:
        """Microseconds of a call.

        Several calls are queued before the first one starts, so that the GPU never waits for the
        host.
        """
        copies = len(self._sets)
        calls = min(MOST_CALLS, -(-SAMPLE_BYTES // self.bytes) + copies - 1) // copies * copies
        call = self.bound(plan)
        kept: list = [None] * copies  # keeps results alive, so that the next call writes elsewhere
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HEAD_START * calls)
        start.record()
        for i in range(calls):
            kept[i % copies] = call(*self._sets[i % copies])
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / calls

    def _inputs(self, rows: int, device, generator) -> tuple:
        """The arguments of a bound call."""
        spec = self.spec

        def normal(dtype: str | None, *lead: int) -> Tensor | None:
            if dtype is None:
                return None
            shape, dtype = (*lead, spec.hidden), getattr(torch, dtype)
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        heads = (spec.heads,) if spec.heads else ()
        lead = (rows // spec.heads, spec.heads) if spec.heads else (rows,)
        gate = normal(spec.gate, *lead)
        weight, bias = (normal(dtype, *heads) for dtype in (spec.weight, spec.bias))
        if self.direction == "forward":
            dtypes = (spec.dtype, spec.residual, spec.addend, spec.skip)
            x, residual, addend, skip = (normal(dtype, *lead) for dtype in dtypes)
            return trimmed(Tensors(x, residual, gate, weight, bias, addend, skip)), EPS
        x = normal(spec.residual or spec.dtype, *lead)
        dy = normal(spec.skip or spec.dtype, *lead)
        mean, rstd = torch.rand(2, rows, generator=generator, device=device) + 0.5
        mean = mean if spec.norm == "layer" else None
        dsum = normal(spec.residual, *lead)
        more = tuple(normal(spec.dtype, *lead) for _ in range(self._terms - 1))
        return dy, dsum, Saved(x, gate, weight, bias, mean, rstd), EPS, more

    def _reference(self, inputs: tuple) -> tuple[Tensor | None, ...]:
        if self.direction == "forward":
            return reference.forward(self.spec, *inputs)
        return reference.backward(self.spec, every_gradient(self.spec), *inputs)


def tune(spec: NormSpec, direction: str, how: How) -> Entry:
    """The fastest configuration for a spec on the current GPU, with its measurement.

    direction: "forward" saves what the backward pass needs; "backward" computes every gradient.
    Without how.rows the timed input has 64 Mi elements, or fewer if memory is short.
    Raises ValueError if no table serves the spec. Raises RuntimeError if no candidate compiles or
    gives right results, if the time is too short, or if cuTile's cache is off.
    """
    target = gpu().target
    index = torch.cuda.current_device()
    terms, report = how.terms, how.report
    rows = whole_rows(spec, how.rows or _rows_in_memory(spec, terms))
    op = served_op(spec, direction)
    configs = ordered_candidates(spec, target, direction, terms)
    compiled = compile_candidates(spec, target, direction, rows, configs, how)
    reasons = prune(compiled, target, how.spilled, configs[0])
    timed = {c.config: c for c in compiled if reasons[c.config] is None}
    report(f"{len(timed)} of {len(configs)} to be timed")
    if not timed:
        raise RuntimeError(f"{spec.op} {spec.hidden}: {reasons[configs[0]]}")
    checked = min(rows, whole_rows(spec, _rows_to_check(spec, target, list(timed))))
    trials = Trials(spec, direction, rows, checked, torch.device("cuda", index), terms=terms)
    plans = {}
    for config in timed:
        plan = plan_of(spec, target, direction, config, terms)
        try:
            reason = trials.wrong(plan)
        except RuntimeError as error:  # the driver refuses the launch
            reason = f"does not run: {error}"
        if reason:
            report(f"dropped {written(config)}: {reason}")
        else:
            plans[config] = plan
    if not plans:
        raise RuntimeError(f"{spec.op} {spec.hidden}: no candidate gives the reference's results")
    for plan in plans.values():
        trials.sample(plan)  # not counted: an idle GPU is slow at first, and memory is allocated
    ranking = rank(list(plans), lambda config: trials.sample(plans[config]), how.seconds, report)
    if not ranking:
        raise RuntimeError(
            f"{spec.op} {spec.hidden}: {how.seconds} s are too short to time anything"
        )
    config, best = ranking[0]
    before = dict(ranking).get(configs[0])
    if before:
        report(f"{best.us:.2f} µs; before, {before.us:.2f} µs by {written(configs[0])}")
    kernels: tuple[Compiled, ...] = timed[config].kernels
    return Entry(
        key=Key.of(spec, direction, op, terms),
        config=config,
        us=round(best.us, 3),
        spread=round(best.spread_us / best.us, 4),
        samples=best.samples,
        gb_s=round(trials.bytes / best.us / 1e3, 1),
        rows=rows,
        spec=f"{spec.op} {spec.hidden} {spec.dtype}, {options_of(spec, terms)}",
        registers={kernel.kernel: kernel.registers for kernel in kernels},
        spills={kernel.kernel: kernel.spill_bytes for kernel in kernels if kernel.spill_bytes},
        gpu=torch.cuda.get_device_name(index),
        driver=driver_release(),
        date=datetime.date.today().isoformat(),
    )


def ordered_candidates(
    spec: NormSpec, target: Target, direction: str, terms: int = 1
) -> list[Config]:
    """The candidates. The configuration that serves without tuning is first and always timed."""
    if direction == "forward":
        chosen = heuristics.forward(spec, target)
    else:
        needs = every_gradient(spec)._replace(terms=terms)
        chosen = heuristics.backward(spec, target, needs)
    chosen = explicit(chosen, spec.hidden)
    return list(dict.fromkeys([chosen, *candidates(spec, target, direction)]))


def whole_rows(spec: NormSpec, rows: int) -> int:
    """Round rows down to whole tokens and a multiple of 16 (for which candidates compile)."""
    unit = 16 * (spec.heads or 1)
    return max(1, rows // unit) * unit


def _rows_in_memory(spec: NormSpec, terms: int) -> int:
    """The rows of ELEMENTS elements, or fewer.

    Two sets of inputs and outputs have to fit in half of the free memory.
    """
    torch.cuda.empty_cache()  # frees what the previous search used
    free, _ = torch.cuda.mem_get_info()
    row = max(moved_bytes(spec, 1 << 20, terms)) >> 20
    return min(ELEMENTS // spec.hidden, free // (4 * row))


def _rows_to_check(spec: NormSpec, target: Target, configs: list[Config]) -> int:
    """Rows with which every block of a persistent grid handles two tiles, up to MOST_CHECKED."""
    tiles = max((c.hints.occupancy or 1) * c.rows for c in configs)
    return min(2 * target.multiprocessors * tiles + 16, MOST_CHECKED // spec.hidden)
