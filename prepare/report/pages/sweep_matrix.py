"""The matrix of a sweep: the two choices with the most values, with a cell for each pair of values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prepare.report.sentences import verified_text
from prepare.report.sweep_table import verdict_of
from prepare.sweep.ranking import Ranking, first_timing, time_ratio

if TYPE_CHECKING:
    from prepare.sweep.summary import Summary, SweepRow

# The limits of the ratio for each depth of colour; the texts of a cell say the same.
_FASTER = ((0.5, "fast-3"), (0.8, "fast-2"), (1.0, "fast-1"))
_SLOWER = ((2.0, "slow-3"), (1.25, "slow-2"), (1.0, "slow-1"))
_STYLES = {"ok": "same", "no_effect": "odd", "skipped": "odd", "running": "odd", "waiting": "odd"}


@dataclass(frozen=True, slots=True)
class Cell:
    """The best row of one pair of values, and the number of its other rows."""

    row: SweepRow
    more: int
    style: str
    figure: str
    text: str


@dataclass(frozen=True, slots=True)
class Matrix:
    """`down` and `across` are the two choices; a line is a value of `down` and a cell per value of `across`.

    If only one choice varies, `across` and the title of the single column are empty.
    """

    down: str
    across: str
    titles: list[str]
    lines: list[tuple[str, list[Cell | None]]]


def matrix_of(summary: Summary, ranking: Ranking) -> Matrix | None:
    """Return the matrix; None if no choice varies."""
    values = {key: _values(summary, key) for key in summary.varying}
    # Stable: of two choices with the same number of values, take the first.
    down, across, *_ = *sorted(values, key=lambda key: -len(values[key])), "", ""
    if not down:
        return None
    cells: dict[tuple[str, str], list[SweepRow]] = {}
    for row in ranking.rows:
        cells.setdefault((row.choices.get(down, ""), row.choices.get(across, "")), []).append(row)
    titles = values.get(across, [""])
    lines = [(value, [_cell(cells.get((value, t))) for t in titles]) for value in values[down]]
    return Matrix(down, across, titles, lines)


def _values(summary: Summary, key: str) -> list[str]:
    return list(dict.fromkeys(row.choices.get(key, "") for row in summary.rows))


def _cell(rows: list[SweepRow] | None) -> Cell | None:
    if not rows:
        return None
    row, comparison = rows[0], first_timing(rows[0])
    known = time_ratio(row) if row.status in ("ok", "verification_failed") else None
    figure = row.status.replace("_", " ") if known is None else verdict_of(row)
    texts = [row.status.replace("_", " ")] if known is not None and row.status != "ok" else []
    if comparison and row.status == "ok" and known is None:
        texts.append(comparison.verdict)
    texts.append(verified_text(row.headline.verified, short=True))
    return Cell(row, len(rows) - 1, _style(row, known), figure, "; ".join(filter(None, texts)))


def _style(row: SweepRow, known: float | None) -> str:
    if row.status not in _STYLES:
        return "bad"
    comparison = first_timing(row)
    if known is None or comparison is None or row.shared:
        return _STYLES[row.status]
    if comparison.verdict == "faster":
        return next((style for most, style in _FASTER if known <= most), "same")
    if comparison.verdict == "slower":
        return next((style for least, style in _SLOWER if known >= least), "same")
    return "same"
