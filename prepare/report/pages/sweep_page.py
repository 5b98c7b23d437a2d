"""The page of a sweep: recommendation, matrix, speed against error, failures and all rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from prepare import recipe
from prepare.core.document import Axis, Bar, Bars, Plane, Point
from prepare.core.utils import files
from prepare.core.utils.text import plural, size, times
from prepare.errors import PrepareError
from prepare.job.results import read_plan
from prepare.report.charts.chart import figure
from prepare.report.pages.long_table import long_table
from prepare.report.pages.page import NAME, page
from prepare.report.pages.section import Context, Section, rendered
from prepare.report.pages.sweep_cards import sweep_cards
from prepare.report.pages.sweep_matrix import matrix_of
from prepare.report.sentences import timing_text, verified_text
from prepare.report.sweep_table import (
    choices,
    columns,
    conclusions,
    numbered,
    reasons,
    shared_rows,
)
from prepare.report.training_code import training_code
from prepare.sweep.ranking import Ranking, command, first_timing, rank
from prepare.sweep.summary import UNENDED

if TYPE_CHECKING:
    from markupsafe import Markup

    from prepare.sweep.summary import Summary, SweepRow

# More planes, or more points in one, are not readable; the table has all rows.
_PLANES, _POINTS = 4, 200
_BARS = 40
# Show at most so many recipes; the sentences name the best row of every field.
_RECIPES = 10
# More reasons below a table are not read.
_REASONS = 40
_MARKS = {"faster": "better", "slower": "worse"}
_KINDS = {"#": "name", "status": "word"}


@dataclass(frozen=True)
class SweepRecord:
    """The folder of a sweep, its summary and its ranking."""

    folder: Path
    summary: Summary
    ranking: Ranking

    def page_of(self, row: SweepRow) -> str:
        """Return the relative address of the row's page; empty if it has none."""
        if row.folder is None or not (self.folder / row.folder / NAME).is_file():
            return ""
        return f"./{quote(row.folder.encode('utf-8', 'surrogateescape'))}/{NAME}"


def write_sweep_page(summary: Summary, folder: Path) -> None:
    """Write `report.html` into the folder of the sweep, from the records of its rows. Raises FileError."""
    files.write_text(folder / NAME, sweep_page(summary, folder))


def sweep_page(summary: Summary, folder: Path) -> str:
    """Return the page of a sweep; the same files give the same bytes."""
    sweep = SweepRecord(folder, summary, rank(summary))
    problems: list[str] = []
    sections = list(rendered(sweep, SECTIONS, problems, folder="sweep"))
    return page(
        _title(summary),
        sections,
        cards=sweep_cards(summary, sweep.ranking),
        problems=problems,
        about=("report of a sweep",),
    )


def recommendation(sweep: SweepRecord) -> Context:
    """Return the conclusions, and the best row of each field with its recipe and its command."""
    best = [field.best for field in sweep.ranking.groups if field.best]
    return {
        "conclusions": list(conclusions(sweep.summary, sweep.ranking)) or _why_none(sweep.summary),
        "best": [
            {
                "number": row.number,
                "choices": choices(row, sweep.summary.varying),
                "recipe": _recipe(sweep.folder, row),
                "file": f"{row.folder}/recipe.yaml",
                "code": training_code(_plan(sweep.folder, row)),
                "command": command(row),
                "page": sweep.page_of(row),
            }
            for row in best[:_RECIPES]
        ],
    }


def matrix(sweep: SweepRecord) -> Context | None:
    """Return the matrix; None if no choice varies."""
    table = matrix_of(sweep.summary, sweep.ranking)
    if table is None:
        return None
    cells = [cell for _, line in table.lines for cell in line if cell]
    pages = {cell.row.number: sweep.page_of(cell.row) for cell in cells}
    any_timed = any(first_timing(row) for row in sweep.summary.rows)
    if not any_timed and not table.across:
        return None  # a column of statuses, which the table of all rows has too
    return {"matrix": table, "pages": pages, "best": sweep.ranking.best, "timed": any_timed}


def layout(sweep: SweepRecord) -> Context | None:
    """Return the breaks of each row as bars, the most first; None if no row loses the layout."""
    lost = [(row, figures) for row in sweep.summary.rows if (figures := row.headline.lost)]
    counted = sorted(lost, key=lambda pair: (-pair[1].breaks, pair[0].number))
    if not any(figures.breaks for _, figures in counted):
        return None
    bars = [
        Bar(
            label=_label(row, sweep.summary),
            value=figures.breaks,
            text=f"{times(figures.breaks)}, {size(figures.copied_bytes)} copied",
            mark="worse" if figures.breaks else "same",
        )
        for row, figures in counted
        if figures.status == "ok"
    ]
    chart = Bars(title="Layout lost in one forward", rows=tuple(bars[:_BARS]))
    return {"chart": figure(chart, name="layout"), "others": max(len(bars) - _BARS, 0)}


