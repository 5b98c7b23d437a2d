"""The table of a sweep: in the terminal, and as JSON, CSV and Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from prepare import files
from prepare.report.console import show_table
from prepare.report.terminal import shown_folder
from prepare.sweep import CONVOLUTIONS, Row, Summary
from prepare.tables import csv_text
from prepare.text import line, one_line, plural, printable, size

FORMAT, VERSION = "prepare.summary", 1


def write_summary(summary: Summary, folder: Path) -> None:
    """Writes `summary.json`, `summary.csv` and `summary.md` into the folder of the sweep."""
    data = {"format": FORMAT, "version": VERSION, "rows": [asdict(row) for row in summary.rows]}
    files.write_json(folder / "summary.json", data, lines=True)
    files.write_text(folder / "summary.csv", _csv(summary))
    files.write_text(folder / "summary.md", _markdown(summary))


def show_summary(summary: Summary, folder: Path) -> None:
    """Prints the table, a line for every row that has something to say, and where the files are."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    shown = _shown_counts(summary)
    for title in ("#", *summary.varying, "status", *shown, "memory", "seconds"):
        right = title in ("#", *CONVOLUTIONS, "seconds")
        table.add_column(title, overflow="fold", justify="right" if right else "left")
    for row in summary.rows:
        table.add_row(*_cells(row, summary.varying, shown))
    show_table(table)
    for row in summary.rows:
        if row.reason:
            line(f"#{row.number}: {one_line(row.reason)}")
    bad = sum(row.status != "ok" for row in summary.rows)
    ok = f"{len(summary.rows) - bad} of {plural(len(summary.rows), 'row')} ok"
    line(f"{ok}; the table is in {shown_folder(folder / 'summary.md')}")


def _shown_counts(summary: Summary) -> list[str]:
    """The counts of convolutions worth a column: a terminal is narrow, and most sweeps skip nothing."""
    counted = [row.convolutions for row in summary.rows if row.convolutions]
    return [w for w in CONVOLUTIONS if w in CONVOLUTIONS[:2] or any(found[w] for found in counted)]


def _cells(row: Row, varying: Iterable[str], shown: Iterable[str]) -> list[str]:
    found = row.convolutions
    memory = "-" if row.bytes_after is None else size(row.bytes_after)
    return [
        str(row.number),
        *(printable(row.choices.get(key, "-")) for key in varying),
        row.status,
        *("-" if found is None else str(found.get(word, 0)) for word in shown),
        memory,
        "-" if row.seconds is None else f"{row.seconds:.1f}",
    ]


def _table(summary: Summary) -> tuple[list[str], list[list[Any]]]:
    titles = ["number", *summary.varying, "status", *CONVOLUTIONS]
    titles += ["bytes_before", "bytes_after", "seconds", "reason", "folder"]
    rows = []
    for row in summary.rows:
        found = row.convolutions or {}
        cells = [row.number, *(row.choices.get(key) for key in summary.varying), row.status]
        cells += [found.get(word) for word in CONVOLUTIONS]
        cells += [row.bytes_before, row.bytes_after, row.seconds, row.reason, row.folder]
        rows.append(["" if cell is None else cell for cell in cells])
    return titles, rows


def _csv(summary: Summary) -> str:
    titles, rows = _table(summary)
    return csv_text([titles, *rows])


def _markdown(summary: Summary) -> str:
    titles, rows = _table(summary)
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(_escaped(cell) for cell in cells)} |\n" for cells in lines)


def _escaped(cell: Any) -> str:
    text = "; ".join(printable(row) for row in str(cell).splitlines())
    for sign in "\\|<>`[]*":
        text = text.replace(sign, f"\\{sign}")
    return text
