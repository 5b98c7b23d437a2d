"""The table of a sweep as texts, also as JSON and CSV, and its conclusions as sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepare.app.job.record import CONVOLUTIONS, NOTHING_CHANGED, interval_of
from prepare.app.report.sentences import memory_text, timing_text, verified_text
from prepare.app.sweep.ranking import rank
from prepare.core.utils import files, json_records
from prepare.core.utils.text import csv_text, doubt, interval_text, seconds, size, verdict_text
from prepare.stages.stage import Column, ordered_stages

if TYPE_CHECKING:
    from prepare.app.sweep.ranking import RankedGroup, Ranking
    from prepare.app.sweep.summary import Summary, SweepRow

# Replaces a verdict if other jobs ran on the same cores.
SHARED = "on shared cores"
_RESULTS = {"fail": "wrong", "cannot tell": "unclear"}
_LEAVE = "no row{} is faster than the unprepared model, so leave it as it is"
_MEASURE = "unclear if a row{} is faster; measure longer with bench.seconds=60, on a quiet machine"
# Name at most so many rows that have something in common; count the others.
_NAMED = 8


def in_words(status: str) -> str:
    """Return a status in words; what failed need not be a verification, but may be what `fail_on` names."""
    return status.replace("verification_failed", "failed a check").replace("_", " ")


def columns(summary: Summary, ranking: Ranking) -> list[Column]:
    """Return the columns that are not empty; the number of a best row has a star."""
    # What the ratios were measured on is shown if that is not the same in all rows.
    kinds = {row.figures["timed"] for row in summary.rows if "timed" in row.figures}
    available = [
        Column("#", lambda row: f"{row.number}{'*' * (row.number in ranking.best)}", number=True),
        *(Column(key, _choice(key)) for key in summary.varying),
        Column("status", lambda row: row.status),
        Column("speed", verdict_of),
        Column("time", _figure("prepared_seconds", seconds), 3, number=True),
        Column("interval", _interval, 2),
        *([Column("timed", _figure("timed"), 3)] * (len(kinds) > 1)),
        Column("right", right_text, 1),
        *(
            Column(word, _figure(f"convolutions_{word}"), 7 + at, number=True)
            for at, word in enumerate(CONVOLUTIONS)
        ),
        Column("rewritten", _figure("convolutions_rewritten"), 7, number=True),
        Column("memory", _of_figures(memory_text), 5),
        Column("breaks", _followed("layout_breaks"), 4, number=True),
        Column("copied", _followed("copied_bytes", size), 6, number=True),
        *(replace(c, text=_of_figures(c.text)) for cls in ordered_stages() for c in cls.columns),
        Column("run time", _seconds, 11, number=True),
    ]
    # A column of zeros says something of what was converted, nothing of what is rare.
    empty = {c.title: {"", "0"} if c.title in CONVOLUTIONS[2:] else {""} for c in available}
    return [c for c in available if {*map(c.text, summary.rows)} - empty[c.title]]


def _interval(row: SweepRow) -> str:
    return interval_text(interval_of(row.figures), row.figures.get("verdict", ""))


def _seconds(row: SweepRow) -> str:
    return "" if row.seconds is None else f"{row.seconds:.1f} s"


def _choice(key: str) -> Callable[[SweepRow], str]:
    return lambda row: row.choices.get(key, "")


def _of_figures(text: Callable[[Any], str]) -> Callable[[SweepRow], str]:
    return lambda row: text(row.figures)


def right_text(row: SweepRow) -> str:
    """Return whether the row is right; `unchanged` if there was nothing to verify."""
    if row.reason == NOTHING_CHANGED:
        return "unchanged"
    return verified_text(row.figures)


def reasons(rows: Iterable[SweepRow]) -> list[tuple[list[int], str]]:
    """Return (numbers of the rows, reason) for each reason that a row failed, is unclear or has no time."""
    numbers: dict[str, list[int]] = {}
    for row in rows:
        found, parts = row.figures, []
        if found.get("verified") == "cannot tell" and (why := found.get("verified_reason")):
            parts.append(f"unclear if right: {why}")
        if why := found.get("timed_reason"):
            parts.append(f"speed {doubt(found.get('verdict', ''))}: {why}")
        if reason := row.reason or "; ".join(parts):
            numbers.setdefault(reason, []).append(row.number)
    return [(group, reason) for reason, group in numbers.items()]


def numbered(numbers: Iterable[int]) -> str:
    """Return `#1, #4`, or `#1, #2, ... and 5 more`."""
    numbers = list(numbers)
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return ", ".join(f"#{number}" for number in numbers[:_NAMED]) + more


def conclusions(summary: Summary, ranking: Ranking) -> Iterator[str]:
    """Yield the best row of each field, the fields without one, and the rows that were not compared."""
    without: dict[str, list[str]] = {}
    for field in ranking.groups:
        if field.best is not None:
            yield _conclusion(field, field.best, summary.varying)
            continue
        verdicts = {row.figures.get("verdict", "") for row in field.rows}
        said = _LEAVE if verdicts <= {"slower", "no difference"} else _MEASURE
        without.setdefault(said, []).append(field.about)
    for text, abouts in without.items():
        yield text.format(f" of {' or '.join(abouts)}" if any(abouts) else "")
    timed = [row for row in ranking.rows if "timed" in row.figures]
    if shared := [row.number for row in timed if row.shared]:
        yield f"speed unclear, as other runs used the same cores: {numbered(shared)}"
    busy = {r.number: b for r in timed if not r.shared and (b := r.figures.get("busy"))}
    if busy:
        yield f"{next(iter(busy.values())).partition(';')[0]} at {numbered(sorted(busy))}; repeat these later"


def own_choices(row: SweepRow, keys: Iterable[str], about: str = "") -> str:
    """Return the row's choices, but for those of its group: `memfmt=channels_last precision=half`."""
    words = (f"{key}={row.choices[key]}" for key in keys if key in row.choices)
    return " ".join(word for word in words if word not in about.split())


