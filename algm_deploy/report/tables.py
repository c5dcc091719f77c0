"""Tables for terminals and Markdown from rows of text."""

from __future__ import annotations

from collections.abc import Sequence

Row = Sequence[str]


def text_table(header: Row, rows: Sequence[Row]) -> str:
    """Columns padded to their widest cell, two spaces apart."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def markdown_table(header: Row, rows: Sequence[Row]) -> str:
    """The same rows as Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
