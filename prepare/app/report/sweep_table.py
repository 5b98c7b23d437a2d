"""The table of a sweep as texts, and its conclusions as sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prepare.app.job.headline import CONVOLUTIONS, BenchFigures, FlowFigures
from prepare.app.job.record import NOTHING_CHANGED
from prepare.app.report.sentences import memory_text, timing_text, verified_text
from prepare.app.sweep.ranking import RankedGroup, Ranking, first_timing
from prepare.core.utils.numbers import doubt, interval_text, seconds, verdict_text
from prepare.core.utils.text import size
from prepare.stages.registry import ordered_stages
from prepare.stages.stage import Column

if TYPE_CHECKING:
    from prepare.app.sweep.summary import Summary, SweepRow

# Replaces a verdict if other jobs ran on the same cores.
SHARED = "on shared cores"
_RESULTS = {"fail": "wrong", "cannot tell": "unclear"}
# Name at most so many rows that have something in common; count the others.
_NAMED = 8


def in_words(status: str) -> str:
    """Return a status in words; what failed need not be a verification, but may be what `fail_on` names."""
    return status.replace("verification_failed", "failed a check").replace("_", " ")


def columns(summary: Summary, ranking: Ranking) -> list[Column]:
    """Return the columns that are not empty; the number of a best row has a star."""
    # What the ratios were measured on is shown if that is not the same in all rows.
    kinds = {timed.what for row in summary.rows if (timed := first_timing(row))}
    available = [
        Column("#", lambda row: f"{row.number}{'*' * (row.number in ranking.best)}", number=True),
        *(Column(key, _choice(key)) for key in summary.varying),
        Column("status", lambda row: row.status),
        Column("speed", verdict_of),
        Column(
            "time",
            _timed(lambda t: "" if t.seconds is None else seconds(t.seconds)),
            3,
            number=True,
        ),
        Column("interval", _timed(lambda t: interval_text(t.interval, t.verdict)), 2),
        Column("timed", _timed(lambda t: t.what if len(kinds) > 1 else ""), 3),
        Column("right", right_text, 1),
        *(Column(s, _count(s), 7 + n, number=True) for n, s in enumerate(CONVOLUTIONS)),
        Column(
            "rewritten",
            _of_figures(lambda found: str(found.get("convolutions_rewritten", ""))),
            7,
            number=True,
        ),
        Column("memory", lambda row: memory_text(row.headline), 5),
        Column("breaks", _lost(lambda lost: str(lost.breaks)), 4, number=True),
        Column("copied", _lost(lambda lost: size(lost.copied_bytes)), 6, number=True),
        *(replace(c, text=_of_figures(c.text)) for cls in ordered_stages() for c in cls.columns),
        Column("run time", _seconds, 11, number=True),
    ]
    unneeded = {
        s for s in CONVOLUTIONS[2:] if {_count(s)(row) for row in summary.rows} <= {"", "0"}
    }
    return [c for c in available if c.title not in unneeded and any(map(c.text, summary.rows))]


def _of_figures(text: Callable[[Any], str]) -> Callable[[SweepRow], str]:
    return lambda row: text(row.figures)


def right_text(row: SweepRow) -> str:
    """Return whether the row is right; `unchanged` if there was nothing to verify."""
    if row.reason == NOTHING_CHANGED:
        return "unchanged"
    return verified_text(row.headline.verified, short=True)


def reason_text(row: SweepRow) -> str:
    """Return why the row failed, why it could not be verified, and why it has no time."""
    if row.reason:
        return row.reason
    verified, comparison, parts = row.headline.verified, first_timing(row), []
    if verified is not None and verified.status == "cannot tell" and verified.reason:
        parts.append(f"unclear if right: {verified.reason}")
    if comparison is not None and comparison.reason:
        parts.append(f"speed {doubt(comparison.verdict)}: {comparison.reason}")
    return "; ".join(parts)


def reasons(rows: Iterable[SweepRow]) -> list[tuple[list[int], str]]:
    """Return (numbers of the rows, reason) for each reason, in the order of the rows."""
    numbers: dict[str, list[int]] = {}
    for row in rows:
        if reason := reason_text(row):
            numbers.setdefault(reason, []).append(row.number)
    return [(group, reason) for reason, group in numbers.items()]


def numbered(numbers: Iterable[int]) -> str:
    """Return `#1, #4`, or `#1, #2, ... and 5 more`."""
    numbers = list(numbers)
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return ", ".join(f"#{number}" for number in numbers[:_NAMED]) + more


def conclusions(summary: Summary, ranking: Ranking) -> Iterator[str]:
    """Yield the best row of each field, and the rows that were not compared."""
    for field in ranking.groups:
        yield _conclusion(field, summary.varying)
    if shared := shared_rows(ranking):
        yield f"speed unclear, as other runs used the same cores: {numbered(shared)}"
    yield from _busy(ranking.rows)


def _busy(rows: Iterable[SweepRow]) -> Iterator[str]:
    """Yield a line if the machine was busy while rows were timed."""
    busy = {
        row.number: t.busy for row in rows if not row.shared and (t := first_timing(row)) and t.busy
    }
    if busy:
        yield f"{next(iter(busy.values()))} at {numbered(sorted(busy))}; repeat these later"


def shared_rows(ranking: Ranking) -> list[int]:
    """Return the numbers of the rows that were timed while other jobs ran on the same cores."""
    return [row.number for row in ranking.rows if row.shared and first_timing(row)]


def choices(row: SweepRow, keys: Iterable[str]) -> str:
    """Return the row's choices: `memfmt=channels_last precision=half`."""
    return " ".join(f"{key}={row.choices[key]}" for key in keys if key in row.choices)


