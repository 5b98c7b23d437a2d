"""The order of the rows of a sweep: which of them can be compared, and which is the best."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prepare.app.job.record import overlap
from prepare.core.utils.machine import command_line

if TYPE_CHECKING:
    from prepare.app.sweep.summary import Summary, SweepRow

# Choices that change what is measured, not how it is prepared: their time ratios are not comparable.
_MEASURED = ("model", "input", "mode")
_ORDER = ("faster", "no difference", "unclear", "slower")


@dataclass(frozen=True, slots=True)
class RankedGroup:
    """Rows whose times can be compared: the same model and input, on the same machine.

    `about` says what distinguishes the group from others. `rows` are those with a time ratio, the fastest
    first. `best` is None if none is significantly faster than the unprepared model; `ties` are the rows
    whose interval overlaps that of the best.
    """

    about: str
    rows: tuple[SweepRow, ...]
    best: SweepRow | None
    ties: tuple[SweepRow, ...]


@dataclass(frozen=True, slots=True)
class Ranking:
    """All rows in the order in which they are shown, and the groups in which they are compared."""

    rows: tuple[SweepRow, ...]
    groups: tuple[RankedGroup, ...]

    @property
    def best(self) -> frozenset[int]:
        """The numbers of the rows that are the best of their group."""
        return frozenset(group.best.number for group in self.groups if group.best)


def rank(summary: Summary) -> Ranking:
    """Order the rows by their measured time ratio where it is comparable, the others after them by number.

    A row that was timed while other jobs ran on the same cores is not compared with anything.
    """
    comparable: dict[tuple[str, str], list[SweepRow]] = {}
    for row in summary.rows:
        if row.figures.get("time_ratio") is not None and not row.shared and row.status == "ok":
            comparable.setdefault(_circumstances(row, summary), []).append(row)
    groups = tuple(_group(_about(key, comparable), rows) for key, rows in comparable.items())
    ranked = [row for group in groups for row in group.rows]
    numbers = {row.number for row in ranked}
    rest = [row for row in summary.rows if row.number not in numbers]
    return Ranking((*ranked, *rest), groups)


def command(row: SweepRow) -> str:
    """Return the command line that runs this row alone."""
    return command_line(w for w in row.overrides if not w.lstrip("+~").startswith("hydra"))


def _circumstances(row: SweepRow, summary: Summary) -> tuple[str, str]:
    keys = [key for key in summary.varying if key.partition(".")[0] in _MEASURED]
    about = ", ".join(f"{key}={row.choices.get(key, '')}" for key in keys)
    what, where = row.figures.get("timed", ""), row.figures.get("timed_where", "")
    return about, f"{what}; {where}" if what else ""


def _about(key: tuple[str, str], keys: Collection[tuple[str, str]]) -> str:
    """Return what distinguishes a group from the others; empty if there is only one."""
    parts = zip(key, zip(*keys, strict=True), strict=True)
    return "; ".join(part for part, others in parts if part and len(set(others)) > 1)


def _group(about: str, rows: Iterable[SweepRow]) -> RankedGroup:
    ranked = tuple(sorted(rows, key=_place))
    best = next(iter(_candidates(ranked)), None)
    ties = tuple(
        row for row in ranked if best and row is not best and overlap(row.figures, best.figures)
    )
    return RankedGroup(about, ranked, best, ties)


def _place(row: SweepRow) -> tuple[int, float, int]:
    """Return the place of a row: what was shown to be faster first, what is unclear before what is slower."""
    verdict = row.figures.get("verdict", "")
    known = _ORDER.index(verdict) if verdict in _ORDER else len(_ORDER)
    # The ratio of an unclear row says nothing about its place.
    return known, 0.0 if verdict == "unclear" else row.figures.get("time_ratio") or 0.0, row.number


def _candidates(ranked: Iterable[SweepRow]) -> list[SweepRow]:
    """Return the faster rows; if some of them passed verification, only these."""
    faster = [row for row in ranked if row.figures.get("verdict") == "faster"]
    return [row for row in faster if row.figures.get("verified") == "pass"] or faster
