"""The table of a sweep in the terminal, and as JSON, CSV and Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from prepare.app.report.sweep_table import (
    Column,
    columns,
    conclusions,
    in_words,
    numbered,
    reason_text,
    reasons,
)
from prepare.app.report.terminal.console import console, has_width, table_lines
from prepare.app.report.terminal.run import shown_folder
from prepare.app.sweep.ranking import Ranking, rank
from prepare.core.utils import files, json_records
from prepare.core.utils.text import csv_text, first_line, line, output, plural, printable

if TYPE_CHECKING:
    from prepare.app.sweep.summary import Summary, SweepRow

FORMAT, VERSION = "prepare.summary", 1
# Spaces between two columns in the terminal.
_GAP = 2


def write_summary(summary: Summary, folder: Path) -> None:
    """Write `summary.json`, `summary.csv` and `summary.md` into the folder of the sweep."""
    ranking = rank(summary)
    rows = [_data(row, ranking) for row in summary.rows]
    data = {"format": FORMAT, "version": VERSION, "rows": rows}
    json_records.write_json(folder / "summary.json", data)
    files.write_text(folder / "summary.csv", csv_text(_csv(summary, ranking)))
    files.write_text(folder / "summary.md", "".join(_markdown(summary, ranking)))


def show_summary(summary: Summary) -> None:
    """Print the table, each reason and the conclusions."""
    ranking = rank(summary)
    width = console().width if has_width(output()) else None
    _show_table(columns(summary, ranking), ranking.rows, width)
    for numbers, reason in reasons(summary.rows):
        line(f"{numbered(numbers)}: {printable(first_line(reason))}")
    for conclusion in conclusions(summary, ranking):
        line(printable(conclusion))


def show_where(summary: Summary, folder: Path) -> None:
    """Print how the rows ended, and the paths of table and page."""
    statuses = Counter(in_words(row.status) for row in summary.rows)
    others = (f", {count} {status}" for status, count in statuses.items() if status != "ok")
    text = f"{statuses['ok']} of {plural(len(summary.rows), 'row')} ok{''.join(others)}"
    line(f"{text}; the table is in {shown_folder(folder / 'summary.md')}")
    line(f"the page is in {shown_folder(folder / 'report.html')}")


def _show_table(available: Sequence[Column], rows: Sequence[SweepRow], width: int | None) -> None:
    """Print the columns that fit into `width` letters (None for all), and the titles of the others."""
    texts = {column: [_cell(column.text(row)) for row in rows] for column in available}
    widths = {c: max(map(len, (c.title, *texts[c]))) + _GAP for c in available}
    shown = list(available)
    width = width or sum(widths.values())
    while sum(widths[column] for column in shown) - _GAP > width:
        least = max(shown, key=lambda column: column.spare)
        if not least.spare:
            break
        shown.remove(least)
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False)
    for column in shown:
        table.add_column(
            printable(column.title), overflow="fold", justify="right" if column.number else "left"
        )
    for cells in zip(*(texts[column] for column in shown), strict=True):
        table.add_row(*cells)
    for text in table_lines(table, width=width):
        line(text)
    if len(shown) < len(available):
        hidden = ", ".join(column.title for column in available if column not in shown)
        line(f"columns left out, as the terminal is too narrow: {printable(hidden)}")


def _cell(text: str) -> str:
    return printable(text) or "-"


def _data(row: SweepRow, ranking: Ranking) -> dict[str, Any]:
    return asdict(row) | {"best": row.number in ranking.best}


def _csv(summary: Summary, ranking: Ranking) -> Iterator[list[Any]]:
    figures = list(dict.fromkeys(key for row in summary.rows for key in row.figures))
    own = ("shared", "seconds", "reason", "folder")
    yield ["number", *summary.varying, "status", "best", *own, *figures]
    for row in summary.rows:
        yield [
            *(row.number, *map(row.choices.get, summary.varying), row.status),
            *(row.number in ranking.best, *(getattr(row, key) for key in own)),
            *map(row.figures.get, figures),
        ]


def _markdown(summary: Summary, ranking: Ranking) -> Iterator[str]:
    shown = [*columns(summary, ranking), Column("reason", reason_text)]
    lines = [[column.title for column in shown], ["---"] * len(shown)]
    yield _line(map(_escaped, lines[0])) + _line(lines[1])
    for row in ranking.rows:
        yield _line(_escaped(column.text(row)) for column in shown)
    for conclusion in conclusions(summary, ranking):
        yield f"\n{_escaped(conclusion)}\n"


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |\n"


def _escaped(cell: str) -> str:
    text = "; ".join(printable(row) for row in cell.splitlines())
    for sign in "\\|<>`[]*":
        text = text.replace(sign, f"\\{sign}")
    return text
