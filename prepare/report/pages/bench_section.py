"""The timing section of a job's page: sentences, charts and a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from prepare.bench.records import PREPARED
from prepare.core.charts import Axis, Bar, Bars, Chart, Plane, Point
from prepare.core.utils.speed import change_text, interval_text, verdict_text
from prepare.core.utils.text import plural, size
from prepare.report.charts.chart import figure
from prepare.report.sentences import case_sentence, control_text, digits, seconds, span

if TYPE_CHECKING:
    from prepare.bench.records import Bench, Case, VariantResult
    from prepare.job.results import SavedResults
    from prepare.verify.records import Check, Verification

_MARKS = {"baseline": "baseline", "faster": "better", "slower": "worse"}


def timed(run: SavedResults) -> dict[str, Any] | None:
    """Return the time of the prepared model relative to the unprepared one, and its error."""
    if run.bench is None:
        return None
    charts = bench_charts(run.bench, run.verification)
    return {
        "sentences": [case_sentence(case) for case in run.bench.cases],
        "wrong": is_wrong(run.verification),
        "rows": [row for case in run.bench.cases for row in _rows(case)],
        "figures": [
            (chart.title, figure(chart, name=f"bench-{n}")) for n, chart in enumerate(charts)
        ],
        "confidence": _confidence(run.bench),
        "notes": list(_notes(run.bench)),
    }


def bench_charts(bench: Bench, verification: Verification | None) -> list[Chart]:
    """Return bars of times and peak memory, and a plane of time against error if both are known."""
    wrong = is_wrong(verification)
    cases = [case for case in bench.cases if case.comparison]
    several = len(cases) > 1
    charts: list[Chart] = [
        Bars(title=f"Time of one {case.what}", rows=tuple(_times(case, wrong=wrong)))
        for case in cases
    ]
    memory = [bar for case in cases for bar in _memory(case, several=several)]
    if memory:
        charts.append(Bars(title="Peak memory beyond the model", rows=tuple(memory)))
    check = _largest(verification)
    row = bench.headline
    if check and check.error is not None and row.ratio is not None:
        charts.append(_speed_against_error(bench.cases[0], row, check, wrong=wrong))
    return charts


def is_wrong(verification: Verification | None) -> bool:
    """Return true if verification found wrong outputs."""
    return verification is not None and verification.status == "fail"


def _times(case: Case, *, wrong: bool) -> Iterator[Bar]:
    for row in case.comparison.rows if case.comparison else ():
        yield Bar(
            label=row.name,
            value=row.seconds,
            interval=row.seconds_interval,
            text=row.verdict if row.seconds is None else seconds(row.seconds),
            mark=_mark(row, wrong=wrong),
        )


def _memory(case: Case, *, several: bool) -> Iterator[Bar]:
    for row in case.comparison.rows if case.comparison else ():
        if row.peak_bytes is not None:
            label = f"{row.name}, {case.what}" if several else row.name
            mark = "baseline" if row.verdict == "baseline" and not several else "same"
            yield Bar(label=label, value=row.peak_bytes, text=size(row.peak_bytes), mark=mark)


def _speed_against_error(case: Case, row: VariantResult, check: Check, *, wrong: bool) -> Plane:
    error, ratio = float(check.error or 0.0), float(row.ratio or 0.0)
    allowed = check.allowed
    baseline = Point(label="unprepared", x=1.0, y=0.0, text="the reference", mark="baseline")
    prepared = Point(
        label=row.name,
        x=ratio,
        y=error,
        x_interval=row.ratio_interval,
        text=f"{verdict_text(row.verdict, ratio, row.ratio_interval)}, error {error:.2g}",
        mark=_mark(row, wrong=wrong),
    )
    lines = ((allowed, "allowed"),) if allowed else ()
    return Plane(
        title="Speed against error",
        points=(baseline, prepared),
        x=Axis(label=f"time of one {case.what}, unprepared = 1"),
        y=Axis(label="largest error of the outputs", log=True, lines=lines),
    )


def _largest(verification: Verification | None) -> Check | None:
    """Return the check of outputs with the largest error."""
    checks = verification.checks if verification else ()
    outputs = [c for c in checks if c.what == "outputs" and c.error is not None]
    return max(outputs, key=lambda check: check.error or 0.0, default=None)


def _mark(row: VariantResult, *, wrong: bool) -> str:
    if wrong and row.name == PREPARED:
        return "wrong"
    return _MARKS.get(row.verdict, "same")


def _rows(case: Case) -> Iterator[tuple[str, ...]]:
    for row in case.comparison.rows if case.comparison else ():
        yield (
            case.what,
            row.name,
            "" if row.seconds is None else seconds(row.seconds),
            span(row.seconds_interval, seconds),
            "" if row.verdict == "baseline" else change_text(row.verdict, row.ratio),
            interval_text(row.ratio_interval),
            "" if row.throughput is None else digits(row.throughput),
            "" if row.peak_bytes is None else size(row.peak_bytes),
            verdict_text(row.verdict, row.ratio, row.ratio_interval),
        )


def _confidence(bench: Bench) -> str:
    levels = (case.comparison.settings["confidence"] for case in bench.cases if case.comparison)
    return f"{100 * float(next(levels, 0.95)):g}% confidence"


def _notes(bench: Bench) -> Iterable[str]:
    for case in bench.cases:
        comparison = case.comparison
        if comparison is None:
            continue
        settings = comparison.settings
        threads = plural(int(settings["threads"]), "thread")
        rounds = f"{plural(comparison.repeats, 'round')} in {seconds(comparison.seconds)}"
        batch = plural(int(settings["batch_size"] or 0), "sample")
        yield f"{case.what}: {rounds}, {batch} a call, {threads}{control_text(comparison.aa)}"
        for row in comparison.rows:
            if row.reason:
                yield f"{case.what}: {row.name}: {row.reason}"
        yield from (f"{case.what}: {note}" for note in comparison.notes)
