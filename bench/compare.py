"""The comparison of two records of one machine: what became slower."""

from bench.record import Cell, Record, what


def slower(old: Record, new: Record) -> tuple[int, list[str]]:
    """The number of measurements in both records, and a line for each that became slower.

    A measurement became slower if its median grew by more than the sum of both spreads and of the
    change of the copy of the same shape. The change of the copy shows by how much the speed of the
    machine changed. A measurement that has no median any more counts as slower, too.

    Raises ValueError for records of different machines.
    """
    machines = sorted({run["machine"] for run in (*old.runs, *new.runs)})
    if len(machines) > 1:
        raise ValueError(f"records of different machines cannot be compared: {machines}")
    before = {what(cell): cell for cell in old.cells if cell.median_us}
    found = {what(cell): cell for cell in new.cells}
    common = [key for key in before if key in found]
    lines = [_complaint(before[key], found[key], _drift(old, new, before[key])) for key in common]
    return len(common), [line for line in lines if line]


def _complaint(old: Cell, new: Cell, drift: float) -> str | None:
    was = f"{_label(old)}: {old.median_us:.4g} µs"
    if new.median_us is None:
        return f"{was}, now {new.status}: {new.error}"
    allowed = old.spread + new.spread + drift
    change = new.median_us / old.median_us - 1
    if change <= allowed:
        return None
    return f"{was}, now {new.median_us:.4g} (+{change:.1%}, more than the allowed {allowed:.1%})"


def _drift(old: Record, new: Record, line: Cell) -> float:
    """The relative change of the copy of a cell's shape, or 0 unless both records measured it."""
    before, after = (
        [c.median_us for c in record.copies if (c.dtype, c.m, c.n) == (line.dtype, line.m, line.n)]
        for record in (old, new)
    )
    return abs(after[0] / before[0] - 1) if before and after else 0.0


def _label(line: Cell) -> str:
    return f"{line.op} {line.direction} {line.dtype} {line.m} x {line.n}, {line.provider}"
