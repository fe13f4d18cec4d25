"""Tables from a record, as text or as Markdown. Nothing here measures anything."""

from collections.abc import Iterable, Sequence

from bench.cases import DIRECTIONS, LATENCIES
from bench.record import Cell, FirstCall, Record, Step
from bench.timing import MOST_SETS

OURS = "tilenorm"
CPU_NOTICE = "CPU reference, small shapes: not a GPU measurement"


def render(record: Record, markdown: bool = False) -> str:
    """Every table of a record: per op, dtype and direction; host times; training steps; compiling;
    then how."""
    parts = [_heading(record)]
    keys = dict.fromkeys((cell.op, cell.dtype) for cell in record.cells)
    for op, dtype in keys:
        for direction in DIRECTIONS + LATENCIES:
            cells = [
                c for c in record.cells if (c.op, c.dtype, c.direction) == (op, dtype, direction)
            ]
            if cells and direction in DIRECTIONS:
                parts.append(_throughput(record, cells, markdown))
            elif cells:
                parts.append(_latency(cells, markdown))
    for op in dict.fromkeys(host.op for host in record.hosts):
        parts.append(_host_times(record, op, markdown))
    for model in dict.fromkeys(step.model for step in record.steps):
        parts.append(_steps([step for step in record.steps if step.model == model], markdown))
    for op in dict.fromkeys(call.op for call in record.first_calls):
        parts.append(_first_calls(record, op, markdown))
    parts.append(_footing(record))
    return "\n\n".join(filter(None, parts))


def _heading(record: Record) -> str:
    made = {}  # runs by what they were made with
    for run in record.runs:
        made.setdefault(_versions(run), []).append(
            f"tilenorm {run['tilenorm']} ({run['commit'] or 'no commit'}) on {run['machine']}"
            f", {run['date']}"
        )
    lines = [CPU_NOTICE] if record.on_cpu else []
    for versions, runs in made.items():
        lines += [*runs, versions]
    absent = [(name, why) for run in record.runs for name, why in run["absent"].items()]
    lines += [f"absent: {name} ({why})" for name, why in dict.fromkeys(absent)]
    return "\n".join(lines)


def _versions(run: dict) -> str:
    versions = {"torch": run["torch"], "CUDA": run["cuda"], "driver": run.get("driver")}
    versions |= {"tileiras": run["tileiras"], "Python": run["python"], **run["packages"]}
    return ", ".join(f"{name} {value}" for name, value in versions.items() if value)


def _throughput(record: Record, cells: Sequence[Cell], markdown: bool) -> str:
    copies = {(copy.dtype, copy.m, copy.n): copy.gbps for copy in record.copies}
    names, shapes = _by_shape(cells)
    rows = []
    for (m, n), here in shapes.items():
        copy = copies.get((cells[0].dtype, m, n))
        shown = [_rate(here.get(name), copy) for name in names]
        rows.append([n, m, *shown, _speed(copy) if copy else "-", against_best_peer(here)])
    header = ["N", "M", *names, "copy", f"{OURS} / best peer"]
    return _of_cells(cells, "GB/s (% of a copy)", table(header, rows, markdown), markdown)


def _latency(cells: Sequence[Cell], markdown: bool) -> str:
    unit, us = {"inference": ("µs", 1.0), "training": ("ms", 1e3)}[cells[0].direction]
    names, shapes = _by_shape(cells)
    rows = [
        [n, m, *(_time(here.get(name), us) for name in names), against_best_peer(here)]
        for (m, n), here in shapes.items()
    ]
    header = ["N", "M", *names, f"speed of {OURS} / best peer"]
    return _of_cells(cells, unit, table(header, rows, markdown), markdown)


