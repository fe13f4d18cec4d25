"""The tables of ``python -m bench accuracy``. Nothing in this module measures."""

from collections.abc import Iterable, Iterator, Sequence

from bench.record import Accuracy
from bench.text import Table, distinct, grouped

OURS, EAGER = "tilenorm", "torch"
OVER_EAGER = 2
FEW_ULPS = 4


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


def tables(lines: Sequence[Accuracy]) -> Iterator[Table]:
    """A table for each dtype, with a row for each op and result and a column for each provider."""
    names = distinct((line for line in lines if line.ulps), "provider")
    for dtype, here in grouped(lines, "dtype").items():
        rows = []
        for op, of_op in grouped(here, "op").items():
            for result in dict.fromkeys(name for line in of_op for name in line.ulps):
                rows.append([op, result, *_largest(of_op, result, names)])
        header = ["op", "result", *names, f"worst inputs of {OURS}", f"{OURS} / {EAGER}"]
        title = f"{dtype}: largest error against float64, in ulps"
        yield Table(title, header, rows, _notes(here))


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


def _notes(lines: Sequence[Accuracy]) -> list[str]:
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
