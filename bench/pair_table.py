"""The tables of paired training steps in a report."""

from collections.abc import Sequence

from bench.lines import CONFIDENCE, Estimate, Pair
from bench.text import Table, columns

KERNELS = 16  # rows of the table of kernels
NOTES = (
    f"Intervals: those of the sign test, at {CONFIDENCE:.0%}. They hold for every distribution of\n"
    "independent pairs. Both variants run in one process over the same weights, in turn.",
    "Gradient: the largest change of a gradient from A to B, as a share of its norm, in the first\n"
    "step from the same weights.",
)
MORE = f"B's tokens/s more ({CONFIDENCE:.0%})"


def table_of(pairs: Sequence[Pair]) -> Table:
    """A row for each pair, of all models."""
    header = ["model", "A", "B", "pairs", "ms a step, A / B", f"B - A, ms ({CONFIDENCE:.0%})"]
    header += ["tokens/s, A / B", MORE, "peak GiB, A / B", "gradient"]
    rows, notes = [], [*NOTES]
    for pair in pairs:
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


def gains(pairs: Sequence[Pair]) -> str:
    """What the second variant of each pair gains, in Markdown."""
    rows = []
    for pair in pairs:
        ms = " → ".join(f"{us / 1e3:.1f}" for us in pair.medians_us)
        more, peak = (
            with_interval(pair.more_tokens, 100, "%"),
            " → ".join(map(gib, pair.peak_bytes)),
        )
        rows.append([pair.label, pair.base, pair.variant, ms, more, peak])
    return columns(["model", "A", "B", "ms a step", MORE, "peak GiB"], rows)


def kernels_of(pair: Pair) -> Table:
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
