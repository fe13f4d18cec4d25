"""Tables from a record, as text or as Markdown. Nothing here measures anything."""

from collections.abc import Iterable, Sequence

from bench.cases import DIRECTIONS
from bench.record import Cell, Record

OURS = "tilenorm"
CPU_NOTICE = "CPU reference, small shapes: not a GPU measurement"


def render(record: Record, markdown: bool = False) -> str:
    """Every table of a record: per op, dtype and direction; then host times; then how."""
    parts = [_heading(record)]
    keys = dict.fromkeys((cell.op, cell.dtype) for cell in record.cells)
    for op, dtype in keys:
        for direction in DIRECTIONS:
            cells = [
                c for c in record.cells if (c.op, c.dtype, c.direction) == (op, dtype, direction)
            ]
            if cells:
                parts.append(_throughput(record, cells, markdown))
    for op in dict.fromkeys(host.op for host in record.hosts):
        parts.append(_host_times(record, op, markdown))
    parts.append(_footing(record))
    return "\n\n".join(parts)


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
    first = cells[0]
    names = list(dict.fromkeys(cell.provider for cell in cells))
    copies = {(copy.dtype, copy.m, copy.n): copy.gbps for copy in record.copies}
    rows = []
    for m, n in sorted(dict.fromkeys((cell.m, cell.n) for cell in cells), key=lambda s: s[::-1]):
        here = {cell.provider: cell for cell in cells if (cell.m, cell.n) == (m, n)}
        copy = copies.get((first.dtype, m, n))
        shown = [_rate(here.get(name), copy) for name in names]
        rows.append([n, m, *shown, _speed(copy) if copy else "-", against_best_peer(here)])
    title = f"{first.op} {first.direction}, {first.dtype}: GB/s (% of a copy)"
    header = ["N", "M", *names, "copy", f"{OURS} / best peer"]
    spreads = [cell.spread for cell in cells if cell.spread is not None]
    notes = [f"largest spread (p80 - p20) / median: {max(spreads):.1%}"] if spreads else []
    notes += _notes(cells)
    return _titled(title, table(header, rows, markdown), notes, markdown)


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
            sizes.setdefault((cell.provider, status, cell.error), []).append(str(cell.n))
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


def _footing(record: Record) -> str:
    kinds = {cell.timing for cell in record.cells if cell.timing}
    lines = ["Bytes: each input read once, each output written once, the same for every provider."]
    if "graph" in kinds:
        lines.append(
            "GPU time: median over replays of a CUDA graph whose calls rotate through more memory\n"
            "than the L2 cache holds several times. The forward is one of training."
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