def _conclusion(field: RankedGroup, best: SweepRow, keys: Iterable[str]) -> str:
    of = f" of {field.about}" if field.about else ""
    text = f"best{of}: #{best.number} {own_choices(best, keys, field.about)}".rstrip()
    text += f", {timing_text(best.figures)}"
    if field.ties:
        text += f"; unclear against {numbered(row.number for row in field.ties)}"
    if (verified := best.figures.get("verified", "")) != "pass":
        text += f"; results {_RESULTS.get(verified, 'not measured')}"
    return text


def verdict_of(row: SweepRow) -> str:
    """Return `1.5x faster`, `no difference`, `unclear`; empty if nothing was timed."""
    ratio = row.figures.get("time_ratio")
    if "timed" not in row.figures:
        return ""
    # A verdict is not reliable if other jobs used the same cores.
    if row.shared and ratio:
        return SHARED
    return verdict_text(row.figures.get("verdict", ""), ratio, interval_of(row.figures))


def _figure(key: str, text: Callable[[Any], str] = str) -> Callable[[SweepRow], str]:
    """Return the text of a figure, empty if the row does not have it."""
    return lambda row: "" if (value := row.figures.get(key)) is None else text(value)


def _followed(key: str, text: Callable[[Any], str] = str) -> Callable[[SweepRow], str]:
    """Return the text of a figure of the layout flow, empty if it could not be followed."""
    return lambda row: _figure(key, text)(row) if row.figures.get("flow") == "ok" else ""


def write_summary(summary: Summary, folder: Path) -> list[dict[str, Any]]:
    """Write `summary.json` and `summary.csv` into the folder of the sweep, and return the rows."""
    ranking = rank(summary)
    rows = [asdict(row) | {"best": row.number in ranking.best} for row in summary.rows]
    data = {"format": "prepare.summary", "version": 1, "rows": rows}
    json_records.write_json(folder / "summary.json", data)
    files.write_text(folder / "summary.csv", csv_text(_csv(summary, ranking)))
    return rows


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
