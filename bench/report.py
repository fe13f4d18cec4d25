"""Tables printed from a record, as text or as Markdown. Nothing in this module measures."""

from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter

from bench import beside
from bench.cases import OPS
from bench.op import DIRECTIONS, INFERENCE
from bench.record import CONFIDENCE, Accuracy, Cell, Estimate, FirstCall, Host, Pair, Record, Tests
from bench.text import Table, columns, distinct, grouped

OURS, EAGER, LIGER = "tilenorm", "torch", "liger"
OVER_EAGER = 2
FEW_ULPS = 4
KERNELS = 16  # rows of the table of kernels
# The columns of a table of host times. Earlier records have some of them alone.
HOST_TIMES = {
    "forward without grad": "forward_us",
    "forward": "forward_grad_us",
    "forward and backward": "forward_backward_us",
    "forward, all threads": "forward_cpu_us",
    "both, all threads": "forward_backward_cpu_us",
}
NEVER_LEFT_OUT = ("forward_us", "forward_backward_us")
NOTES = (
    f"Intervals: those of the sign test, at {CONFIDENCE:.0%}. They hold for every distribution of\n"
    "independent pairs. Both variants run in one process over the same weights, in turn.",
    "Gradient: the largest change of a gradient from A to B, as a share of its norm, in the first\n"
    "step from the same weights.",
)
MORE = f"B's tokens/s more ({CONFIDENCE:.0%})"
LIGERS_MORE = "Liger's, beside A"
CPU_NOTICE = "CPU reference, small shapes: not a GPU measurement"


def render(record: Record, markdown: bool = False) -> str:
    """A whole report: the runs with their versions, and every table."""
    shown = [table.shown(markdown) for table in tables(record)]
    return "\n\n".join([_heading(record), *shown, *[CPU_NOTICE] * record.on_cpu])


def tables(record: Record) -> Iterator[Table]:
    """Every table of a record: one for each op, dtype and direction, and those of other lines."""
    cells = grouped(record.cells, "op", "dtype", "direction")
    for op, dtype in ops_and_dtypes(record.cells):
        for direction in (*DIRECTIONS, INFERENCE):
            if here := cells.get((op, dtype, direction)):
                yield _of_cells(here, record.copied if direction in DIRECTIONS else {})
    for hosts in grouped(record.hosts, "op", "way", "path").values():
        yield _host_times(hosts)
    for of_way in grouped(record.turns, "way").values():
        yield beside.listed(of_way)
        yield from map(beside.table, grouped(of_way, *beside.TOGETHER).values())
    if record.tests:
        yield _tests(record.tests)
    if record.pairs:
        yield _pairs(record.pairs)
    yield from (_kernels(pair) for pair in record.pairs if pair.kernels)
    for calls in grouped(record.first_calls, "op").values():
        yield _first_calls(calls, record)
    yield from _accuracies(record.accuracies)


