from dataclasses import replace

import pytest

from bench.compare import slower
from bench.record import Cell, Copy, Record

from .test_record import RUN, SHAPE, TIMED

CELL = Cell(**SHAPE, **TIMED, provider="tilenorm", median_us=100.0)
COPY = Copy("bfloat16", 1000, 1024, 4_000_000, 10.0, 0.0, 10, "graph")


def compared(old, new, old_copy=None, new_copy=None):
    records = [Record([RUN]), Record([RUN])]
    for record, lines in zip(records, ((old, old_copy), (new, new_copy)), strict=True):
        for line in filter(None, lines):
            record.add(line)
    return slower(*records)


def test_slower_means_by_more_than_both_spreads():
    assert compared(CELL, replace(CELL, median_us=101.9)) == (1, [])
    count, (line,) = compared(CELL, replace(CELL, median_us=102.1))
    assert count == 1
    assert line.startswith("rms_norm forward bfloat16 1000 x 1024, tilenorm: 100 µs, now 102.1 ")
    assert compared(CELL, replace(CELL, median_us=50.0)) == (1, [])


def test_change_of_the_machine_is_subtracted():
    new = replace(CELL, median_us=104.0)
    assert compared(CELL, new, COPY, replace(COPY, median_us=10.3)) == (1, [])
    assert len(compared(CELL, new, COPY, COPY)[1]) == 1
    assert len(compared(CELL, new, COPY)[1]) == 1  # no copy to compare with


def test_cell_that_has_no_time_any_more_is_slower():
    wrong = replace(CELL, median_us=None, spread=None, status="wrong", error="dx is off")
    assert compared(CELL, wrong)[1] == [
        "rms_norm forward bfloat16 1000 x 1024, tilenorm: 100 µs, now wrong: dx is off"
    ]
    assert compared(wrong, CELL) == (0, [])


def test_only_cells_in_both_records_are_compared():
    assert compared(CELL, replace(CELL, provider="torch", median_us=900.0)) == (0, [])
    assert compared(CELL, replace(CELL, direction="inference", median_us=900.0)) == (0, [])


def test_records_of_different_machines_are_refused():
    with pytest.raises(ValueError, match="Another GPU"):
        slower(Record([RUN]), Record([{**RUN, "machine": "Another GPU"}]))
