"""The tables of paired training steps in a report."""

from collections.abc import Sequence

from bench.interval import CONFIDENCE, Estimate
from bench.lines import Pair
from bench.text import table, titled

KERNELS = 16  # rows of the table of kernels
NOTES = (
    f"Intervals: those of the sign test, at {CONFIDENCE:.0%}. They hold for every distribution of\n"
    "independent pairs. Both variants run in one process over the same weights, in turn.",
    "Counted kernels: the bytes and the time of tilenorm's kernels and of those that Inductor\n"
    "generated, in one step. Each tensor that a kernel takes counts once, and a tensor that\n"
    "Inductor updates in place twice.",
    "Gradient: the largest change of a gradient from A to B, as a share of its norm, in the first\n"
    "step from the same weights.",
)


def table_of(pairs: Sequence[Pair], markdown: bool) -> str:
    """A row for each pair, of all models."""
    header = ["model", "A", "B", "pairs", "ms a step, A / B", f"B - A, ms ({CONFIDENCE:.0%})"]
    header += ["tokens/s, A / B", f"B's tokens/s more ({CONFIDENCE:.0%})", "peak GiB, A / B"]
    header += ["counted kernels of A", "of B", "gradient"]
    rows, notes = [], [*NOTES]
    for pair in pairs:
        names = [pair.label, pair.base, pair.variant]
        if pair.error:
            notes.append(f"{', '.join(names)}: {pair.status}: {pair.error}")
        if not pair.pairs_us:
            rows.append([*names, pair.status, *["-"] * (len(header) - len(names) - 1)])
            continue
        base, variant = pair.medians_us
        made = len(pair.pairs_us)
        if pair.gpus > 1:
            notes.append(f"{', '.join(names)}: tokens/s are of one of {pair.gpus} GPUs")
        if made < pair.asked:
            notes.append(f"{', '.join(names)}: out of time after {made} of {pair.asked} pairs")
        rows.append(
            [
                *names,
                made,
                f"{base / 1e3:.2f} / {variant / 1e3:.2f}",
                with_interval(pair.difference_us, 1e-3, "+.2f", ""),
                " / ".join(f"{pair.tokens / pair.gpus / us * 1e6:.0f}" for us in (base, variant)),
                with_interval(pair.more_tokens, 100, "+.2f", "%"),
                " / ".join(map(gib, pair.peak_bytes)),
                *(map(_counted, pair.kernels) if pair.kernels else ("-", "-")),
                "-" if pair.gradient_change is None else f"{pair.gradient_change:.2g}",
            ]
        )
    return titled("pairs of training steps", table(header, rows, markdown), notes, markdown)


def gains(pairs: Sequence[Pair]) -> str:
    """What the second variant of each pair gains, in Markdown."""
    header = ["model", "A", "B", "ms a step", f"B's tokens/s more ({CONFIDENCE:.0%})", "peak GiB"]
    rows = [
        [
            *(pair.label, pair.base, pair.variant),
            " → ".join(f"{us / 1e3:.1f}" for us in pair.medians_us),
            with_interval(pair.more_tokens, 100, "+.2f", "%"),
            " → ".join(map(gib, pair.peak_bytes)),
        ]
        for pair in pairs
    ]
    return table(header, rows, markdown=True)


def kernels_of(pair: Pair, markdown: bool) -> str:
    """The kernels whose time differs most between the two variants of a pair, and all together."""
    none = {"ms": 0.0}
    both = [{line["name"]: line for line in lines} for lines in pair.kernels]
    names = dict.fromkeys(name for lines in both for name in lines)
    spent = {name: [lines.get(name, none)["ms"] for lines in both] for name in names}
    most = sorted(names, key=lambda name: -abs(spent[name][1] - spent[name][0]))
    rows = [
        [name, *(cell for lines in both for cell in _cells(lines.get(name)))]
        for name in most[:KERNELS]
    ]
    rows.append(["all kernels", *(cell for lines in pair.kernels for cell in _all(lines))])
    header = ["kernel", *(f"{what} of {x}" for x in "AB" for what in ("calls", "ms", "GB"))]
    title = f"kernels of a step: A is {pair.base}, B is {pair.variant}: {pair.model}"
    less = len(names) - len(rows) + 1
    notes = [f"{less} kernels whose time differs less are left out."] if less > 0 else []
    return titled(title, table(header, rows, markdown), notes, markdown)


def with_interval(value: Estimate, unit: float, form: str, sign: str) -> str:
    shown = f"{value.median * unit:{form}}{sign}"
    if value.low is None:
        return f"{shown} (too few pairs)"
    return f"{shown} ({value.low * unit:{form}} to {value.high * unit:{form}}{sign})"


def gib(nbytes: int | None) -> str:
    return f"{nbytes / 2**30:.2f}" if nbytes else "-"


def _counted(lines: Sequence[dict]) -> str:
    """The bytes and the time of the kernels whose bytes are known."""
    known = [line for line in lines if line["bytes"] is not None]
    return f"{sum(k['bytes'] for k in known) / 1e9:.1f} GB, {sum(k['ms'] for k in known):.2f} ms"


def _cells(line: dict | None) -> list[str]:
    if line is None:
        return ["-", "-", "-"]
    moved = "-" if line["bytes"] is None else f"{line['bytes'] / 1e9:.3f}"
    return [str(line["calls"]), f"{line['ms']:.3f}", moved]


def _all(lines: Sequence[dict]) -> list[str]:
    moved = sum(line["bytes"] or 0 for line in lines) / 1e9
    calls, ms = (sum(line[name] for line in lines) for name in ("calls", "ms"))
    return [str(calls), f"{ms:.3f}", f"{moved:.3f}"]
