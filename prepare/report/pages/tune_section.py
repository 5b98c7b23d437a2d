"""The tuning section of a job's page: a sentence, charts and a table of all recipes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prepare.core.charts import Axis, Bar, Bars, Chart, Plane, Point
from prepare.core.utils.speed import interval_text, noise_text, verdict_text
from prepare.core.utils.text import plural, size
from prepare.report.charts.chart import figure
from prepare.report.kept_modules import kept_rows
from prepare.report.sentences import result_text, seconds, tune_sentence
from prepare.tune.records import UNPREPARED

if TYPE_CHECKING:
    from prepare.job.results import SavedResults
    from prepare.tune.records import CandidateResult, Tuning

# More bars do not fit on the first screen; the section on recipes then has them all.
FIRST_BARS = 9
_MARKS = {"winner": "better", "wrong": "wrong"}


def tuned(run: SavedResults) -> dict[str, Any] | None:
    """Return the winning recipe, and why each other one lost."""
    tuning = run.tuning
    if tuning is None:
        return None
    charts = tune_charts(tuning)
    if run.audit is not None and len(tuning.rows) <= FIRST_BARS:
        charts = charts[1:]  # the first screen of the page shows all bars
    return {
        "sentence": tune_sentence(tuning),
        "figures": [
            (chart.title, figure(chart, name=f"tune-{n}")) for n, chart in enumerate(charts)
        ],
        "rows": [_cells(row, tuning) for row in _ranked(tuning)],
        "kept": kept_rows(tuning),
        "notes": [_measured(tuning), *tuning.notes],
    }


def tune_charts(tuning: Tuning) -> list[Chart]:
    """Return bars of the time ratios, and a plane of time against error for verified recipes."""
    timed = [row for row in _ranked(tuning) if row.ratio is not None]
    step = "training step" if tuning.mode == "train" else "inference"
    if not timed:
        return []
    charts: list[Chart] = [
        Bars(
            title=f"Time of one {step}, unprepared = 1",
            rows=tuple(_bar(row, tuning) for row in timed),
        )
    ]
    verified = [row for row in timed if row.error is not None]
    if len(verified) > 1:
        allowed = {row.allowed for row in verified if row.allowed is not None}
        lines = tuple((value, "allowed") for value in allowed) if len(allowed) == 1 else ()
        plane = Plane(
            title="Speed against error of verified recipes",
            points=tuple(_point(row, tuning) for row in verified),
            x=Axis(label=f"time of one {step}, unprepared = 1"),
            y=Axis(label="largest error of the outputs", log=True, lines=lines),
        )
        charts.append(plane)
    return charts


def _ranked(tuning: Tuning) -> list[CandidateResult]:
    """Return the winner, then the others from the fastest to the slowest, then those without a time."""
    return sorted(
        tuning.rows, key=lambda row: (row.name != tuning.winner, row.ratio is None, row.ratio or 0)
    )


def _bar(row: CandidateResult, tuning: Tuning) -> Bar:
    return Bar(
        label=row.name,
        value=row.ratio,
        interval=row.ratio_interval,
        text=_speed(row, tuning),
        mark=_mark(row, tuning),
    )


def _point(row: CandidateResult, tuning: Tuning) -> Point:
    return Point(
        label=row.name,
        x=float(row.ratio or 0.0),
        y=float(row.error or 0.0),
        x_interval=row.ratio_interval,
        text=f"{_speed(row, tuning)}, error {row.error:.2g}",
        mark=_mark(row, tuning),
    )


def _speed(row: CandidateResult, tuning: Tuning) -> str:
    """Return the verdict on a recipe against the unprepared model."""
    return verdict_text(tuning.verdict(row), row.ratio, row.ratio_interval)


def _mark(row: CandidateResult, tuning: Tuning) -> str:
    """Return the colour: as on other pages, slower is than the unprepared model, not than the winner."""
    if row.name == UNPREPARED:
        return "baseline"
    return _MARKS.get(row.status, "worse" if tuning.verdict(row) == "slower" else "same")


def _cells(row: CandidateResult, tuning: Tuning) -> dict[str, str]:
    numbers = {"error": row.error, "allowed": row.allowed}
    return {
        "name": row.name,
        "time": "" if row.seconds is None else seconds(row.seconds),
        "ratio": "" if row.name == UNPREPARED else _speed(row, tuning),
        "interval": interval_text(row.ratio_interval),
        "rounds": str(row.rounds or ""),
        "first": "" if row.first_seconds is None else seconds(row.first_seconds),
        "peak": "" if row.peak_bytes is None else size(row.peak_bytes),
        "verified": row.verified,
        **{key: "" if value is None else f"{value:.2g}" for key, value in numbers.items()},
        "status": result_text(row, tuning),
        "reason": row.reason,
    }


def _measured(tuning: Tuning) -> str:
    rounds = f"{plural(tuning.rounds, 'round')} in {seconds(tuning.seconds)}"
    return "; ".join(filter(None, (rounds, noise_text(tuning.noise))))
