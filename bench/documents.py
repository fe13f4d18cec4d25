"""Tables in Markdown documents, printed from records between two markers.

A block of a document looks like this::

    <!-- table: results/h200-bfloat16.jsonl op=rms_norm direction=forward dtype=bfloat16 -->
    ... what the record prints ...
    <!-- end -->

The first word names what is printed, and the path, relative to the document, names the one record.
The options narrow the record; a list of values is written with commas. The words are:

run      the machine, the versions, the date and the command of each run of the record
table    the tables of ``python -m bench --from RECORD --markdown``, without heading and footing
summary  speeds beside the fastest other provider, with a column for each op
losses   one sentence that names every shape at which another provider is faster
plot     a link to the plot of the record, an SVG file beside the record

``python -m bench --markdown DOCUMENT ...`` prints every block again. It draws a plot again if the
record has changed; delete the SVG file to draw the plot in any case.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from bench import plot, report
from bench.cases import DIRECTIONS
from bench.record import Cell, Record, load
from bench.text import table

OPTIONS = {"op": str, "dtype": str, "n": int, "direction": str, "provider": str}
BLOCK = re.compile(
    r"(?P<opening><!-- (?P<kind>\w+): (?P<path>\S+\.jsonl)(?P<options>[^>]*) -->\n)"
    r"(?P<text>.*?)(?P<closing><!-- end -->)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """What a pair of markers asks for. ``link`` is the record's path as the document writes it."""

    kind: str
    link: str
    record: Record

    def text(self) -> str:
        """What stands between the markers."""
        return f"\n{KINDS[self.kind](self)}\n\n"


def rewritten(path: Path) -> str:
    """The text of a document with every block printed again from its record."""

    def printed(match: re.Match) -> str:
        return match["opening"] + _block(path, match).text() + match["closing"]

    return BLOCK.sub(printed, path.read_text())


def blocks(path: Path) -> list[Block]:
    """The blocks of a document, in order."""
    return [_block(path, match) for match in BLOCK.finditer(path.read_text())]


def update(path: Path) -> None:
    """Rewrite a document in place, and draw those of its plots that do not show their record."""
    path.write_text(rewritten(path))
    for block in blocks(path):
        if block.kind == "plot" and not is_drawn(path, block):
            plot.save(block.record, str(path.parent / _svg(block)))


def is_drawn(document: Path, block: Block) -> bool:
    """Whether the SVG file of a plot exists and shows its record."""
    svg = document.parent / _svg(block)
    return svg.exists() and plot.digest_in(svg.read_text()) == plot.digest(block.record)


def _block(document: Path, match: re.Match) -> Block:
    """Raises ValueError for a word or an option that is not known."""
    options = dict(option.split("=", 1) for option in match["options"].split())
    unknown = sorted({match["kind"]} - KINDS.keys()) + sorted(options.keys() - OPTIONS.keys())
    if unknown:
        raise ValueError(f"{document}: {unknown[0]} is unknown in {match['opening'].strip()}")
    wanted = {
        name: [OPTIONS[name](value) for value in values.split(",")]
        for name, values in options.items()
    }
    record = load([document.parent / match["path"]]).narrowed(**wanted)
    return Block(match["kind"], match["path"], record)


def _run(block: Block) -> str:
    """Where, when and how the record was made."""
    parts = []
    for run in block.record.runs:
        machine = f"{run['machine']}, {run['date'][:10]}, {report.versions(run)}"
        commit = f"tilenorm {run['tilenorm']} at commit {run['commit'] or 'unknown'}"
        link = f"[{Path(block.link).name}]({block.link})"
        parts.append(f"Record {link}: {machine}, {commit}, by `{run['command']}`.")
    return "\n\n".join(parts)


def _table(block: Block) -> str:
    return "\n\n".join(report.tables(block.record, markdown=True))


def _summary(block: Block) -> str:
    """A row for each N and direction, and a column for each op."""
    shapes = _shapes(block.record)
    ops = [op for op, _ in report.ops_and_dtypes(block.record.cells)]
    sizes = sorted({n for *_, n in shapes})
    rows = []
    for direction in DIRECTIONS:
        for n in sizes:
            cells = [shapes.get((op, direction, n), {}) for op in ops]
            if any(cells):
                rows.append([n, direction, *map(_speed, cells)])
    return table(["N", "direction", *ops], rows, markdown=True)


def _speed(cells: dict[str, Cell]) -> str:
    """Our GB/s, and our speed relative to the fastest other provider."""
    found = report.best_peer(cells)
    return f"{cells[report.OURS].gbps:.0f} ({found[0]:.2f} × {found[1]})" if found else "-"


def _losses(block: Block) -> str:
    """A sentence on every shape at which the rounded ratio to another provider is below 1."""
    lost, count = {}, 0
    for (op, direction, n), cells in _shapes(block.record).items():
        if found := report.best_peer(cells):
            count += 1
            if round(found[0], 2) < 1:
                lost.setdefault((op, direction), []).append(f"{found[0]:.2f} × {found[1]} at {n}")
    if not lost:
        return f"No other provider is faster at any of the {count} measured shapes."
    listed = "; ".join(
        f"`{op}` {direction}: {', '.join(shapes)}" for (op, direction), shapes in lost.items()
    )
    behind = sum(map(len, lost.values()))
    return f"Another provider is faster at {behind} of the {count} measured shapes. {listed}."


def _shapes(record: Record) -> dict[tuple[str, str, int], dict[str, Cell]]:
    """The cells of each op, direction and N by provider, in the order of the tables."""
    found = {}
    for cell in sorted(record.cells, key=lambda c: (DIRECTIONS.index(c.direction), c.n)):
        found.setdefault((cell.op, cell.direction, cell.n), {})[cell.provider] = cell
    return found


def _plot(block: Block) -> str:
    return f"![GB/s against N]({_svg(block)})"


def _svg(block: Block) -> str:
    """The path of the plot, beside the record."""
    return block.link.removesuffix(".jsonl") + ".svg"


KINDS = {"run": _run, "table": _table, "summary": _summary, "losses": _losses, "plot": _plot}
