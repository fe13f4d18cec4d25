"""Tables printed from a record, as text or as Markdown. Nothing in this module measures."""

from collections.abc import Sequence

from bench import accuracy_table, pair_table
from bench.cases import OPS
from bench.op import DIRECTIONS, INFERENCE
from bench.record import Cell, FirstCall, Record
from bench.text import table, titled

OURS = "tilenorm"
CPU_NOTICE = "CPU reference, small shapes: not a GPU measurement"


def render(record: Record, markdown: bool = False) -> str:
    """A whole report: the runs with their versions, and every table."""
    parts = [_heading(record), *tables(record, markdown), *[CPU_NOTICE] * record.on_cpu]
    return "\n\n".join(parts)


def tables(record: Record, markdown: bool = False) -> list[str]:
    """Every table of a record, each with its title and notes.

    First one table for each op, dtype and direction, then host times, pairs of training steps,
    first calls, and errors.
    """
    parts = []
    for op, dtype in ops_and_dtypes(record.cells):
        for direction in (*DIRECTIONS, INFERENCE):
            cells = [
                c for c in record.cells if (c.op, c.dtype, c.direction) == (op, dtype, direction)
            ]
            if any(cell.status != "skipped" for cell in cells):
                parts.append(_of_cells(record, cells, markdown))
    for of in dict.fromkeys((host.op, host.way) for host in record.hosts):
        parts.append(_host_times(record, *of, markdown))
    if record.pairs:
        parts.append(pair_table.table_of(record.pairs, markdown))
    parts += [pair_table.kernels_of(pair, markdown) for pair in record.pairs if pair.kernels]
    for op in dict.fromkeys(call.op for call in record.first_calls):
        parts.append(_first_calls(record, op, markdown))
    return parts + accuracy_table.tables(record.accuracies, markdown)


