"""Which rows of a sweep may be compared, in which order they stand, and which of them is the best."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prepare.job.headline import Timed
    from prepare.sweep.summary import Row, Summary

# Choices that change what is measured, and not how it is prepared: ratios across them say nothing.
_MEASURED = ("model", "input", "mode")


@dataclass(frozen=True, slots=True)
class Field:
    """Rows whose times may be compared: the same model and input, on the same machine.

    `rows` are those with a ratio, the fastest first. `best` is None where none is faster than the
    unprepared model beyond doubt; `ties` are the rows whose interval meets that of the best.
    """

    about: str
    rows: tuple[Row, ...]
    best: Row | None
    ties: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Ranking:
    """All rows in the order they are shown in, and the fields that they compete in."""

    rows: tuple[Row, ...]
    fields: tuple[Field, ...]

    @property
    def best(self) -> frozenset[int]:
        """The numbers of the rows that are the best of their field."""
        return frozenset(field.best.number for field in self.fields if field.best)


def rank(summary: Summary) -> Ranking:
    """The rows by their measured ratio where that may be compared, the others after them by number.

    What was timed while others ran on the same cores is not compared with anything.
    """
    competing: dict[tuple[str, str], list[Row]] = {}
    for row in summary.rows:
        if ratio(row) is not None and not row.shared and row.status == "ok":
            competing.setdefault(_circumstances(row, summary), []).append(row)
    fields = tuple(_field(key, rows, len(competing)) for key, rows in competing.items())
    ranked = [row for field in fields for row in field.rows]
    numbers = {row.number for row in ranked}
    rest = [row for row in summary.rows if row.number not in numbers]
    return Ranking((*ranked, *rest), fields)


def timed(row: Row) -> Timed | None:
    """What the row is ranked by: its first comparison; None where nothing was timed."""
    return next(iter(row.found.timed), None)


def ratio(row: Row) -> float | None:
    """The time of the prepared model in that of the unprepared one; below 1 is faster."""
    found = timed(row)
    return found and found.ratio


def command(row: Row) -> str:
    """The line that does this row alone."""
    words = [word for word in row.overrides if not word.lstrip("+~").startswith("hydra")]
    return shlex.join(["python", "run.py", *words])


def _circumstances(row: Row, summary: Summary) -> tuple[str, str]:
    keys = [key for key in summary.varying if key.partition(".")[0] in _MEASURED]
    about = ", ".join(f"{key}={row.choices.get(key, '')}" for key in keys)
    found = timed(row)
    return about, f"{found.what}; {found.where}" if found else ""


def _field(key: tuple[str, str], rows: Iterable[Row], fields: int) -> Field:
    ranked = tuple(sorted(rows, key=lambda row: (ratio(row), row.number)))
    best = next(iter(_candidates(ranked)), None)
    ties = tuple(row for row in ranked if best and row is not best and _meet(row, best))
    return Field("; ".join(filter(None, key)) if fields > 1 else "", ranked, best, ties)


def _candidates(ranked: Iterable[Row]) -> list[Row]:
    """The rows that are faster beyond doubt; of them those whose answers were found right, if any."""
    faster = [row for row in ranked if (found := timed(row)) and found.verdict == "faster"]
    right = [row for row in faster if row.found.verified and row.found.verified.status == "pass"]
    return right or faster


def _meet(row: Row, other: Row) -> bool:
    one, two = timed(row), timed(other)
    return one is not None and two is not None and one.meets(two)