def ops_and_dtypes(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """Every pair of an op and a dtype, with the ops in the order of ``OPS``, and others behind."""
    order = list(OPS)
    pairs = grouped(cells, "op", "dtype")
    return sorted(pairs, key=lambda pair: order.index(pair[0]) if pair[0] in OPS else len(order))


def _heading(record: Record) -> str:
    made: dict[str, list[str]] = {}  # the runs by their versions
    for run in record.runs:
        commit = f"tilenorm {run['tilenorm']} ({run['commit'] or 'no commit'})"
        made.setdefault(versions(run), []).append(f"{commit} on {run['machine']}, {run['date']}")
    lines = [CPU_NOTICE] * record.on_cpu
    for used, runs in made.items():
        lines += [*runs, used]
    absent = [(name, why) for run in record.runs for name, why in run["absent"].items()]
    return "\n".join([*lines, *(f"absent: {name} ({why})" for name, why in dict.fromkeys(absent))])


def versions(run: dict) -> str:
    """The versions that a run was made with."""
    names = {"torch": "torch", "RMSNorm of torch": "rms_norm", "CUDA": "cuda", "driver": "driver"}
    names |= {"tileiras": "tileiras", "Python": "python", "host path": "host_path"}
    found = {name: run.get(field) for name, field in names.items()} | run["packages"]
    return ", ".join(f"{name} {value}" for name, value in found.items() if value)


def _tests(lines: Sequence[Tests]) -> Table:
    """A row for each commit, the last first. Notes say what failed and why cases were skipped."""
    rows, notes = [], []
    for line in reversed(lines):
        path = "C++" if line.native else "Python"
        counts = line.passed, len(line.failed), sum(line.skipped.values()), line.not_reached
        where = line.date, line.commit, line.versions, path
        rows.append([*where, *counts, f"{line.seconds / 60:.0f}"])
        at = f"{line.commit}, {path}"
        notes += [f"{at}: {name} failed: {why}" for name, why in line.failed.items()]
        notes += [f"{at}: skipped {count}: {why}" for why, count in line.skipped.items()]
    header = ["date", "commit", "versions", "repeated calls", "passed", "failed", "skipped"]
    return Table("tests that need a GPU", [*header, "not reached", "minutes"], rows, notes)


def _of_cells(cells: Sequence[Cell], copies: dict[tuple, float]) -> Table:
    """A row for each shape: GB/s beside a copy's, or microseconds of an inference."""
    first = cells[0]
    rates, names = first.direction in DIRECTIONS, distinct(cells, "provider")
    shapes, rows = grouped(sorted(cells, key=lambda c: (c.n, c.m)), "n", "m", "groups"), []
    for (n, m, groups), of_shape in shapes.items():
        here = {cell.provider: cell for cell in of_shape}
        copy = copies.get((first.dtype, m, n))
        shown = [_shown(here.get(name), copy) for name in names]
        shown += [_speed(copy) if copy else "-"] * rates
        size = m if groups == 1 else f"{groups} x {m // groups}"
        best = best_peer(here)  # a ratio below 1 is a loss
        rows.append([n, size, *shown, f"{best[0]:.2f} {best[1]}" if best else "-"])
    unit, ratio = ("GB/s (% of a copy)", "") if rates else ("µs", "speed of ")
    header = ["N", "M", *names, *["copy"] * rates, f"{ratio}{OURS} / best peer"]
    notes = _largest_spread(cells)
    for (name, status, timing, why), of in grouped(
        cells, "provider", "status", "timing", "error"
    ).items():
        if why:  # no time, or no CUDA graph
            status = status if status != "ok" else "timed by " + timing
            notes.append(f"{name}, N = {', '.join(map(str, distinct(of, 'n')))}: {status}: {why}")
    return Table(f"{first.op} {first.direction}, {first.dtype}: {unit}", header, rows, notes)


def _shown(cell: Cell | None, copy: float | None) -> str:
    if cell is None:
        return "-"
    if cell.median_us is None:
        return cell.status
    if cell.direction not in DIRECTIONS:
        return f"{cell.median_us:.3g}"
    return _speed(cell.gbps) + (f" ({cell.gbps / copy:.0%})" if copy else "")


def _speed(gbps: float) -> str:
    """A rate in whole GB/s. A rate below 10 GB/s has two significant digits."""
    return f"{gbps:.0f}" if gbps >= 10 else f"{gbps:.2g}"


def best_peer(cells: dict[str, Cell]) -> tuple[float, str] | None:
    """Our rate divided by the fastest other provider's rate, and that provider's name.

    None if there is nothing to compare.
    """
    rates = {name: cell.gbps for name, cell in cells.items() if cell.gbps is not None}
    ours = rates.pop(OURS, None)
    if not rates or ours is None:
        return None
    best = max(rates, key=rates.get)
    return ours / rates[best], best


def spread_of(values: Sequence, form: str) -> str:
    """The smallest and the largest of the values, or the one text that both have."""
    low, high = (f"{end(values):{form}}" for end in (min, max))
    return low if low == high else f"{low} to {high}"


def _host_times(hosts: Sequence[Host]) -> Table:
    eager = next((host for host in hosts if host.provider == "torch"), hosts[0])
    fields = {
        title: name
        for title, name in HOST_TIMES.items()
        if name in NEVER_LEFT_OUT or getattr(eager, name) is not None
    }
    rows = []
    for host in hosts:
        units = {name: None if "cpu" in name else getattr(eager, name) for name in fields.values()}
        shown = (_us(getattr(host, name), unit) for name, unit in units.items())
        rows.append([host.provider, *shown])
    shape = ", ".join(filter(None, (eager.dtype, f"{eager.m} x {eager.n}", eager.path)))
    title = f"{eager.op}: host time of a {eager.way} in µs (times {eager.provider}'s), {shape}"
    notes = [f"{host.provider}: {host.error}" for host in hosts if host.error]
    return Table(title, ["provider", *fields], rows, notes + _largest_spread(hosts))


def _largest_spread(lines: Iterable[Cell | Host]) -> list[str]:
    spreads = [line.spread for line in lines if line.spread is not None]
    return [f"largest spread (p80 - p20) / median: {max(spreads):.1%}"] if spreads else []


def _us(value: float | None, unit: float | None = None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f} ({value / unit:.2f})" if unit else f"{value:.1f}"


def _first_calls(calls: Sequence[FirstCall], record: Record) -> Table:
    """A row for each N, dtype and direction."""
    done, op = [call for call in calls if call.cold_s is not None], calls[0].op
    names, rows = distinct(done, "provider"), []
    for key, here in grouped(done, "n", "dtype", "direction").items():
        took = {}
        for call in here:
            warm = "-" if call.warm_s is None else f"{call.warm_s:.3f}"
            took[call.provider] = f"{call.cold_s:.2f} / {warm}"
        rows.append([*key, *(took.get(name, "-") for name in names)])
    notes = []
    if "compile" in names:
        notes.append("torch.compile compiles both directions in the first call of the forward.")
    notes += [f"{call.provider}: {call.error}" for call in calls if call.error]
    for line in (line for line in record.precompiles if line.op == op):
        said = line.error or f"{line.seconds:.1f} s on {line.cores} cores"
        notes.append(f"python -m tilenorm precompile {line.arguments}: {said}")
    title = f"{op}: seconds of the first call, with empty caches / with caches on the disk"
    return Table(title, ["N", "dtype", "direction", *names], rows, notes)


def _pairs(pairs: Sequence[Pair]) -> Table:
    """A row for each pair of all models, those that lose first. Pairs without times come last."""
    header = ["model", "A", "B", "pairs", "ms a step, A / B", f"B - A, ms ({CONFIDENCE:.0%})"]
    header += ["tokens/s, A / B", MORE, "peak GiB, A / B", "gradient"]
    rows, notes = [], [*NOTES]
    timed = losses_first(pair for pair in pairs if pair.pairs_us)
    for pair in [*timed, *(pair for pair in pairs if not pair.pairs_us)]:
        names, made = [pair.label, pair.base, pair.variant], len(pair.pairs_us)
        said = [f"{pair.status}: {pair.error}"] if pair.error else []
        if made and pair.gpus > 1:
            said.append(f"tokens/s are of one of {pair.gpus} GPUs")
        if 0 < made < pair.asked:
            said.append(f"out of time after {made} of {pair.asked} pairs")
        notes += [f"{', '.join(names)}: {note}" for note in said]
        if not made:
            rows.append([*names, pair.status, *["-"] * (len(header) - len(names) - 1)])
            continue
        shown = [
            " / ".join(f"{us / 1e3:.2f}" for us in pair.medians_us),
            with_interval(pair.difference_us, 1e-3, ""),
            " / ".join(f"{tokens:.0f}" for tokens in pair.gpu_tokens),
            with_interval(pair.more_tokens, 100, "%"),
            " / ".join(map(gib, pair.peak_bytes)),
            "-" if pair.gradient_change is None else f"{pair.gradient_change:.2g}",
        ]
        rows.append([*names, made, *shown])
    return Table("pairs of training steps", header, rows, notes)


def losses_first(pairs: Iterable[Pair]) -> list[Pair]:
    """The pair whose second variant loses most, or gains least, is the first."""
    return sorted(pairs, key=lambda pair: pair.more_tokens.median)


def gains(records: Iterable[Record]) -> str:
    """What the second variant of each pair gains, in Markdown, losses first. Pairs whose median has
    no interval are left out.

    What the variant "liger" gains beside the same A in the same steps is a column, if it was
    measured anywhere. It has a row where no other variant was measured beside that A.
    """
    by_place: dict[tuple, list[Pair]] = {}
    for record in records:
        gpu = record.runs[0]["machine"].split()[1]
        for pair in record.judged_pairs:
            gpus = f"{pair.gpus} × {gpu}" if pair.gpus > 1 else gpu
            by_place.setdefault((pair.label, gpus, pair.base), []).append(pair)
    of_liger = {
        place: with_interval(pair.more_tokens, 100, "%")
        for place, pairs in by_place.items()
        for pair in pairs
        if pair.variant == LIGER
    }
    rows = []
    for place, pairs in by_place.items():
        for pair in [pair for pair in pairs if pair.variant != LIGER] or pairs:
            ms = " → ".join(f"{us / 1e3:.1f}" for us in pair.medians_us)
            more = [with_interval(pair.more_tokens, 100, "%")]
            if of_liger:
                more.append(of_liger.get(place, "-"))
            peaks = " → ".join(map(gib, pair.peak_bytes))
            rows.append((pair.more_tokens.median, [*place, pair.variant, ms, *more, peaks]))
    header = ["model", "GPU", "A", "B", "ms a step", MORE, *[LIGERS_MORE] * bool(of_liger)]
    return columns([*header, "peak GiB"], [row for _, row in sorted(rows, key=itemgetter(0))])


def steps(records: Iterable[Record]) -> str:
    """What the second variant gains in a step, in a sentence for each two variants. The slower
    steps come first, and the sentence with the slowest step.
    """
    pairs = losses_first(pair for record in records for pair in record.judged_pairs)
    by_variants = grouped(pairs, "base", "variant")
    return "\n".join(_sentence(a, b, pairs) for (a, b), pairs in by_variants.items())


def _sentence(base: str, variant: str, ordered: Sequence[Pair]) -> str:
    slower = [pair for pair in ordered if round(pair.more_tokens.median, 4) < 0]
    faster = [pair.more_tokens.median * 100 for pair in ordered[len(slower) :]]
    unclear = sum(p.more_tokens.low is None or p.more_tokens.low <= 0 for p in ordered)
    losses = [f"{p.label} {with_interval(p.more_tokens, 100, '%')}" for p in slower]
    first = f"slower in {len(slower)} of {len(ordered)} steps"
    parts = [f"{first}: {', '.join(losses)}" if losses else first]
    if faster:
        parts.append(f"{spread_of(faster, '+.2f')}% tokens/s in the other {len(faster)}")
    parts.append(f"the interval begins at or below 0 in {unclear}")
    return f"- `{variant}` beside `{base}`: {'; '.join(parts)}."


def _kernels(pair: Pair) -> Table:
    """The kernels whose time differs most between the two variants of a pair, and all together."""
    both = [{line["name"]: line for line in lines} for lines in pair.kernels]
    none = {"calls": 0, "ms": 0.0}
    names = dict.fromkeys(name for lines in both for name in lines)
    rows = [[name, *(lines.get(name, none) for lines in both)] for name in names]
    rows.sort(key=lambda row: -abs(row[2]["ms"] - row[1]["ms"]))
    sums = [{key: sum(x[key] for x in lines) for key in none} for lines in pair.kernels]
    shown = [
        [name, *(cell for line in lines for cell in (line["calls"], f"{line['ms']:.3f}"))]
        for name, *lines in [*rows[:KERNELS], ["all kernels", *sums]]
    ]
    header = ["kernel", *(f"{what} of {x}" for x in "AB" for what in ("calls", "ms"))]
    title = f"kernels of a step: A is {pair.base}, B is {pair.variant}: {pair.label}"
    less = len(rows) - KERNELS
    notes = [f"{less} kernels whose time differs less are left out."] if less > 0 else []
    return Table(title, header, shown, notes)


def with_interval(value: Estimate, unit: float, sign: str) -> str:
    shown = f"{value.median * unit:+.2f}{sign}"
    if value.low is None:
        return f"{shown} (too few pairs)"
    return f"{shown} ({value.low * unit:+.2f} to {value.high * unit:+.2f}{sign})"


def gib(nbytes: int | None) -> str:
    return f"{nbytes / 2**30:.2f}" if nbytes else "-"


def worse(lines: Iterable[Accuracy]) -> list[str]:
    """A line for each result in which tilenorm is worse than its contract with PyTorch.

    tilenorm is compared with PyTorch on the same inputs, and not on each one's worst inputs.
    """
    found = []
    for case, here in grouped(lines, "dtype", "op", "m", "n", "inputs").items():
        dtype, op, m, n, inputs = case
        ulps = {line.provider: line.ulps for line in here}
        for result, ours in ulps.get(OURS, {}).items():
            eager = ulps.get(EAGER, {}).get(result)
            if eager is not None and not ours <= max(OVER_EAGER * eager, FEW_ULPS):
                errors = f"{ours:.3g} ulps, {EAGER} {eager:.3g}"
                found.append(f"{op} {dtype} {m} x {n}, {result}, {inputs}: {errors}")
    return found


def _accuracies(lines: Sequence[Accuracy]) -> Iterator[Table]:
    """A table for each dtype, with a row for each op and result and a column for each provider."""
    names = distinct((line for line in lines if line.ulps), "provider")
    for dtype, here in grouped(lines, "dtype").items():
        rows = []
        for op, of_op in grouped(here, "op").items():
            for result in dict.fromkeys(name for line in of_op for name in line.ulps):
                rows.append([op, result, *_largest(of_op, result, names)])
        header = ["op", "result", *names, f"worst inputs of {OURS}", f"{OURS} / {EAGER}"]
        title = f"{dtype}: largest error against float64, in ulps"
        yield Table(title, header, rows, _accuracy_notes(here))


def _largest(lines: Sequence[Accuracy], result: str, names: Sequence[str]) -> list[str]:
    """The largest error of each provider, and the inputs and the ratio to PyTorch's of ours."""
    found: dict[str, tuple[float, str]] = {}
    for line in (line for line in lines if result in line.ulps):
        least = found.get(line.provider, (-1.0, ""))
        found[line.provider] = max(least, (line.ulps[result], line.inputs))
    ours, eager = found.get(OURS, (None, "-")), found.get(EAGER, (None, ""))
    ratio = f"{ours[0] / eager[0]:.2f}" if ours[0] is not None and eager[0] else "-"
    shown = [f"{found[name][0]:.3g}" if name in found else "-" for name in names]
    return [*shown, ours[1], ratio]


def _accuracy_notes(lines: Sequence[Accuracy]) -> list[str]:
    """The shapes and inputs, tilenorm's contract, and why providers have no result."""
    shapes = (f"{m} x {n}" for m, n in grouped(lines, "m", "n"))
    limit = f"more than {OVER_EAGER} times {EAGER}'s error on the same inputs and {FEW_ULPS} ulps"
    notes = [
        f"shapes: {', '.join(shapes)}; inputs: {', '.join(distinct(lines, 'inputs'))}",
        f"{OURS} with {limit}: {'; '.join(worse(lines)) or 'nowhere'}",
    ]
    failed = grouped((line for line in lines if line.error), "provider", "error")
    return notes + [
        f"{name}, {', '.join(distinct(of, 'op'))}: {why}" for (name, why), of in failed.items()
    ]
