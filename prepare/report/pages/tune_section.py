"""What a tuning found, in the page of its run: every candidate in a table, and the charts that show them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prepare.core.utils.text import plural, size
from prepare.report.charts.chart import Axis, Bar, Bars, Chart, Plane, Point, figure
from prepare.report.sentences import factor, seconds, span, tune_sentence
from prepare.tune.records import UNPREPARED

if TYPE_CHECKING:
    from prepare.job.results import SavedResults
    from prepare.tune.records import Row, Tuning

_MARKS = {"winner": "better", "slower": "worse", "wrong": "wrong"}


def tuned(run: SavedResults) -> dict[str, Any] | None:
    """Which recipe won, and why each of the others did not."""
    found = run.tuning
    if found is None:
        return None
    charts = tune_charts(found)
    return {
        "sentence": tune_sentence(found),
        "figures": [
            (chart.title, figure(chart, name=f"tune-{n}")) for n, chart in enumerate(charts)
        ],
        "rows": [_cells(row) for row in found.rows],
        "notes": [_measured(found), *found.notes],
    }


def tune_charts(found: Tuning) -> list[Chart]:
    """The time of each candidate to that of the unprepared model, as bars; that against the error."""
    timed = [row for row in found.rows if row.ratio is not None]
    step = "training step" if found.mode == "train" else "inference"
    if not timed:
        return []
    charts: list[Chart] = [
        Bars(title=f"Time of one {step}, unprepared = 1", rows=tuple(map(_bar, timed)))
    ]
    known = [row for row in timed if row.error is not None]
    if len(known) > 1:
        allowed = {row.allowed for row in known} - {None}
        lines = tuple((value, "allowed") for value in allowed) if len(allowed) == 1 else ()
        plane = Plane(
            title="Speed against error, of those that were verified",
            points=tuple(map(_point, known)),
            x=Axis(label=f"time of one {step}, unprepared = 1"),
            y=Axis(label="largest error of the outputs", log=True, lines=lines),
        )
        charts.append(plane)
    return charts


def _bar(row: Row) -> Bar:
    return Bar(
        label=row.name,
        value=row.ratio,
        interval=row.ratio_interval,
        text=f"{row.ratio:.3f} {row.status}",
        mark=_mark(row),
    )


def _point(row: Row) -> Point:
    return Point(
        label=row.name,
        x=float(row.ratio or 0.0),
        y=float(row.error or 0.0),
        x_interval=row.ratio_interval,
        text=f"{factor(float(row.ratio or 0.0))} of the time, error {row.error:.2g}",
        mark=_mark(row),
    )


def _mark(row: Row) -> str:
    return "baseline" if row.name == UNPREPARED else _MARKS.get(row.status, "same")


def _cells(row: Row) -> dict[str, str]:
    numbers = {"error": row.error, "allowed": row.allowed}
    return {
        "name": row.name,
        "time": "" if row.seconds is None else seconds(row.seconds),
        "ratio": "" if row.ratio is None else f"{row.ratio:.3f}",
        "interval": span(row.ratio_interval, lambda value: f"{value:.3f}"),
        "rounds": str(row.rounds or ""),
        "peak": "" if row.peak_bytes is None else size(row.peak_bytes),
        "verified": row.verified,
        **{key: "" if value is None else f"{value:.2g}" for key, value in numbers.items()},
        "status": row.status,
        "reason": row.reason,
    }


def _measured(found: Tuning) -> str:
    noise = "" if found.noise is None else f"; less than {found.noise - 1:.1%} is noise"
    return f"{plural(found.rounds, 'round')} in {seconds(found.seconds)}{noise}"
