"""The matrix of a sweep: the best row for each pair of values of two choices, as cells in colours."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from prepare.app.report.sweep_table import right_text, verdict_of
from prepare.app.sweep.ranking import Ranking, first_timing, time_ratio
from prepare.core.document import Cell, Matrix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prepare.app.sweep.summary import Summary, SweepRow

# More matrices are not read; one then shows the best row of each pair.
_MATRICES = 12
# The limits of the ratio for each depth of colour; the texts of a cell say the same.
_FASTER = ((0.5, "fast-3"), (0.8, "fast-2"), (1.0, "fast-1"))
_SLOWER = ((2.0, "slow-3"), (1.25, "slow-2"), (1.0, "slow-1"))
_STYLES = {"ok": "same", "no_effect": "odd", "skipped": "odd", "running": "odd", "waiting": "odd"}


def matrices_of(
    summary: Summary, ranking: Ranking, address: Callable[[SweepRow], str] = lambda _: ""
) -> Iterator[Matrix]:
    """Yield the matrix of two choices, for each value of the others; of very many values one for all."""
    down, across = _axes(summary)
    others = [key for key in summary.varying if key not in (down, across)]
    fixed = dict.fromkeys(tuple(row.choices.get(key, "") for key in others) for row in summary.rows)
    if not others or len(fixed) > _MATRICES:
        if whole := matrix_of(summary, ranking, address):
            yield whole
        return
    for values in fixed:
        chosen = dict(zip(others, values, strict=True))
        if one := matrix_of(summary, ranking, address, chosen):
            name = " ".join(f"{key}={value or 'not given'}" for key, value in chosen.items())
            yield replace(one, caption=f"{name}, {one.caption}")


def matrix_of(
    summary: Summary,
    ranking: Ranking,
    address: Callable[[SweepRow], str] = lambda _: "",
    chosen: Mapping[str, str] | None = None,
) -> Matrix | None:
    """Return the matrix of the two choices with the most values; None if no choice varies.

    It has a row for each value of the first and a column for each of the second; if only one choice varies,
    a single column. A cell shows the best row of its pair of values, and links to its `address`. `chosen` are
    values of the other choices that all rows of it have.
    """
    down, across = _axes(summary)
    if not down:
        return None
    values = {key: _values(summary, key) for key in summary.varying}
    rows: dict[tuple[str, str], list[SweepRow]] = {}
    for row in ranking.rows:
        if all(row.choices.get(key, "") == value for key, value in (chosen or {}).items()):
            pair = row.choices.get(down, ""), row.choices.get(across, "")
            rows.setdefault(pair, []).append(row)
    is_timed = any(map(first_timing, summary.rows))
    cells = {
        key: _cell(
            best,
            len(others),
            address(best),
            is_best=best.number in ranking.best,
            is_timed=is_timed,
        )
        for key, (best, *others) in rows.items()
    }
    titles = values.get(across, [""])
    return Matrix(
        caption=f"{down} by {across}" if across else down,
        titles=(down, *(title or "not given" if across else "result" for title in titles)),
        rows=tuple(
            (value or "not given", tuple(cells.get((value, title)) for title in titles))
            for value in values[down]
        ),
    )


def _axes(summary: Summary) -> tuple[str, str]:
    """Return the two choices with the most values, empty for none; the model is neither of two others."""
    counts = {key: len(_values(summary, key)) for key in summary.varying}
    if len(counts) > 2:
        counts.pop("model", None)
    # Stable: of two choices with the same number of values, take the first.
    down, across, *_ = *sorted(counts, key=lambda key: -counts[key]), "", ""
    return down, across


def _values(summary: Summary, key: str) -> list[str]:
    return list(dict.fromkeys(row.choices.get(key, "") for row in summary.rows))


def _cell(row: SweepRow, more: int, link: str, *, is_best: bool, is_timed: bool) -> Cell:
    """Return the cell of a row, the best of some."""
    status = row.status.replace("_", " ")
    known = time_ratio(row) if row.status in ("ok", "verification_failed") else None
    words = [status] if known is not None and row.status != "ok" else []
    words.append(right_text(row))
    return Cell(
        style=_style(row, known),
        figure=verdict_of(row) if known is not None else _untimed(status, is_timed=is_timed),
        words="; ".join(filter(None, words)),
        text=f"row #{row.number}{f', the best of {more + 1:,}' if more else ''}",
        link=link,
        is_best=is_best,
    )


def _untimed(status: str, *, is_timed: bool) -> str:
    return "not timed" if status == "ok" and is_timed else status


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
