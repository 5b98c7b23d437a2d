"""The rows of a sweep as a table of texts, and what follows from it in sentences; for any report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prepare.core.utils.text import size
from prepare.job.headline import CONVOLUTIONS, Timed
from prepare.report.sentences import interval_text, memory_text, ratio_text, verified_text
from prepare.sweep.ranking import Field, Ranking, timed

if TYPE_CHECKING:
    from prepare.sweep.summary import Row, Summary

# What is said in place of a verdict, where others ran on the same cores.
SHARED = "on shared cores"
# More rows than these are counted where they have something in common.
_NAMED = 8


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its title, and the text of a row in it, empty where nothing is known.

    `spare` says which columns to leave out first where there is no room: the highest; 0 is never left out.
    """

    title: str
    text: Callable[[Row], str]
    spare: int = 0
    number: bool = False


def columns(summary: Summary, ranking: Ranking) -> list[Column]:
    """The columns that hold something in any row; the best row bears a star behind its number."""
    found = [
        Column("#", lambda row: f"{row.number}{'*' * (row.number in ranking.best)}", number=True),
        *(Column(key, _choice(key)) for key in summary.varying),
        Column("status", lambda row: row.status),
        Column("time", lambda row: ratio_text(timed(row)), number=True),
        Column("verdict", _verdict),
        Column("interval", lambda row: interval_text(timed(row)), 2),
        Column("timed", _kind(summary), 3),
        Column("verified", lambda row: verified_text(row.found.verified), 1),
        *(Column(w, _count(w), 3 + n, number=True) for n, w in enumerate(CONVOLUTIONS)),
        Column("memory", lambda row: memory_text(row.found), 5),
        Column("breaks", _lost("breaks"), 4, number=True),
        Column("copied", _lost("copied_bytes", size), 6, number=True),
        Column("seconds", _seconds, 4, number=True),
    ]
    unneeded = {
        w for w in CONVOLUTIONS[2:] if {_count(w)(row) for row in summary.rows} <= {"", "0"}
    }
    return [c for c in found if c.title not in unneeded and any(map(c.text, summary.rows))]


def timings(summary: Summary) -> list[str]:
    """What was timed in any row: inference, training step; what rows are ranked by comes first."""
    return list(dict.fromkeys(one.what for row in summary.rows for one in row.found.timed))


def timing(row: Row, what: str) -> Timed | None:
    """The row's comparison of that kind."""
    return next((one for one in row.found.timed if one.what == what), None)


def why(row: Row) -> str:
    """Why the row did not end well, or why it has no time."""
    if row.reason:
        return row.reason
    found = timed(row)
    return f"not timed: {found.reason}" if found and found.reason else ""


def reasons(rows: Iterable[Row]) -> list[tuple[list[int], str]]:
    """(the numbers of the rows, their reason): each reason once, in the order of the rows."""
    found: dict[str, list[int]] = {}
    for row in rows:
        if said := why(row):
            found.setdefault(said, []).append(row.number)
    return [(numbers, reason) for reason, numbers in found.items()]


def numbered(numbers: Iterable[int]) -> str:
    """`#1, #4`; of many rows the first, and how many more."""
    numbers = list(numbers)
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return ", ".join(f"#{number}" for number in numbers[:_NAMED]) + more


def conclusions(summary: Summary, ranking: Ranking) -> Iterator[str]:
    """What may be concluded: the best row of each field, and what was not compared."""
    for field in ranking.fields:
        yield (f"{field.about}: " if field.about else "") + _conclusion(field, summary.varying)
    if shared := shared_rows(ranking):
        text = "timed while others ran on the same cores, and so compared with nothing"
        yield f"{text}: {numbered(shared)}"


def shared_rows(ranking: Ranking) -> list[int]:
    """The numbers of the rows that were timed while others ran on the same cores."""
    return [row.number for row in ranking.rows if row.shared and timed(row)]


def choices(row: Row, keys: Iterable[str]) -> str:
    """`memfmt=channels_last precision=half`: the row's own choices."""
    return " ".join(f"{key}={row.choices[key]}" for key in keys if key in row.choices)


def _conclusion(field: Field, keys: Iterable[str]) -> str:
    if field.best is None:
        doubt = "no row is faster than the unprepared model beyond doubt"
        return f"{doubt}: leave it as it is, or time longer with bench=full"
    found = timed(field.best)
    text = f"best: #{field.best.number} {choices(field.best, keys)}".rstrip()
    text += f": {ratio_text(found)} of the time of the unprepared model"
    text += f" ({interval_text(found)})" if found and found.interval else ""
    if field.ties:
        text += f"; not told apart from {numbered(row.number for row in field.ties)}"
    checked = field.best.found.verified
    if checked is None or checked.status != "pass":
        text += f"; whether it is right: {checked.status if checked else 'not verified'}"
    return text


def _choice(key: str) -> Callable[[Row], str]:
    return lambda row: row.choices.get(key, "")


def _count(word: str) -> Callable[[Row], str]:
    return lambda row: str(row.found.convolutions[word]) if row.found.convolutions else ""


def _verdict(row: Row) -> str:
    found = timed(row)
    # A verdict on cores that others used at the time would say too much.
    return (SHARED if row.shared and found.ratio else found.verdict) if found else ""


def _kind(summary: Summary) -> Callable[[Row], str]:
    """What the ratio is of, where that is not the same in all rows."""
    kinds = {found.what for row in summary.rows if (found := timed(row))}
    return lambda row: found.what if len(kinds) > 1 and (found := timed(row)) else ""


def _lost(key: str, words: Callable[[int], str] = str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        found = row.found.lost
        return "" if found is None or found.status != "ok" else words(getattr(found, key))

    return text


def _seconds(row: Row) -> str:
    return "" if row.seconds is None else f"{row.seconds:.1f}"
