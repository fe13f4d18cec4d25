"""What a record asks and what it answers, in a line. Nothing in this module measures."""

from collections.abc import Iterable

from bench import accuracy_table, pair_table, report
from bench.op import DIRECTIONS
from bench.record import Record, by_shape


def about(record: Record) -> tuple[str, str]:
    """The question and the answer of a record, by the first kind of lines that it has."""
    if record.cells:
        return _cells(record)
    if record.pairs:
        return _pairs(record)
    if record.accuracies:
        return _accuracies(record)
    if record.first_calls:
        return _first_calls(record)
    return _hosts(record)


def _cells(record: Record) -> tuple[str, str]:
    cells = [cell for cell in record.cells if cell.gbps]
    ops, ways = _listed(c.op for c in cells), _listed(c.direction for c in cells)
    others = _listed(c.provider for c in cells if c.provider != report.OURS)
    sizes = report.spread_of([c.n for c in cells], "d")
    dtypes = _listed(c.dtype for c in cells)
    question = f"{ops}: {ways}, {dtypes}, N {sizes}{', beside ' * bool(others)}{others}"
    compared = map(report.best_peer, by_shape([record]).values())
    ratios = [best[0] for best in compared if best]
    if ratios:
        ahead = sum(round(ratio, 2) >= 1 for ratio in ratios)
        speed = f"{report.spread_of(ratios, '.2f')} × the fastest other"
        return question, f"{speed}; not slower at {ahead} of {len(ratios)} shapes"
    copies = {(copy.dtype, copy.m, copy.n): copy.gbps for copy in record.copies}
    shares = [c.gbps / copies[c.dtype, c.m, c.n] for c in cells if c.direction in DIRECTIONS]
    return question, f"{report.spread_of(shares, '.0%')} of a copy"


def _pairs(record: Record) -> tuple[str, str]:
    asked, answers = [], []
    for pair in record.pairs:
        peaks = " → ".join(map(pair_table.gib, pair.peak_bytes))
        more = pair_table.with_interval(pair.more_tokens, 100, "+.2f", "%")
        asked.append(f"{pair.variant} beside {pair.base}")
        answers.append(f"{more}, {peaks} GiB")
    labels = _listed(pair.label for pair in record.pairs)
    return f"{labels}: tokens/s of {_listed(asked)}", "; ".join(answers)


def _accuracies(record: Record) -> tuple[str, str]:
    lines = record.accuracies
    question = f"{_listed(line.op for line in lines if line.ulps)}: errors on difficult inputs"
    beyond = len(accuracy_table.worse(lines))
    return question, f"results beyond the contract with PyTorch: {beyond}"


def _first_calls(record: Record) -> tuple[str, str]:
    ours = [call for call in record.first_calls if call.provider == report.OURS]
    cold, warm = ([getattr(call, name) for call in ours] for name in ("cold_s", "warm_s"))
    took, again = report.spread_of(cold, ".2f"), report.spread_of(warm, ".3f")
    answer = f"{took} s, and {again} s with caches on the disk"
    return f"{_listed(call.op for call in ours)}: the first call", answer


def _hosts(record: Record) -> tuple[str, str]:
    times = {(h.op, h.provider): h for h in record.hosts if h.way == "call" and not h.error}
    ops = list(dict.fromkeys(op for op, _ in times))
    ratios = {}
    for name in ("forward_us", "forward_backward_us"):
        both = ([getattr(times[op, who], name) for op in ops] for who in (report.OURS, "torch"))
        ratios[name] = report.spread_of(
            [ours / theirs for ours, theirs in zip(*both, strict=True)], ".2f"
        )
    answer = f"{ratios['forward_us']} × PyTorch's, {ratios['forward_backward_us']} with a backward"
    return f"{_listed(ops)}: host time of a call", answer


def _listed(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))
