"""The page of a sweep: which recipe to take, the matrix, speed against error, what failed, every row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from prepare import recipe
from prepare.core.utils import files
from prepare.core.utils.text import plural
from prepare.errors import PrepareError
from prepare.report.charts.chart import Axis, Plane, Point, figure
from prepare.report.pages.long_table import grid
from prepare.report.pages.page import NAME, page, parts_of
from prepare.report.pages.run_sections import Context, Section
from prepare.report.pages.sweep_matrix import heat
from prepare.report.sentences import ratio_text, time_text, verified_text
from prepare.report.sweep_table import choices, columns, conclusions, numbered, shared_rows, why
from prepare.sweep.ranking import Ranking, command, rank, timed
from prepare.sweep.summary import UNENDED

if TYPE_CHECKING:
    from markupsafe import Markup

    from prepare.sweep.summary import Row, Summary

# More planes, and more points in one, are no picture any more; the table has all rows.
_PLANES, _POINTS = 4, 200
# More recipes than these nobody reads; the sentences name the best of every field.
_TAKEN = 10
_MARKS = {"faster": "better", "slower": "worse"}
_KINDS = {"#": "name", "status": "word"}


@dataclass(frozen=True)
class Sweep:
    """What the sections are made of."""

    folder: Path
    summary: Summary
    ranking: Ranking

    def page_of(self, row: Row) -> str:
        """The address of the row's page, from that of the sweep; empty where it has none."""
        if row.folder is None or not (self.folder / row.folder / NAME).is_file():
            return ""
        return f"./{quote(row.folder.encode('utf-8', 'surrogateescape'))}/{NAME}"


def write_sweep_page(summary: Summary, folder: Path) -> None:
    """Writes `report.html` into the folder of the sweep, from what its rows left. Raises FileError."""
    files.write_text(folder / NAME, sweep_page(summary, folder))


def sweep_page(summary: Summary, folder: Path) -> str:
    """The page of a sweep; the same files give the same bytes."""
    sweep = Sweep(folder, summary, rank(summary))
    problems: list[str] = []
    parts = list(parts_of(sweep, SECTIONS, problems, folder="sweep"))
    return page(
        _title(summary),
        parts,
        tiles=_tiles(sweep),
        problems=problems,
        of=folder.resolve().name,
        kind="report of a sweep",
    )


def take(sweep: Sweep) -> Context:
    """The best row of each field with its recipe and its command, and why it is the best."""
    best = [field.best for field in sweep.ranking.fields if field.best]
    return {
        "said": list(conclusions(sweep.summary, sweep.ranking)) or _why_none(sweep.summary),
        "best": [
            {
                "number": row.number,
                "choices": choices(row, sweep.summary.varying),
                "recipe": _recipe(sweep.folder, row),
                "file": f"{row.folder}/recipe.yaml",
                "command": command(row),
                "page": sweep.page_of(row),
            }
            for row in best[:_TAKEN]
        ],
    }


def matrix(sweep: Sweep) -> Context | None:
    """The heat map; None where nothing varies."""
    found = heat(sweep.summary, sweep.ranking)
    if found is None:
        return None
    cells = [cell for _, line in found.lines for cell in line if cell]
    pages = {cell.row.number: sweep.page_of(cell.row) for cell in cells}
    timed_any = any(timed(row) for row in sweep.summary.rows)
    return {"heat": found, "pages": pages, "best": sweep.ranking.best, "timed": timed_any}


def plane(sweep: Sweep) -> Context | None:
    """Speed against error, one plane for each field; None where no row has both."""
    planes = []
    for at, field in enumerate(sweep.ranking.fields[:_PLANES]):
        rows = [row for row in field.rows if _error(row) is not None]
        if rows:
            points = [_point(row, sweep.summary) for row in rows[:_POINTS]]
            planes.append((field.about, _chart(points, f"plane-{at}"), len(rows) - len(points)))
    return {"planes": planes} if planes else None