def tradeoff(sweep: SweepRecord) -> Context | None:
    """Return speed against error, one plane for each field; None if no row has both."""
    planes = []
    for number, field in enumerate(sweep.ranking.groups[:_PLANES]):
        points = [point for row in field.rows if (point := _point(row, sweep.summary))]
        if points:
            chart = _chart(points[:_POINTS], f"plane-{number}")
            planes.append((field.about, chart, max(len(points) - _POINTS, 0)))
    return {"planes": planes} if planes else None


def failures(sweep: SweepRecord) -> Context | None:
    """Return the rows that failed, grouped by reason."""
    failed: dict[tuple[str, str], list[SweepRow]] = {}
    for row in sweep.summary.rows:
        if row.status not in ("ok", *UNENDED):
            failed.setdefault((row.status, row.reason or ""), []).append(row)
    groups = [
        (status, reason, len(rows), numbered(row.number for row in rows), _first(rows, sweep))
        for (status, reason), rows in failed.items()
    ]
    return {"groups": groups} if groups else None


def all_rows(sweep: SweepRecord) -> Context:
    """Return the table of all rows, in the order of their rank."""
    shown = columns(sweep.summary, sweep.ranking)
    kinds = [(c.title, _KINDS.get(c.title, "number" if c.number else "text")) for c in shown]
    rows = sweep.ranking.rows
    cells = ([column.text(row) for column in shown] for row in rows)
    table = long_table(kinds, cells, "summary.csv", links=map(sweep.page_of, rows))
    why = [(numbered(numbers), reason) for numbers, reason in reasons(sweep.summary.rows)]
    shared = numbered(shared_rows(sweep.ranking))
    return {
        "table": table,
        "reasons": why[:_REASONS],
        "more": max(len(why) - _REASONS, 0),
        "best": sweep.ranking.best,
        "timed": any(map(first_timing, rows)),
        "shared": shared,
    }


SECTIONS = (
    Section("recommendation", "Recommendation", recommendation),
    Section("failures", "Failures", failures),
    Section("matrix", "Matrix", matrix),
    Section("layout", "Layout lost", layout),
    Section("tradeoff", "Speed against error", tradeoff),
    Section("rows", "All rows", all_rows),
)


def _title(summary: Summary) -> str:
    count = plural(len(summary.rows), "run")
    model = next((row.choices["model"] for row in summary.rows if "model" in row.choices), "")
    return f"{model}: {count}" if model and "model" not in summary.varying else count


def _why_none(summary: Summary) -> list[str]:
    succeeded = any(row.status == "ok" for row in summary.rows)
    return ["no row was timed, so there is no best row" if succeeded else "no row succeeded"]


def _recipe(folder: Path, row: SweepRow) -> str | None:
    try:
        steps = recipe.load(folder / (row.folder or "") / "recipe.yaml")
        return recipe.dumps(steps)
    except PrepareError:
        return None  # the table shows its row nevertheless


def _plan(folder: Path, row: SweepRow) -> dict[str, Any] | None:
    try:
        return read_plan(folder / (row.folder or ""))
    except PrepareError:
        return None


def _first(rows: list[SweepRow], sweep: SweepRecord) -> tuple[str, str]:
    """Return the choices of the first row, and the address of its page."""
    return choices(rows[0], sweep.summary.varying), sweep.page_of(rows[0])


def _label(row: SweepRow, summary: Summary) -> str:
    return " ".join([f"#{row.number}", *filter(None, map(row.choices.get, summary.varying))])


def _point(row: SweepRow, summary: Summary) -> Point | None:
    """Return the point of a row; None if it has no time or no error."""
    comparison, verified = first_timing(row), row.headline.verified
    if comparison is None or comparison.ratio is None:
        return None
    if verified is None or verified.error is None:
        return None
    return Point(
        label=_label(row, summary),
        x=comparison.ratio,
        y=verified.error,
        x_interval=comparison.interval,
        text=f"{timing_text(comparison)}; {verified_text(verified)}",
        mark=_MARKS.get(comparison.verdict, "same"),
    )


def _chart(points: Iterable[Point], name: str) -> Markup:
    unprepared = Point(label="unprepared", x=1.0, y=0.0, text="the reference", mark="baseline")
    plane = Plane(
        title="Speed against error",
        points=(unprepared, *points),
        x=Axis(label="time, unprepared = 1"),
        y=Axis(label="largest error", log=True),
    )
    return figure(plane, name=name)