def ops_and_dtypes(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """Every pair of an op and a dtype, with the ops in the order of ``OPS``, and others behind."""
    pairs = dict.fromkeys((cell.op, cell.dtype) for cell in cells)
    order = list(OPS)
    return sorted(pairs, key=lambda pair: order.index(pair[0]) if pair[0] in OPS else len(order))


def _heading(record: Record) -> str:
    made = {}  # the runs by their versions
    for run in record.runs:
        made.setdefault(versions(run), []).append(
            f"tilenorm {run['tilenorm']} ({run['commit'] or 'no commit'}) on {run['machine']}"
            f", {run['date']}"
        )
    lines = [CPU_NOTICE] if record.on_cpu else []
    for used, runs in made.items():
        lines += [*runs, used]
    absent = [(name, why) for run in record.runs for name, why in run["absent"].items()]
    lines += [f"absent: {name} ({why})" for name, why in dict.fromkeys(absent)]
    return "\n".join(lines)


def versions(run: dict) -> str:
    """The versions that a run was made with."""
    found = {
        "torch": run["torch"],
        "RMSNorm of torch": run.get("rms_norm"),
        "CUDA": run["cuda"],
        "driver": run.get("driver"),
    }
    found |= {"tileiras": run["tileiras"], "Python": run["python"], **run["packages"]}
    return ", ".join(f"{name} {value}" for name, value in found.items() if value)


def _of_cells(record: Record, cells: Sequence[Cell], markdown: bool) -> str:
    """A row for each shape: GB/s beside a copy's, or microseconds of an inference."""
    first, measured = cells[0], [cell for cell in cells if cell.status != "skipped"]
    rates = first.direction in DIRECTIONS
    copies = {(copy.dtype, copy.m, copy.n): copy.gbps for copy in record.copies}
    names = list(dict.fromkeys(cell.provider for cell in measured))
    shapes: dict[tuple, dict[str, Cell]] = {}
    for cell in sorted(cells, key=lambda c: (c.n, c.m)):
        shapes.setdefault((cell.n, cell.m, cell.groups), {})[cell.provider] = cell
    rows, some = [], {(cell.n, cell.m, cell.groups) for cell in measured}
    for (n, m, groups), here in ((shape, shapes[shape]) for shape in shapes if shape in some):
        copy = copies.get((first.dtype, m, n)) if rates else None
        shown = [_shown(here[name], copy) if name in here else "-" for name in names]
        shown += [_speed(copy) if copy else "-"] * rates
        size = m if groups == 1 else f"{groups} x {m // groups}"
        rows.append([n, size, *shown, against_best_peer(here)])
    unit, ratio = ("GB/s (% of a copy)", "") if rates else ("µs", "speed of ")
    header = ["N", "M", *names, *["copy"] * rates, f"{ratio}{OURS} / best peer"]
    spreads = [cell.spread for cell in cells if cell.spread is not None]
    notes = [f"largest spread (p80 - p20) / median: {max(spreads):.1%}"] if spreads else []
    title = f"{first.op} {first.direction}, {first.dtype}: {unit}"
    return titled(title, table(header, rows, markdown), notes + _notes(measured), markdown)


def _shown(cell: Cell, copy: float | None) -> str:
    if cell.median_us is None:  # earlier records have cells that were skipped
        return "-" if cell.status == "skipped" else cell.status
    if cell.direction not in DIRECTIONS:
        return f"{cell.median_us:.3g}"
    speed = _speed(cell.gbps)
    return f"{speed} ({cell.gbps / copy:.0%})" if copy else speed


def _speed(gbps: float) -> str:
    """A rate in whole GB/s. A rate below 10 GB/s has two significant digits."""
    return f"{gbps:.0f}" if gbps >= 10 else f"{gbps:.2g}"


def _notes(cells: Sequence[Cell]) -> list[str]:
    """Why cells have no time, or why CUDA graphs did not time them: one line for each reason."""
    sizes = {}
    for cell in filter(lambda cell: cell.error, cells):
        status = cell.status if cell.status != "ok" else "timed by " + cell.timing
        sizes.setdefault((cell.provider, status, cell.error), {})[str(cell.n)] = None
    return [
        f"{provider}, N = {', '.join(ns)}: {status}: {reason}"
        for (provider, status, reason), ns in sizes.items()
    ]


def best_peer(cells: dict[str, Cell]) -> tuple[float, str] | None:
    """Our rate divided by the fastest other provider's rate, and that provider's name.

    None if there is nothing to compare, or if the run had no time for one of the cells.
    """
    if any(cell.status == "skipped" for cell in cells.values()):
        return None
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


def against_best_peer(cells: dict[str, Cell]) -> str:
    """``best_peer`` as a table shows it. A ratio below 1 is a loss."""
    found = best_peer(cells)
    return f"{found[0]:.2f} {found[1]}" if found else "-"


def _host_times(record: Record, op: str, way: str, markdown: bool) -> str:
    hosts = [host for host in record.hosts if (host.op, host.way) == (op, way)]
    eager = next((host for host in hosts if host.provider == "torch"), hosts[0])
    shown = [
        [
            host.provider,
            _us(host.forward_us, eager.forward_us),
            _us(host.forward_backward_us, eager.forward_backward_us),
            *(_us(us, None) for us in (host.forward_cpu_us, host.forward_backward_cpu_us)),
        ]
        for host in hosts
    ]
    header = ["provider", "forward without grad", "forward and backward"]
    header += ["forward, all threads", "both, all threads"]
    if eager.forward_cpu_us is None:  # of a record from before 2026-11-26
        header, shown = header[:3], [row[:3] for row in shown]
    shape = f"{eager.dtype}, {eager.m} x {eager.n}"
    title = f"{op}: host time of a {way} in µs (times {eager.provider}'s), {shape}"
    notes = [f"{host.provider}: {host.error}" for host in hosts if host.error]
    return titled(title, table(header, shown, markdown), notes, markdown)


def _us(value: float | None, unit: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f} ({value / unit:.2f})" if unit else f"{value:.1f}"


def _first_calls(record: Record, op: str, markdown: bool) -> str:
    calls = [call for call in record.first_calls if call.op == op]
    names = list(dict.fromkeys(call.provider for call in calls if call.cold_s is not None))
    here = {(c.n, c.dtype, c.direction, c.provider): c for c in calls}
    keys = dict.fromkeys(key[:3] for key, call in here.items() if call.cold_s is not None)
    rows = [[*key, *(_cold_and_warm(here.get((*key, name))) for name in names)] for key in keys]
    title = f"{op}: seconds of the first call, with empty caches / with caches on the disk"
    notes = []
    if "compile" in names:
        notes.append("torch.compile compiles both directions in the first call of the forward.")
    notes += [f"{c.provider}: {c.error}" for c in calls if c.error]
    for ahead in record.precompiles:
        if ahead.op == op:
            took = ahead.error or f"{ahead.seconds:.1f} s on {ahead.cores} cores"
            notes.append(f"python -m tilenorm precompile {ahead.arguments}: {took}")
    return titled(
        title, table(["N", "dtype", "direction", *names], rows, markdown), notes, markdown
    )


def _cold_and_warm(call: FirstCall | None) -> str:
    if call is None or call.cold_s is None:
        return "-"
    return f"{call.cold_s:.2f} / " + ("-" if call.warm_s is None else f"{call.warm_s:.3f}")
