"""Prints a user's table as the text of a table in launch/tuned/."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby, pairwise

from ...launch.config import RowForward, Served, StreamForward, data_of, tile_width
from ...launch.target import Target
from ...launch.user_table import Entry, versions


def render(entries: Iterable[Entry], arch: str) -> str:
    """The text of a table, for rows of whole vectors without heads, and for one term of dy.

    A table row serves every size between the previous row's size and its own. Raises ValueError if
    the configuration cannot serve one of these sizes; the message says what to tune.
    """
    served = (e for e in entries if e.key.aligned and not e.key.heads and e.key.terms == 1)
    entries = sorted(served, key=lambda entry: entry.key)
    spills = [
        (f"{entry.key.op} {entry.key.item_bytes}", [kernel, entry.key.hidden, spilled])
        for entry in sorted(entries, key=lambda e: (e.key.op, e.key.item_bytes))
        for kernel, spilled in entry.spills.items()
    ]
    tables = {"spills": {name: [r for _, r in of] for name, of in groupby(spills, lambda s: s[0])}}
    for direction in ("forward", "backward"):
        chosen = [entry for entry in entries if entry.key.direction == direction]
        by_op = groupby(chosen, lambda e: f"{e.key.op} {e.key.item_bytes}")
        tables[direction] = {name: list(_rows(list(group), arch)) for name, group in by_op}
    tables |= {"forward_of_uneven": {}, "backward_of_uneven": {}, "backward_of_more": {}}
    texts = (f" {json.dumps(name)}: {{{_text(tables[name])}}}" for name in tables)
    # A user's table is read only with the versions that it was measured with.
    texts = [f' "versions": {json.dumps(versions())}', *texts]
    return "{\n" + ",\n".join(texts) + "\n}\n"


def _text(tables: dict[str, list]) -> str:
    """Tables with a line a row."""
    texts = []
    for name, rows in tables.items():
        lines = ",\n".join(f"   {json.dumps(row, ensure_ascii=False)}" for row in rows)
        texts.append(f"\n  {json.dumps(name)}: [\n{lines}\n  ]")
    return ",".join(texts) + "\n " * bool(texts)


def _rows(entries: list[Entry], arch: str) -> Iterator[list]:
    """One row for each run of sizes that have the same configuration."""
    for before, entry in pairwise(entries):
        item_bytes = entry.key.item_bytes
        first = before.key.hidden + 16 // item_bytes
        served = Served(first, item_bytes, True, Target.of(arch))
        if reason := _general(entry).refusal(served):
            raise ValueError(
                f"{entry.key.op} {entry.key.direction}: what is fastest at {entry.key.hidden} would"
                f" serve from {first} on, but {reason}: tune a size between"
            )
    for config, group in groupby(entries, _general):
        run = list(group)
        numbers = [f"{e.gb_s:.0f} ({e.key.hidden})" for e in run[:-1]] + [f"{run[-1].gb_s:.0f}"]
        yield [run[-1].key.hidden, data_of(config), ", ".join(numbers)]


def _general(entry: Entry):
    """The configuration, with widths=None if one segment holds the whole forward row."""
    config = entry.config
    whole = isinstance(config, RowForward | StreamForward)
    if whole and config.widths == (tile_width(entry.key.hidden),):
        return replace(config, widths=None)
    return config
