"""Print a document in the terminal: its sentence and its parts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from prepare.core.document import Document, Facts, Items, Part, Table, Text
from prepare.core.utils.text import line, plural, printable

# Names are copied: those of at most so many letters are not folded.
_NAME = 40


def show_document(document: Document) -> None:
    """Print the sentence of a document, and below it its parts."""
    line(printable(f"{document.head}: {document.line}" if document.head else document.line))
    for part in document.shown("terminal"):
        for text in part_lines(part):
            line(text)


def part_lines(part: Part) -> Iterator[str]:
    """Yield the lines of a part; charts, trees and code are for pages."""
    if isinstance(part, Text):
        yield f"  {printable(part.text)}"
    elif isinstance(part, Items):
        yield from (f"  {printable(text)}" for text in part.texts)
    elif isinstance(part, Facts):
        width = max((len(name) for name, _ in part.rows), default=0)
        yield from (f"  {name.ljust(width)}  {printable(text)}" for name, text in part.rows)
    elif isinstance(part, Table) and part.rows:
        yield from _table(part)


def _table(part: Table) -> Iterator[str]:
    from rich.table import Table as RichTable

    from prepare.app.report.terminal.console import table_lines

    table = RichTable(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    rows = [[_cell(value) for value in row] for row in islice(part.rows, part.most)]
    for at, (title, kind) in enumerate(part.columns):
        is_short = kind == "name" and max(len(row[at]) for row in rows) <= _NAME
        table.add_column(
            title,
            overflow="fold",
            justify="right" if kind == "number" else "left",
            no_wrap=is_short,
        )
    for row in rows:
        table.add_row(*row)
    yield from table_lines(table)
    if len(part.rows) > part.most:
        yield f"... and {plural(len(part.rows) - part.most, part.noun)} more"


def _cell(value: Any) -> str:
    """Return the text of a cell; the items of a list have a line each."""
    if isinstance(value, list):
        return "\n".join(map(printable, value))
    return printable(", ".join(map(str, value)) if isinstance(value, tuple) else str(value))