def _by_shape(cells: Sequence[Cell]) -> tuple[list[str], dict[tuple[int, int], dict[str, Cell]]]:
    """The providers, and by (M, N), the wider last, the cell of each."""
    shapes = {}
    for cell in sorted(cells, key=lambda c: (c.n, c.m)):
        shapes.setdefault((cell.m, cell.n), {})[cell.provider] = cell
    return list(dict.fromkeys(cell.provider for cell in cells)), shapes


def _of_cells(cells: Sequence[Cell], unit: str, body: str, markdown: bool) -> str:
    first = cells[0]
    title = f"{first.op} {first.direction}, {first.dtype}: {unit}"
    spreads = [cell.spread for cell in cells if cell.spread is not None]
    notes = [f"largest spread (p80 - p20) / median: {max(spreads):.1%}"] if spreads else []
    return _titled(title, body, notes + _notes(cells), markdown)


def _time(cell: Cell | None, us: float) -> str:
    """In a unit of so many microseconds."""
    if cell is None:
        return "-"
    return cell.status if cell.median_us is None else f"{cell.median_us / us:.3g}"


def _rate(cell: Cell | None, copy: float | None) -> str:
    if cell is None:
        return "-"
    if cell.gbps is None:
        return cell.status
    speed = _speed(cell.gbps)
    return f"{speed} ({cell.gbps / copy:.0%})" if copy else speed


def _speed(gbps: float) -> str:
    """Whole GB/s, but two digits of what is slow."""
    return f"{gbps:.0f}" if gbps >= 10 else f"{gbps:.2g}"


def _notes(cells: Sequence[Cell]) -> list[str]:
    """What went wrong, one line a provider and reason."""
    sizes = {}
    for cell in cells:
        if cell.error:
            status = cell.status if cell.status != "ok" else "timed by " + cell.timing
            sizes.setdefault((cell.provider, status, cell.error), {})[str(cell.n)] = None
    return [
        f"{provider}, N = {', '.join(ns)}: {status}: {reason}"
        for (provider, status, reason), ns in sizes.items()
    ]


def against_best_peer(cells: dict[str, Cell]) -> str:
    """Our rate over that of the fastest other provider, below 1 where we lose, and its name."""
    rates = {name: cell.gbps for name, cell in cells.items() if cell.gbps is not None}
    ours = rates.pop(OURS, None)
    if not rates or ours is None:
        return "-"
    best = max(rates, key=rates.get)
    return f"{ours / rates[best]:.2f} {best}"


def _host_times(record: Record, op: str, markdown: bool) -> str:
    hosts = [host for host in record.hosts if host.op == op]
    eager = next((host for host in hosts if host.provider == "torch"), hosts[0])
    shown = [
        [
            host.provider,
            _us(host.forward_us, eager.forward_us),
            _us(host.forward_backward_us, eager.forward_backward_us),
        ]
        for host in hosts
    ]
    header = ["provider", "forward without grad", "forward and backward"]
    shape = f"{eager.dtype}, {eager.m} x {eager.n}"
    title = f"{op}: host time of a call in µs (times {eager.provider}'s), {shape}"
    notes = [f"{host.provider}: {host.error}" for host in hosts if host.error]
    return _titled(title, table(header, shown, markdown), notes, markdown)


def _us(value: float | None, unit: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f} ({value / unit:.2f})" if unit else f"{value:.1f}"