def failed(sweep: Sweep) -> Context | None:
    """What did not end well, each reason once."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in sweep.summary.rows:
        if row.status not in ("ok", *UNENDED):
            found.setdefault((row.status, row.reason or ""), []).append(row)
    groups = [
        (status, reason, len(rows), numbered(row.number for row in rows), _first(rows, sweep))
        for (status, reason), rows in found.items()
    ]
    return {"groups": groups} if groups else None


def every(sweep: Sweep) -> Context:
    """All rows, in the order of their rank."""
    shown = columns(sweep.summary, sweep.ranking)
    kinds = [(c.title, _KINDS.get(c.title, "number" if c.number else "text")) for c in shown]
    rows = sweep.ranking.rows
    cells = ([*(column.text(row) for column in shown), why(row), row.folder] for row in rows)
    titles = [*kinds, ("reason", "prose"), ("folder", "code")]
    found = grid(titles, cells, "summary.csv", links=map(sweep.page_of, rows))
    shared = numbered(shared_rows(sweep.ranking))
    return {
        "rows": found,
        "best": sweep.ranking.best,
        "timed": any(map(timed, rows)),
        "shared": shared,
    }


SECTIONS = (
    Section("take", "What to take", take),
    Section("matrix", "The matrix", matrix),
    Section("plane", "Speed against error", plane),
    Section("failed", "What failed and why", failed),
    Section("every", "Every row", every),
)


def _title(summary: Summary) -> str:
    count = plural(len(summary.rows), "run")
    model = next((row.choices["model"] for row in summary.rows if "model" in row.choices), "")
    return f"{model}: {count}" if model and "model" not in summary.varying else count


def _tiles(sweep: Sweep) -> Iterable[tuple[str, str, str]]:
    rows = sweep.summary.rows
    bad: dict[str, int] = {}
    for row in rows:
        if row.status != "ok":
            bad[row.status] = bad.get(row.status, 0) + 1
    left = ", ".join(f"{count:,} {status.replace('_', ' ')}" for status, count in bad.items())
    yield "Rows that are ok", f"{sum(r.status == 'ok' for r in rows):,} of {len(rows):,}", left
    best = [field.best for field in sweep.ranking.fields if field.best]
    if len(best) == 1:
        of = choices(best[0], sweep.summary.varying)
        yield "Time of the best", ratio_text(timed(best[0])), f"of the unprepared model's: {of}"
        checked = best[0].found.verified
        yield "Is it right", checked.status if checked else "not verified", _largest(best[0])
    yield "Time", f"{sum(row.seconds or 0 for row in rows):,.0f} s", "all rows together"


def _largest(row: Row) -> str:
    found = row.found.verified
    known = found is not None and found.error is not None
    return f"largest error {found.error:.2g}, of the {found.what}" if known else ""


def _why_none(summary: Summary) -> list[str]:
    ended = any(row.status == "ok" for row in summary.rows)
    return ["nothing was timed, so no row is better than another" if ended else "no row ended well"]


def _recipe(folder: Path, row: Row) -> str | None:
    try:
        steps = recipe.load(folder / (row.folder or "") / "recipe.yaml")
        return recipe.dumps(steps)
    except PrepareError:
        return None  # its row stands in the table all the same


def _first(rows: list[Row], sweep: Sweep) -> tuple[str, str]:
    """What the first of them was asked, and where its page is."""
    return choices(rows[0], sweep.summary.varying), sweep.page_of(rows[0])


def _error(row: Row) -> float | None:
    return row.found.verified.error if row.found.verified else None


def _point(row: Row, summary: Summary) -> Point:
    found = timed(row)
    words = f"{time_text(found)}; {verified_text(row.found.verified)}"
    return Point(
        label=" ".join([f"#{row.number}", *filter(None, map(row.choices.get, summary.varying))]),
        x=found.ratio,
        y=_error(row),
        x_interval=found.interval,
        text=words,
        mark=_MARKS.get(found.verdict, "same"),
    )


def _chart(points: Iterable[Point], name: str) -> Markup:
    unprepared = Point(label="unprepared", x=1.0, y=0.0, text="itself", mark="baseline")
    plane = Plane(
        title="Speed against error",
        points=(unprepared, *points),
        x=Axis(label="time, unprepared = 1"),
        y=Axis(label="largest error", log=True),
    )
    return figure(plane, name=name)
