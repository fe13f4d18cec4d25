"""Reads the measured tables: those of the architectures, and of machines of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..config import config_of
from ..target import TARGETS


class Table(NamedTuple):
    """What was measured on one architecture or machine, by (operation, bytes of an element). A
    configuration is None where the rules of heuristics.py serve.

    forward, backward: rows of (largest hidden size served, configuration). more: what serves a size
    of `backward` with several terms of dy, or where y is written once more, in rows of (that size,
    the fewest terms, whether y is written, configuration). forward_uneven, backward_uneven: what
    serves a row instead that ends within a chunk. spills: bytes that each thread spills, by
    (kernel, operation, bytes of an element, hidden size). versions: of the compiler and of cuTile,
    with which all of it was measured, as in user_table.versions().
    """

    forward: dict[tuple[str, int], tuple]
    backward: dict[tuple[str, int], tuple]
    forward_uneven: dict[tuple[str, int], tuple]
    backward_uneven: dict[tuple[str, int], tuple]
    more: dict[tuple[str, int], tuple]
    spills: dict[tuple[str, str, int, int], int]
    versions: dict[str, str]


def read(text: str) -> Table:
    """The table in the text of a file."""
    data = json.loads(text)
    spills = _tables(data["spills"], tuple).items()

    def of_sizes(name: str) -> dict:
        return _tables(data[name], lambda row: (row[0], row[1] and config_of(row[1])))

    return Table(
        of_sizes("forward"),
        of_sizes("backward"),
        of_sizes("forward_of_uneven"),
        of_sizes("backward_of_uneven"),
        _tables(data["backward_of_more"], lambda row: (*row[:3], config_of(row[3]))),
        {(kernel, *key, n): spilled for key, rows in spills for kernel, n, spilled in rows},
        data["versions"],
    )


def _tables(tables: dict, decoded: Callable[[list], tuple]) -> dict[tuple[str, int], tuple]:
    named = ((name.split(), rows) for name, rows in tables.items() if name != "about")
    return {(op, int(size)): tuple(map(decoded, rows)) for (op, size), rows in named}


def _over(shared: Table, of_machine: Table) -> Table:
    """The table of a machine: its own rows replace those for the same size of an architecture's."""
    return shared._replace(
        forward=_rows_over(shared.forward, of_machine.forward),
        backward=_rows_over(shared.backward, of_machine.backward),
        versions=of_machine.versions,
    )


def _rows_over(shared: dict, of_machine: dict) -> dict:
    merged = {key: dict(shared.get(key, ())) | dict(rows) for key, rows in of_machine.items()}
    return shared | {key: tuple(sorted(rows.items())) for key, rows in merged.items()}


_FILES = Path(__file__).parent.glob("*.json")
TABLES = {file.stem: read(file.read_text(encoding="utf-8")) for file in _FILES}
TABLES |= {n: _over(TABLES[arch], TABLES[n]) for n, (arch, machine) in TARGETS.items() if machine}