def _conclusion(field: RankedGroup, keys: Iterable[str]) -> str:
    of = f" of {field.about}" if field.about else ""
    if field.best is None:
        verdicts = {timed.verdict for row in field.rows if (timed := first_timing(row))}
        if verdicts <= {"slower", "no difference"}:
            return f"no row{of} is faster than the unprepared model, so leave it as it is"
        return f"unclear if a row{of} is faster; measure longer with bench=full, on a quiet machine"
    comparison = first_timing(field.best)
    own = [key for key in keys if f"{key}={field.best.choices.get(key)}" not in field.about.split()]
    text = f"best{of}: #{field.best.number} {choices(field.best, own)}".rstrip()
    text += f", {timing_text(comparison)}" if comparison else ""
    if field.ties:
        text += f"; unclear against {numbered(row.number for row in field.ties)}"
    verified = field.best.headline.verified
    if verified is None or verified.status != "pass":
        text += f"; results {_RESULTS.get(verified.status if verified else '', 'not measured')}"
    return text


def _choice(key: str) -> Callable[[SweepRow], str]:
    return lambda row: row.choices.get(key, "")


def _count(status: str) -> Callable[[SweepRow], str]:
    return lambda row: str(row.headline.convolutions[status]) if row.headline.convolutions else ""


def verdict_of(row: SweepRow) -> str:
    """Return `1.5x faster`, `no difference`, `unclear`; empty if nothing was timed."""
    comparison = first_timing(row)
    if comparison is None:
        return ""
    # A verdict is not reliable if other jobs used the same cores.
    if row.shared and comparison.ratio:
        return SHARED
    return verdict_text(comparison.verdict, comparison.ratio, comparison.interval)


def _timed(text: Callable[[BenchFigures], str]) -> Callable[[SweepRow], str]:
    return lambda row: text(timed) if (timed := first_timing(row)) else ""


def _lost(text: Callable[[FlowFigures], str]) -> Callable[[SweepRow], str]:
    return lambda row: text(lost) if (lost := row.headline.lost) and lost.status == "ok" else ""


def _seconds(row: SweepRow) -> str:
    return "" if row.seconds is None else f"{row.seconds:.1f} s"
