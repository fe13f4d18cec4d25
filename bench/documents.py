"""Markdown that is printed from records: pages of records, and blocks of documents.

A page stands beside its record, and has the run and all tables. A block of a document looks like
this::

    <!-- losses: results/h200-*.jsonl dtype=bfloat16 -->
    ... what the records print ...
    <!-- end -->

The first word names what is printed, and the paths, relative to the document, name the records.
The options after a path narrow its records; a list of values is written with commas. The words are:

summary  speeds beside the fastest other provider, with a column for each op
losses   every shape at which another provider is faster
gains    what the second variant of each pair of training steps gains
steps    the same in a sentence for each two variants, with the steps that are slower first
hosts    the host time of PyTorch's norms and of tilenorm's
turns    calls in the cold (way=cold) or whole steps (way=model) beside their base, losses first
measured whether each machine's newest release is of these kernels, and its commit
index    a row for each record: its question and its answer
plot     a link to the plot of the records, an SVG file, which a path that ends in .svg names

``python -m bench --markdown FILE ...`` prints every block of the documents, and the pages of the
records, again. It draws a plot again if the record has changed; delete the SVG file to draw it in
any case.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bench import beside, plot, provenance, report
from bench.op import DIRECTIONS
from bench.record import Cell, Record, by_shape, load, merge
from bench.text import columns, distinct

OPTIONS = {"op": str, "dtype": str, "n": int, "direction": str, "provider": str, "way": str}
BLOCK = re.compile(
    r"(?P<opening><!-- (?P<kind>\w+): (?P<words>[^>]*?\.jsonl[^>]*) -->\n)"
    r"(?P<text>.*?)(?P<closing><!-- end -->)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """What a pair of markers asks for.

    ``sources`` holds the path of each record, relative to the document, and the narrowed record.
    """

    kind: str
    sources: list[tuple[str, Record]]
    svg: str

    @property
    def record(self) -> Record:
        """The narrowed records together."""
        return merge([record for _, record in self.sources])

    def is_drawn(self, folder: Path) -> bool:
        """Whether the SVG file of a plot exists and shows its records."""
        svg = folder / self.svg
        return svg.exists() and f"digest {plot.digest(self.record)}" in svg.read_text()


def blocks(path: Path) -> list[Block]:
    """The blocks of a document, in order."""
    return [_block(path, match) for match in BLOCK.finditer(path.read_text())]


def rewritten(path: Path) -> str:
    """The text of a document with every block printed again from its records."""

    def printed(match: re.Match) -> str:
        block = _block(path, match)
        return f"{match['opening']}\n{KINDS[block.kind](block)}\n\n{match['closing']}"

    return BLOCK.sub(printed, path.read_text())


def update(path: Path) -> None:
    """Write the page of a record, or a document's blocks and those of its plots that are old."""
    if path.suffix == ".jsonl":
        path.with_suffix(".md").write_text(page(path))
        return
    path.write_text(rewritten(path))
    for block in blocks(path):
        if block.kind == "plot" and not block.is_drawn(path.parent):
            plot.save(block.record, str(path.parent / block.svg))


def page(path: Path) -> str:
    """A record in Markdown: where, when and how it was made, and all of its tables."""
    record = load([path])
    parts = [f"# {path.stem}", f"Printed from [{path.name}]({path.name})."]
    for run in record.runs:
        machine = f"{run['machine']}, {run['date'][:10]}, {report.versions(run)}"
        commit = f"tilenorm {run['tilenorm']} at commit {run['commit'] or 'unknown'}"
        parts.append(f"{machine}, {commit}, by `{run['command']}`.")
    parts += [table.shown(markdown=True) for table in report.tables(record)]
    return "\n\n".join(parts) + "\n"


def _block(document: Path, match: re.Match) -> Block:
    """Raises ValueError for an unknown word, a missing record, a cell that two records show, or a
    release's record beside one of other kernels.
    """
    kind, opening = match["kind"], match["opening"].strip()
    options, svg = [], ""
    for word in match["words"].split():
        name, equals, values = word.partition("=")
        if word.endswith(".svg"):
            svg = word
        elif not equals:
            found = sorted(document.parent.glob(word))
            if not found:
                raise ValueError(f"{document}: there is no record {word} in {opening}")
            options += [(str(path.relative_to(document.parent)), {}) for path in found]
        elif name in OPTIONS:
            options[-1][1][name] = [OPTIONS[name](value) for value in values.split(",")]
        else:
            raise ValueError(f"{document}: {name} is unknown in {opening}")
    if kind not in KINDS:
        raise ValueError(f"{document}: {kind} is unknown in {opening}")
    sources = [
        (path, load([document.parent / path]).narrowed(**wanted)) for path, wanted in options
    ]
    block = Block(kind, sources, svg)
    cells = sum(len(record.cells) for _, record in sources)
    apart = kind in ("index", "gains", "steps", "measured")  # these have each record by itself
    shown = None if apart else block.record
    if kind in ("summary", "plot") and len(shown.cells) < cells:
        raise ValueError(f"{document}: two records have the same cells in {opening}")
    return block


