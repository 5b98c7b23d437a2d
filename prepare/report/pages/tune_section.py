"""The tuning section of a job's page: a sentence, charts and a table of all recipes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prepare.core.utils.text import plural, size
from prepare.report.charts.chart import Axis, Bar, Bars, Chart, Plane, Point, figure
from prepare.report.sentences import factor, seconds, span, tune_sentence
from prepare.tune.records import UNPREPARED

if TYPE_CHECKING:
    from prepare.job.results import SavedResults
    from prepare.tune.records import CandidateResult, Tuning

_MARKS = {"winner": "better", "slower": "worse", "wrong": "wrong"}


def tuned(run: SavedResults) -> dict[str, Any] | None:
    """Return the winning recipe, and why each other one lost."""
    tuning = run.tuning
    if tuning is None:
        return None
    charts = tune_charts(tuning)
    return {
        "sentence": tune_sentence(tuning),
        "figures": [
            (chart.title, figure(chart, name=f"tune-{n}")) for n, chart in enumerate(charts)
        ],
        "rows": [_cells(row) for row in tuning.rows],
        "notes": [_measured(tuning), *tuning.notes],
    }


def tune_charts(tuning: Tuning) -> list[Chart]:
    """Return bars of the time ratios, and a plane of time against error for verified recipes."""
    timed = [row for row in tuning.rows if row.ratio is not None]
    step = "training step" if tuning.mode == "train" else "inference"
    if not timed:
        return []
    charts: list[Chart] = [
        Bars(title=f"Time of one {step}, unprepared = 1", rows=tuple(map(_bar, timed)))
    ]
    verified = [row for row in timed if row.error is not None]
    if len(verified) > 1:
        allowed = {row.allowed for row in verified if row.allowed is not None}
        lines = tuple((value, "allowed") for value in allowed) if len(allowed) == 1 else ()
        plane = Plane(
            title="Speed against error of verified recipes",
            points=tuple(map(_point, verified)),
            x=Axis(label=f"time of one {step}, unprepared = 1"),
            y=Axis(label="largest error of the outputs", log=True, lines=lines),
        )
        charts.append(plane)
    return charts


def _bar(row: CandidateResult) -> Bar:
    return Bar(
        label=row.name,
        value=row.ratio,
        interval=row.ratio_interval,
        text=f"{row.ratio:.3f} {row.status}",
        mark=_mark(row),
    )


def _point(row: CandidateResult) -> Point:
    return Point(
        label=row.name,
        x=float(row.ratio or 0.0),
        y=float(row.error or 0.0),
        x_interval=row.ratio_interval,
        text=f"{factor(float(row.ratio or 0.0))} of the time, error {row.error:.2g}",
        mark=_mark(row),
    )


def _mark(row: CandidateResult) -> str:
    return "baseline" if row.name == UNPREPARED else _MARKS.get(row.status, "same")


def _cells(row: CandidateResult) -> dict[str, str]:
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


def _measured(tuning: Tuning) -> str:
    noise = "" if tuning.noise is None else f"; differences below {tuning.noise - 1:.1%} are noise"
    return f"{plural(tuning.rounds, 'round')} in {seconds(tuning.seconds)}{noise}"
