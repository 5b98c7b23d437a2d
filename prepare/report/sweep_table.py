"""The table of a sweep as texts, and its conclusions as sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from prepare.core.utils.numbers import change_text, interval_text, verdict_text
from prepare.core.utils.text import size
from prepare.job.headline import CONVOLUTIONS, BenchFigures
from prepare.registry import ordered_stages
from prepare.report.sentences import memory_text, timing_text, verified_text
from prepare.stage import Column
from prepare.sweep.ranking import RankedGroup, Ranking, first_timing

if TYPE_CHECKING:
    from prepare.sweep.summary import Summary, SweepRow

# Replaces a verdict if other jobs ran on the same cores.
SHARED = "on shared cores"
# Name at most so many rows that have something in common; count the others.
_NAMED = 8


def columns(summary: Summary, ranking: Ranking) -> list[Column]:
    """Return the columns that are not empty; the number of a best row has a star."""
    available = [
        Column("#", lambda row: f"{row.number}{'*' * (row.number in ranking.best)}", number=True),
        *(Column(key, _choice(key)) for key in summary.varying),
        Column("status", lambda row: row.status),
        Column("speed", verdict_of),
        Column("time", _change, 3, number=True),
        Column("interval", _interval, 2),
        Column("timed", _timed_text(summary), 3),
        Column("verified", lambda row: verified_text(row.headline.verified, short=True), 1),
        *(Column(s, _count(s), 3 + n, number=True) for n, s in enumerate(CONVOLUTIONS)),
        Column("memory", lambda row: memory_text(row.headline), 5),
        Column("breaks", _lost("breaks"), 4, number=True),
        Column("copied", _lost("copied_bytes", size), 6, number=True),
        *(
            Column(c.title, partial(_of_stage, c), c.spare, c.number)
            for cls in ordered_stages()
            for c in cls.columns
        ),
        Column("seconds", _seconds, 4, number=True),
    ]
    unneeded = {
        s for s in CONVOLUTIONS[2:] if {_count(s)(row) for row in summary.rows} <= {"", "0"}
    }
    return [c for c in available if c.title not in unneeded and any(map(c.text, summary.rows))]


def _of_stage(column: Column, row: SweepRow) -> str:
    return column.text(row.figures)


def timings(summary: Summary) -> list[str]:
    """Return what any row timed (`inference`, `training step`); rows are ranked by the first."""
    return list(dict.fromkeys(timed.what for row in summary.rows for timed in row.headline.timed))


def timing(row: SweepRow, what: str) -> BenchFigures | None:
    """Return the row's comparison of that kind."""
    return next((timed for timed in row.headline.timed if timed.what == what), None)


def reason_text(row: SweepRow) -> str:
    """Return why the row failed, why it could not be verified, and why it has no time."""
    if row.reason:
        return row.reason
    verified, comparison, parts = row.headline.verified, first_timing(row), []
    if verified is not None and verified.status == "cannot tell" and verified.reason:
        parts.append(f"cannot tell: {verified.reason}")
    if comparison is not None and comparison.reason:
        word = "speed unclear" if comparison.verdict == "unclear" else "not timed"
        parts.append(f"{word}: {comparison.reason}")
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
        yield (f"{field.about}: " if field.about else "") + _conclusion(field, summary.varying)
    if shared := shared_rows(ranking):
        yield f"not compared, as other runs used the same cores: {numbered(shared)}"
    yield from _busy(ranking.rows)


def _busy(rows: Iterable[SweepRow]) -> Iterator[str]:
    """Yield a line if the machine was busy while rows were timed."""
    busy = {
        row.number: t.busy for row in rows if not row.shared and (t := first_timing(row)) and t.busy
    }
    if busy:
        worst = max(busy.values())
        yield f"{worst} at {numbered(sorted(busy))}: times mean little; try again later"


def shared_rows(ranking: Ranking) -> list[int]:
    """Return the numbers of the rows that were timed while other jobs ran on the same cores."""
    return [row.number for row in ranking.rows if row.shared and first_timing(row)]


def choices(row: SweepRow, keys: Iterable[str]) -> str:
    """Return the row's choices: `memfmt=channels_last precision=half`."""
    return " ".join(f"{key}={row.choices[key]}" for key in keys if key in row.choices)


def _conclusion(field: RankedGroup, keys: Iterable[str]) -> str:
    if field.best is None:
        verdicts = {timed.verdict for row in field.rows if (timed := first_timing(row))}
        if verdicts <= {"slower", "no difference"}:
            return "no row is faster than the unprepared model: leave it as it is"
        text = "no row was shown to be faster than the unprepared model"
        return f"{text}: measure longer with bench=full, on a quiet machine"
    comparison = first_timing(field.best)
    text = f"best: #{field.best.number} {choices(field.best, keys)}".rstrip()
    text += f": {timing_text(comparison)}" if comparison else ""
    if field.ties:
        text += f"; could not be told apart from {numbered(row.number for row in field.ties)}"
    verified = field.best.headline.verified
    if verified is None or verified.status != "pass":
        text += f"; correctness: {verified.status if verified else 'not verified'}"
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


def _change(row: SweepRow) -> str:
    comparison = first_timing(row)
    return change_text(comparison.verdict, comparison.ratio) if comparison else ""


def _interval(row: SweepRow) -> str:
    comparison = first_timing(row)
    return interval_text(comparison.interval) if comparison else ""


def _timed_text(summary: Summary) -> Callable[[SweepRow], str]:
    """Return what the ratio was measured on, if that is not the same in all rows."""
    kinds = {comparison.what for row in summary.rows if (comparison := first_timing(row))}

    def text(row: SweepRow) -> str:
        comparison = first_timing(row)
        return comparison.what if comparison and len(kinds) > 1 else ""

    return text


def _lost(key: str, form: Callable[[int], str] = str) -> Callable[[SweepRow], str]:
    def text(row: SweepRow) -> str:
        lost = row.headline.lost
        return "" if lost is None or lost.status != "ok" else form(getattr(lost, key))

    return text


def _seconds(row: SweepRow) -> str:
    return "" if row.seconds is None else f"{row.seconds:.1f}"