def _summary(block: Block) -> str:
    """A row for each N and direction, and a column for each op."""
    ops = [op for op, _ in report.ops_and_dtypes(block.record.cells)]
    shapes: dict[tuple, dict[str, Cell]] = {}
    for cell in block.record.cells:
        shapes.setdefault((cell.op, cell.direction, cell.n), {})[cell.provider] = cell
    rows = []
    for direction in DIRECTIONS:
        for n in sorted({n for *_, n in shapes}):
            here = [shapes.get((op, direction, n), {}) for op in ops]
            if any(here):
                rows.append([n, direction, *map(_speed, here)])
    return columns(["N", "direction", *ops], rows)


def _speed(cells: dict[str, Cell]) -> str:
    """Our GB/s, and our speed relative to the fastest other provider.

    A star marks a cell whose record does not have torch.compile at this shape.
    """
    if not (found := report.best_peer(cells)):
        return "-"
    star = "" if "compile" in cells else " *"
    return f"{cells[report.OURS].gbps:.0f} ({found[0]:.2f} × {found[1]}){star}"


def _losses(block: Block) -> str:
    """A sentence on every shape at which the rounded ratio to another provider is below 1, with the
    numbers of rows where several are. Of each provider the latest number counts.
    """
    shapes = by_shape(record for _, record in block.sources).items()
    compared = [(shape, best) for shape, cells in shapes if (best := report.best_peer(cells))]
    lost: dict[tuple, dict[tuple, dict[int, float]]] = {}
    for (op, direction, dtype, n, m), (ratio, name) in compared:
        if round(ratio, 2) < 1:
            here = lost.setdefault((op, direction, dtype), {})
            here.setdefault((n, name), {})[m] = ratio
    if not lost:
        return f"No other provider is faster at any of the {len(compared)} measured shapes."
    count, lines = 0, []
    for (op, direction, dtype), here in lost.items():
        parts = []
        for (n, name), ratios in here.items():
            rows = f" with {', '.join(map(str, ratios))} rows" if len(ratios) > 1 else ""
            spread = report.spread_of([*ratios.values()], ".2f")
            parts.append(f"{spread} × {name} at {n}{rows}")
            count += len(ratios)
        lines.append(f"- `{op}` {direction}, {dtype}: {', '.join(parts)}")
    first = f"Another provider is faster at {count} of the {len(compared)} measured shapes:\n"
    return "\n".join([first, *lines])


def newest(records: Iterable[Record]) -> list[Record]:
    """The latest record of each machine."""
    ordered = sorted(records, key=lambda record: record.runs[-1]["date"])
    return [*{record.runs[-1]["machine"]: record for record in ordered}.values()]


def _measured(block: Block) -> str:
    """A sentence for each machine: whether its newest release is of this checkout's kernels."""
    lines, here = [], provenance.sources(*provenance.KERNELS)
    for record in newest(record for _, record in block.sources):
        run = record.runs[-1]
        name, day = run["machine"].split()[1], run["date"][:10]
        kernels = "of these kernels" if run.get("kernels") == here else "of older kernels"
        lines.append(f"- The {name}'s release is {kernels}: commit {run['commit']}, {day}.")
    return "\n".join(sorted(lines))


