"""Prints a user's table as the Python text of a table in launch/tuned/."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby, pairwise

from ...launch.config import RowForward, Served, StreamForward, tile_width
from ...launch.target import Target
from ...launch.user_table import Entry
from ..candidates import written


def render(entries: Iterable[Entry], arch: str) -> str:
    """The text of SPILLS, FORWARD and BACKWARD, for rows of whole vectors without heads, and for
    one term of dy.

    A table row serves every size between the previous row's size and its own. Raises ValueError if
    the configuration cannot serve one of these sizes; the message says what to tune.
    """
    served = (e for e in entries if e.key.aligned and not e.key.heads and e.key.terms == 1)
    entries = sorted(served, key=lambda entry: entry.key)
    lines = ["SPILLS = {"]
    for entry in entries:
        _, op, size, hidden, *_ = entry.key
        for kernel, spilled in entry.spills.items():
            lines.append(f"    {(kernel, op, size, hidden)!r}: {spilled},")
    lines.append("}")
    for direction in ("forward", "backward"):
        lines += ["", f"{direction.upper()} = {{"]
        chosen = [entry for entry in entries if entry.key.direction == direction]
        for (op, size), group in groupby(chosen, lambda e: (e.key.op, e.key.item_bytes)):
            lines += [f"    {(op, size)!r}: (", *_rows(list(group), arch), "    ),"]
        lines.append("}")
    return "\n".join(lines).replace("'", '"') + "\n"


def _rows(entries: list[Entry], arch: str) -> list[str]:
    """One line for each run of sizes that have the same configuration."""
    for before, entry in pairwise(entries):
        item_bytes = entry.key.item_bytes
        first = before.key.hidden + 16 // item_bytes
        served = Served(first, item_bytes, True, Target.of(arch))
        if reason := _general(entry).refusal(served):
            raise ValueError(
                f"{entry.key.op} {entry.key.direction}: what is fastest at {entry.key.hidden} would"
                f" serve from {first} on, but {reason}: tune a size between"
            )
    lines = []
    for config, group in groupby(entries, _general):
        run = list(group)
        numbers = [f"{e.gb_s:.0f} ({e.key.hidden})" for e in run[:-1]] + [f"{run[-1].gb_s:.0f}"]
        comment = ", ".join(numbers)
        lines.append(f"        ({run[-1].key.hidden}, {written(config)}),  # {comment}")
    return lines


def _general(entry: Entry):
    """The configuration, with widths=None if one segment holds the whole forward row."""
    config = entry.config
    whole = isinstance(config, RowForward | StreamForward)
    if whole and config.widths == (tile_width(entry.key.hidden),):
        return replace(config, widths=None)
    return config
