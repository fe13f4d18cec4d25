"""Tables in Markdown documents, printed from records between two markers.

A block of a document looks like this::

    <!-- table: results/h200-bfloat16.jsonl op=rms_norm direction=forward dtype=bfloat16 -->
    ... what the record prints ...
    <!-- end -->

The first word names what is printed, and the path, relative to the document, names the record.
The options after a path narrow that record; a list of values is written with commas. A table has
one record. The other words may have several records, which measure different things. The words are:

run      the machine, the versions, the date and the command of each run of the record
table    the tables of ``python -m bench --from RECORD --markdown``, without heading and footing
summary  speeds beside the fastest other provider, with a column for each op
losses   one sentence that names every shape at which another provider is faster
pairs    the pairs of training steps, a row each, without their kernels
gains    the same in a few columns
plot     a link to the plot of the records, an SVG file; a path that ends in .svg names the file,
         and without one the file stands beside the record

``python -m bench --markdown DOCUMENT ...`` prints every block again. It draws a plot again if the
record has changed; delete the SVG file to draw the plot in any case.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from bench import pair_table, plot, report
from bench.cases import DIRECTIONS
from bench.record import Cell, Record, load, merge
from bench.text import table

OPTIONS = {"op": str, "dtype": str, "n": int, "direction": str, "provider": str}
OPTIONS |= {"base": str, "variant": str}
BLOCK = re.compile(
    r"(?P<opening><!-- (?P<kind>\w+): (?P<words>[^>]*?\.jsonl[^>]*) -->\n)"
    r"(?P<text>.*?)(?P<closing><!-- end -->)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """What a pair of markers asks for.

    ``sources`` holds the path of each record, as the document writes it, and the narrowed record.
    """

    kind: str
    sources: list[tuple[str, Record]]
    svg: str

    @property
    def record(self) -> Record:
        """The narrowed records together."""
        return merge([record for _, record in self.sources])

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
            plot.save(block.record, str(path.parent / block.svg))


def is_drawn(document: Path, block: Block) -> bool:
    """Whether the SVG file of a plot exists and shows its record."""
    svg = document.parent / block.svg
    return svg.exists() and plot.digest_in(svg.read_text()) == plot.digest(block.record)


def _block(document: Path, match: re.Match) -> Block:
    """Raises ValueError for a word that is not known, and where two records have one cell."""
    kind, opening = match["kind"], match["opening"].strip()
    options, svg = [], ""
    for word in match["words"].split():
        name, equals, values = word.partition("=")
        if word.endswith(".svg"):
            svg = word
        elif not equals:
            options.append((word, {}))
        elif name in OPTIONS:
            options[-1][1][name] = [OPTIONS[name](value) for value in values.split(",")]
        else:
            raise ValueError(f"{document}: {name} is unknown in {opening}")
    if kind not in KINDS:
        raise ValueError(f"{document}: {kind} is unknown in {opening}")
    if kind == "table" and len(options) > 1:
        raise ValueError(f"{document}: a table has one record, and not those of {opening}")
    sources = [
        (path, load([document.parent / path]).narrowed(**wanted)) for path, wanted in options
    ]
    block = Block(kind, sources, svg or sources[0][0].removesuffix(".jsonl") + ".svg")
    if len(block.record.cells) < sum(len(record.cells) for _, record in sources):
        raise ValueError(f"{document}: two records have the same cells in {opening}")
    return block


def _run(block: Block) -> str:
    """Where, when and how the records were made."""
    parts = []
    for path, record in dict(block.sources).items():
        for run in record.runs:
            machine = f"{run['machine']}, {run['date'][:10]}, {report.versions(run)}"
            commit = f"tilenorm {run['tilenorm']} at commit {run['commit'] or 'unknown'}"
            link = f"[{Path(path).name}]({path})"
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
    """Our GB/s, and our speed relative to the fastest other provider.

    A star marks a cell whose record does not have torch.compile at this shape.
    """
    if not (found := report.best_peer(cells)):
        return "-"
    star = "" if "compile" in cells else " *"
    return f"{cells[report.OURS].gbps:.0f} ({found[0]:.2f} × {found[1]}){star}"


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
    return f"![GB/s against N]({block.svg})"


def _pairs(block: Block) -> str:
    return pair_table.table_of(block.record.pairs, markdown=True)


KINDS = {"run": _run, "table": _table, "summary": _summary, "losses": _losses, "plot": _plot}
KINDS |= {"pairs": _pairs, "gains": lambda block: pair_table.gains(block.record.pairs)}
