"""The matrix of a sweep: its two choices with the most values against each other, a cell for each pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prepare.report.sentences import verified_text
from prepare.report.sweep_table import SHARED
from prepare.sweep.ranking import Ranking, ratio, timed

if TYPE_CHECKING:
    from prepare.sweep.summary import Row, Summary

# From a ratio of so much on, a cell has the colour of that depth; the words beside it say the same.
_FASTER = ((0.5, "fast-3"), (0.8, "fast-2"), (1.0, "fast-1"))
_SLOWER = ((2.0, "slow-3"), (1.25, "slow-2"), (1.0, "slow-1"))
_STYLES = {"ok": "same", "no_effect": "odd", "skipped": "odd", "running": "odd", "waiting": "odd"}


@dataclass(frozen=True, slots=True)
class Cell:
    """The rows of one pair of values: the first of them by rank, and how many more there are."""

    row: Row
    more: int
    style: str
    figure: str
    words: str


@dataclass(frozen=True, slots=True)
class Heat:
    """`down` and `across` are the two choices; a line is a value of `down`, and its cell for each `across`.

    With a single varying choice `across` is empty, and so are the titles of the one column.
    """

    down: str
    across: str
    titles: list[str]
    lines: list[tuple[str, list[Cell | None]]]


def heat(summary: Summary, ranking: Ranking) -> Heat | None:
    """The matrix; None where no choice varies."""
    values = {key: _values(summary, key) for key in summary.varying}
    # Stable: of choices with as many values the first that was given.
    down, across, *_ = *sorted(values, key=lambda key: -len(values[key])), "", ""
    if not down:
        return None
    found: dict[tuple[str, str], list[Row]] = {}
    for row in ranking.rows:
        found.setdefault((row.choices.get(down, ""), row.choices.get(across, "")), []).append(row)
    titles = values.get(across, [""])
    lines = [(one, [_cell(found.get((one, other))) for other in titles]) for one in values[down]]
    return Heat(down, across, titles, lines)


def _values(summary: Summary, key: str) -> list[str]:
    return list(dict.fromkeys(row.choices.get(key, "") for row in summary.rows))


def _cell(rows: list[Row] | None) -> Cell | None:
    if not rows:
        return None
    row, found = rows[0], timed(rows[0])
    known = ratio(row) if row.status in ("ok", "verification_failed") else None
    figure = row.status.replace("_", " ") if known is None else f"{known:.3f}"
    words = [row.status.replace("_", " ")] if known is not None and row.status != "ok" else []
    if found and row.status == "ok":
        words.append(SHARED if row.shared else found.verdict)
    words.append(verified_text(row.found.verified))
    return Cell(row, len(rows) - 1, _style(row, known), figure, "; ".join(filter(None, words)))


def _style(row: Row, known: float | None) -> str:
    if row.status not in _STYLES:
        return "bad"
    found = timed(row)
    if known is None or found is None or row.shared:
        return _STYLES[row.status]
    if found.verdict == "faster":
        return next((style for most, style in _FASTER if known <= most), "same")
    if found.verdict == "slower":
        return next((style for least, style in _SLOWER if known >= least), "same")
    return "same"
