"""The tables of ``python -m bench accuracy``. Nothing in this module measures."""

from collections.abc import Iterable, Sequence

from bench.record import Accuracy
from bench.text import table, titled

OURS, EAGER = "tilenorm", "torch"
OVER_EAGER = 2
FEW_ULPS = 4

# For each dtype, op and result: each provider's largest error, and the inputs that gave it.
Largest = dict[tuple[str, str, str], dict[str, tuple[float, str]]]


def largest_errors(lines: Iterable[Accuracy]) -> Largest:
    """The largest errors over all inputs and shapes."""
    found: Largest = {}
    for line in lines:
        for result, ulps in line.ulps.items():
            here = found.setdefault((line.dtype, line.op, result), {})
            here[line.provider] = max(here.get(line.provider, (-1.0, "")), (ulps, line.inputs))
    return found


def worse(lines: Iterable[Accuracy]) -> list[str]:
    """A line for each result in which tilenorm is worse than its contract with PyTorch.

    tilenorm is compared with PyTorch on the same inputs, and not on each one's worst inputs.
    """
    by_case = {}
    for line in lines:
        case = line.dtype, line.op, line.m, line.n, line.inputs
        by_case.setdefault(case, {})[line.provider] = line.ulps
    found = []
    for (dtype, op, m, n, inputs), ulps in by_case.items():
        for result, ours in ulps.get(OURS, {}).items():
            eager = ulps.get(EAGER, {}).get(result)
            if eager is not None and not ours <= max(OVER_EAGER * eager, FEW_ULPS):
                errors = f"{ours:.3g} ulps, {EAGER} {eager:.3g}"
                found.append(f"{op} {dtype} {m} x {n}, {result}, {inputs}: {errors}")
    return found


def tables(lines: Sequence[Accuracy], markdown: bool) -> list[str]:
    """A table for each dtype, with a row for each op and result and a column for each provider."""
    found = largest_errors(lines)
    names = list(dict.fromkeys(line.provider for line in lines if line.ulps))
    parts = []
    for dtype in dict.fromkeys(line.dtype for line in lines):
        here = {key[1:]: errors for key, errors in found.items() if key[0] == dtype}
        rows = []
        for (op, result), errors in here.items():
            shown = [f"{errors[name][0]:.3g}" if name in errors else "-" for name in names]
            worst = errors[OURS][1] if OURS in errors else "-"
            rows.append([op, result, *shown, worst, _ratio(errors)])
        header = ["op", "result", *names, f"worst inputs of {OURS}", f"{OURS} / {EAGER}"]
        title = f"{dtype}: largest error against float64, in ulps"
        notes = _notes([line for line in lines if line.dtype == dtype])
        parts.append(titled(title, table(header, rows, markdown), notes, markdown))
    return parts


def _ratio(errors: dict[str, tuple[float, str]]) -> str:
    if OURS not in errors or EAGER not in errors or not errors[EAGER][0]:
        return "-"
    return f"{errors[OURS][0] / errors[EAGER][0]:.2f}"


def _notes(lines: Sequence[Accuracy]) -> list[str]:
    """The shapes and inputs, tilenorm's contract, and why providers have no result."""
    shapes = dict.fromkeys(f"{line.m} x {line.n}" for line in lines)
    kinds = dict.fromkeys(line.inputs for line in lines)
    notes = [f"shapes: {', '.join(shapes)}; inputs: {', '.join(kinds)}"]
    limit = f"more than {OVER_EAGER} times {EAGER}'s error on the same inputs and {FEW_ULPS} ulps"
    beyond = worse(lines)
    notes.append(f"{OURS} with {limit}: {'; '.join(beyond) or 'nowhere'}")
    failed = {}
    for line in lines:
        if line.error:
            failed.setdefault((line.provider, line.error), {})[line.op] = None
    return notes + [f"{name}, {', '.join(ops)}: {why}" for (name, why), ops in failed.items()]