def _steps(steps: Sequence[Step], markdown: bool) -> str:
    eager = next((step.losses for step in steps if step.variant == "eager"), [])
    rows = []
    for step in steps:
        if step.median_us is None:
            rows.append([step.variant, step.status, *"-------"])
            continue
        norms = sum(step.norm_kernels_ms.values())
        rows.append(
            [
                step.variant,
                f"{step.median_us / 1e3:.1f} ({step.spread:.1%})",
                f"{step.tokens / step.median_us * 1e6:.0f}",
                f"{norms:.2f} ({norms * 1e3 / step.median_us:.1%})" if norms else "-",
                f"{step.peak_bytes / 2**30:.1f}" if step.peak_bytes else "-",
                f"{step.first_s:.1f}",
                f"{step.losses[0]:.4f} to {step.losses[-1]:.4f}",
                _largest_change(step.losses, eager),
                "yes" if step.same_bits else "no",
            ]
        )
    header = ["variant", "ms a step (spread)", "tokens/s", "norms, ms a step", "peak GiB"]
    header += ["first step, s", "loss", "largest change from eager's", "same bits twice"]
    notes = [
        "Norms: GPU time of the kernels that are named after one. Those of torch.compile also do\n"
        "what is fused with the norm: what the norm costs of that cannot be told.",
    ]
    notes += [f"{step.variant}: {step.error}" for step in steps if step.error]
    title = f"training step of Llama 3's form: {steps[0].model}"
    return _titled(title, table(header, rows, markdown), notes, markdown)


def _largest_change(losses: Sequence[float], eager: Sequence[float]) -> str:
    changes = [abs(loss - other) for loss, other in zip(losses, eager, strict=False)]
    return f"{max(changes):.2g}" if changes else "-"


def _first_calls(record: Record, op: str, markdown: bool) -> str:
    calls = [call for call in record.first_calls if call.op == op]
    names = list(dict.fromkeys(call.provider for call in calls if call.cold_s is not None))
    here = {(c.n, c.dtype, c.direction, c.provider): c for c in calls}
    keys = dict.fromkeys(key[:3] for key, call in here.items() if call.cold_s is not None)
    rows = [[*key, *(_cold_and_warm(here.get((*key, name))) for name in names)] for key in keys]
    title = f"{op}: seconds of the first call, with empty caches / with a former process's"
    notes = ["torch.compile compiles both directions in the forward's first call."]
    notes += [f"{c.provider}: {c.error}" for c in calls if c.error]
    for ahead in record.precompiles:
        if ahead.op == op:
            took = ahead.error or f"{ahead.seconds:.1f} s on {ahead.cores} cores"
            notes.append(f"python -m tilenorm precompile {ahead.arguments}: {took}")
    return _titled(
        title, table(["N", "dtype", "direction", *names], rows, markdown), notes, markdown
    )


def _cold_and_warm(call: FirstCall | None) -> str:
    if call is None or call.cold_s is None:
        return "-"
    return f"{call.cold_s:.2f} / " + ("-" if call.warm_s is None else f"{call.warm_s:.3f}")


def _footing(record: Record) -> str:
    kinds = {cell.timing for cell in record.cells if cell.timing}
    lines = []
    if record.cells:
        lines.append(
            "Bytes: each input read once, each output written once, the same for every provider."
        )
    if "graph" in kinds:
        lines.append(
            "GPU time: median over replays of a CUDA graph whose calls rotate through more memory\n"
            "than the L2 cache holds several times. The forward is one of training."
        )
    if any(host.rounds > 1 for host in record.hosts):
        lines.append("Host time: the least median of rounds that all providers took part in.")
    if any(cell.direction == "inference" for cell in record.cells):
        lines.append(
            "Inference is a forward without grad; its calls rotate through at most\n"
            f"{MOST_SETS} sets of tensors, so the smallest are read from L2."
        )
    if record.on_cpu:
        lines.append(CPU_NOTICE)
    return "\n".join(lines)


def table(header: Sequence[str], rows: Iterable[Sequence], markdown: bool = False) -> str:
    """Right-aligned columns, or a Markdown table."""
    lines = [[str(value) for value in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[v.rjust(w) for v, w in zip(row, widths, strict=True)] for row in lines]
    if not markdown:
        return "\n".join("  ".join(row) for row in padded)
    padded.insert(1, ["-" * (width - 1) + ":" for width in widths])
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)


def _titled(title: str, body: str, notes: Sequence[str], markdown: bool) -> str:
    if markdown:
        return "\n\n".join([f"**{title}**", body, *notes])
    return "\n".join([title, body, *notes])
