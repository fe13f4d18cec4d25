"""Tables of what took turns: calls in the cold and whole steps, what loses to its base first."""

from collections.abc import Iterable, Sequence
from statistics import median

from bench.record import CONFIDENCE, Estimate, Turns
from bench.text import Table, grouped

TOGETHER = ("way", "label", "path")  # fields of the lines that took turns
TITLES = {"cold": "calls behind other work", "model": "training steps"}
UNITS = {"cold": ("µs", 1.0), "model": ("ms", 1e3)}
MORE, RATIO = "µs a norm more", f"times {{}} ({CONFIDENCE:.0%})"


def losses_first(lines: Iterable[Turns]) -> list[tuple[Turns, Turns]]:
    """The lines that have samples, each with its base. The slowest beside its base is the first.

    Where the base has no samples, the first line that has some takes its place.
    """
    pairs = []
    for group in grouped((line for line in lines if line.us), *TOGETHER).values():
        base = next((line for line in group if line.provider == line.base), group[0])
        pairs += [(line, base) for line in group]
    return sorted(pairs, key=lambda pair: pair[0].ratio(pair[1]).median, reverse=True)


def table(lines: Sequence[Turns]) -> Table:
    """A row for each provider of a call, or for each variant of a step."""
    first, pairs = lines[0], losses_first(lines)
    unit, us = UNITS[first.way]
    phases = pairs[0][0].us if pairs else {}
    rows = []
    for line, base in pairs:
        shown = [f"{median(of) / us:.2f} ({min(of) / us:.2f})" for of in line.us.values()]
        more = " / ".join(f"{us:+.1f}" for us in line.more_us(base))
        rows.append([line.provider, *shown, more, _interval(line.ratio(base))])
    rounds = f"median (least) of {len(pairs[0][0].whole)} rounds" if pairs else "no time"
    title = f"{first.label}: {TITLES[first.way]} in {unit}, {rounds}, {first.path}"
    notes = [f"{line.provider}: {line.error or 'out of time'}" for line in lines if not line.us]
    header = ["B", *phases, f"{MORE}, of each", RATIO.format(first.base)]
    return Table(title, header, rows, notes)


def listed(lines: Sequence[Turns]) -> Table:
    """A row for each provider or variant of lines of one way, except the bases."""
    rows = []
    for line, base in losses_first(lines):
        if line is not base:
            unit, us = UNITS[line.way]
            both = " → ".join(f"{median(of.whole) / us:.2f}" for of in (base, line))
            names = [line.label, line.path, base.provider, line.provider, f"{both} {unit}"]
            more = f"{line.more_us(base)[-1]:+.1f}"
            rows.append([*names, more, _interval(line.ratio(base))])
    title = f"{TITLES[lines[0].way]}, losses first"
    return Table(title, ["measured", "host path", "A", "B", "A → B", MORE, RATIO.format("A")], rows)


def _interval(ratio: Estimate) -> str:
    ends = "too few rounds" if ratio.low is None else f"{ratio.low:.3f} to {ratio.high:.3f}"
    return f"{ratio.median:.3f} ({ends})"