def _index(block: Block) -> str:
    """A row for each record."""
    lines = ["| question | answer | record | date | commit |", "| :-- | :-- | :-- | :-- | :-- |"]
    for path, record in block.sources:
        run = record.runs[-1]
        link = f"[{Path(path).stem}]({Path(path).with_suffix('.md').as_posix()})"
        cells = [*about(record), link, run["date"][:10], run["commit"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _hosts(block: Block) -> str:
    """The host time of PyTorch's norms and of tilenorm's, eager and compiled."""
    rows = []
    measured = {(h.op, h.way, h.path, h.provider): h for h in block.record.hosts if not h.error}
    for (op, way, path, provider), base in measured.items():
        other = {"torch": "tilenorm", "compile": "tilenorm-compile"}.get(provider)
        if ours := measured.get((op, way, path, other)):
            pairs = [(getattr(base, name), getattr(ours, name)) for name in report.NEVER_LEFT_OUT]
            shown = [
                f"{before:.1f} → {after:.1f} ({after / before:.2f})" for before, after in pairs
            ]
            rows.append([op, " ".join(filter(None, (way, path))), provider, other, *shown])
    header = ["op", "way", "A", "B", "forward, µs", "forward and backward, µs"]
    return columns(header, rows)


def about(record: Record) -> tuple[str, str]:
    """The question and the answer of a record, by the first kind of lines that it has."""
    kinds = {"cells": _about_cells, "pairs": _about_pairs, "accuracies": _about_accuracies}
    kinds |= {
        "tests": _about_tests,
        "turns": _about_turns,
        "first_calls": _about_first_calls,
        "hosts": _about_hosts,
    }
    return next(answer(record) for name, answer in kinds.items() if getattr(record, name))


def _about_cells(record: Record) -> tuple[str, str]:
    cells = [cell for cell in record.cells if cell.gbps]
    ops, ways, dtypes = (_listed(cells, name) for name in ("op", "direction", "dtype"))
    others = _listed((cell for cell in cells if cell.provider != report.OURS), "provider")
    sizes = report.spread_of(distinct(cells, "n"), "d")
    question = f"{ops}: {ways}, {dtypes}, N {sizes}{', beside ' * bool(others)}{others}"
    compared = map(report.best_peer, by_shape([record]).values())
    ratios = [best[0] for best in compared if best]
    if ratios:
        ahead = sum(round(ratio, 2) >= 1 for ratio in ratios)
        speed = f"{report.spread_of(ratios, '.2f')} × the fastest other"
        return question, f"{speed}; not slower at {ahead} of {len(ratios)} shapes"
    rated = [cell for cell in cells if cell.direction in DIRECTIONS]
    shares = [cell.gbps / record.copied[cell.dtype, cell.m, cell.n] for cell in rated]
    return question, f"{report.spread_of(shares, '.0%')} of a copy"


def _about_pairs(record: Record) -> tuple[str, str]:
    asked, answers = [], []
    for pair in record.timed_pairs:
        peaks = " → ".join(map(report.gib, pair.peak_bytes))
        asked.append(f"{pair.variant} beside {pair.base}")
        answers.append(f"{report.with_interval(pair.more_tokens, 100, '%')}, {peaks} GiB")
    compared = ", ".join(dict.fromkeys(asked))
    return f"{_listed(record.pairs, 'label')}: tokens/s of {compared}", "; ".join(answers)


def _about_accuracies(record: Record) -> tuple[str, str]:
    lines = record.accuracies
    question = f"{_listed((line for line in lines if line.ulps), 'op')}: errors on difficult inputs"
    beyond = len(report.worse(lines))
    return question, f"results beyond the contract with PyTorch: {beyond}"


def _about_first_calls(record: Record) -> tuple[str, str]:
    ours = [call for call in record.first_calls if call.provider == report.OURS]
    cold, warm = ([getattr(call, name) for call in ours] for name in ("cold_s", "warm_s"))
    took, again = report.spread_of(cold, ".2f"), report.spread_of(warm, ".3f")
    answer = f"{took} s, and {again} s with caches on the disk"
    return f"{_listed(ours, 'op')}: the first call", answer


def _about_hosts(record: Record) -> tuple[str, str]:
    way = min(h.way for h in record.hosts)  # of calls and steps, calls
    times = {(h.op, h.provider): h for h in record.hosts if h.way == way and not h.error}
    ops = list(dict.fromkeys(op for op, _ in times))
    ratios = (
        [getattr(times[op, report.OURS], way) / getattr(times[op, "torch"], way) for op in ops]
        for way in report.NEVER_LEFT_OUT
    )
    alone, both = (report.spread_of(of, ".2f") for of in ratios)
    answer = f"{alone} × PyTorch's, {both} with a backward"
    return f"{', '.join(ops)}: host time of a {way}", answer


def _about_tests(record: Record) -> tuple[str, str]:
    last = record.tests[-1]
    skipped = sum(last.skipped.values())
    counts = f"{last.passed} passed, {len(last.failed)} failed, {skipped} skipped"
    return "the tests that need a GPU", f"{counts}, {last.not_reached} not reached"


def _about_turns(record: Record) -> tuple[str, str]:
    pairs = [(line, base) for line, base in beside.losses_first(record.turns) if line is not base]
    asked, bases = ([*dict.fromkeys(x.provider for x in of)] for of in zip(*pairs, strict=True))
    ratios = [line.ratio(base).median for line, base in pairs]
    slower = sum(round(ratio, 3) > 1 for ratio in ratios)
    labels = _listed((line for line, _ in pairs), "label")
    question = f"{labels}: host time of {', '.join(asked)}"
    answer = f"{report.spread_of(ratios, '.3f')} × {', '.join(bases)}'s"
    return question, f"{answer}; slower at {slower} of {len(pairs)}"


def _listed(lines: Iterable, name: str) -> str:
    return ", ".join(distinct(lines, name))


KINDS = {
    "hosts": _hosts,
    "turns": lambda block: columns(*beside.listed(block.record.turns)[1:3]),
    "summary": _summary,
    "losses": _losses,
    "measured": _measured,
    "index": _index,
    "gains": lambda block: report.gains(record for _, record in block.sources),
    "steps": lambda block: report.steps(record for _, record in block.sources),
    "plot": lambda block: f"![GB/s against N]({block.svg})",
}
