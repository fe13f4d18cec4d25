"""The form of tables and notes, as text and as Markdown."""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple


class Table(NamedTuple):
    """Right-aligned columns with a title above and notes below."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence]
    notes: Sequence[str] = ()

    def shown(self, markdown: bool) -> str:
        title, gap = (f"**{self.title}**", "\n\n") if markdown else (self.title, "\n")
        return gap.join([title, columns(self.header, self.rows, markdown), *self.notes])


def columns(header: Sequence[str], rows: Iterable[Sequence], markdown: bool = True) -> str:
    """The columns of a table alone."""
    lines = [[str(value) for value in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[v.rjust(w) for v, w in zip(row, widths, strict=True)] for row in lines]
    if not markdown:
        return "\n".join("  ".join(row) for row in padded)
    padded.insert(1, ["-" * (width - 1) + ":" for width in widths])
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)


def grouped(lines: Iterable, *names: str) -> dict:
    """The lines by one attribute, or by a tuple of several, in the order of their first ones."""
    found: dict = {}
    for line in lines:
        found.setdefault(attrgetter(*names)(line), []).append(line)
    return found


def distinct(lines: Iterable, name: str) -> list:
    """The values of an attribute, in order."""
    return list(grouped(lines, name))


def first_line(error: BaseException) -> str:
    """The type of an error and the first non-blank line of its message, cut to 200 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])[:200]
