"""The form of tables and notes, as text and as Markdown."""

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence], markdown: bool = False) -> str:
    """Right-aligned columns, or a Markdown table."""
    lines = [[str(value) for value in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[v.rjust(w) for v, w in zip(row, widths, strict=True)] for row in lines]
    if not markdown:
        return "\n".join("  ".join(row) for row in padded)
    padded.insert(1, ["-" * (width - 1) + ":" for width in widths])
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)


def titled(title: str, body: str, notes: Sequence[str], markdown: bool) -> str:
    """A table with its title above and its notes below."""
    if markdown:
        return "\n\n".join([f"**{title}**", body, *notes])
    return "\n".join([title, body, *notes])
