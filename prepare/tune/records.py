"""What a tuning found, as plain data: saved to and loaded from `tune.json` without torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepare.core.utils import json_records
from prepare.errors import TuneError

if TYPE_CHECKING:
    from prepare.pipeline import Pipeline

_KIND = json_records.Kind("prepare.tune", 1, "a tuning", "a tune.json", TuneError)
UNPREPARED = "unprepared"
STATUSES = (
    "winner",
    "not faster",  # than the winner, by much or beyond doubt
    "slower",
    "wrong",  # its verification failed
    "cannot tell",  # its verification came to no conclusion
    "failed",
    "not measured",
)
Steps = dict[str, dict[str, Any]]
Interval = tuple[float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One candidate. What was not found out is None.

    `steps` is its pipeline with every option, `cost` how far it is from simple (see
    `prepare.tune.candidates`). `ratio` is the median of its time's ratios to that of the unprepared
    model in the `rounds` that it took part in, with its interval; below 1 is faster; of one that was
    out before the winner was done, its time to the winner's, times the winner's ratio. `verified` is
    the status of its verification, empty where there was none; `error` is that of the outputs, as a
    part of their scale, and `allowed` what is tolerated. `reason` says in a sentence why it lost.
    """

    name: str
    steps: Steps
    status: str
    reason: str
    cost: int
    seconds: float | None = None
    ratio: float | None = None
    ratio_interval: Interval = None
    rounds: int = 0
    peak_bytes: int | None = None
    verified: str = ""
    error: float | None = None
    allowed: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Which recipe is the fastest here, and how the others fared; the winner's row comes first.

    `noise` 1.03 says that ratios between 1/1.03 and 1.03 tell nothing; None where there were too few
    rounds. `conditions` is all that the answer depends on; `made` is when it was measured, and
    `from_cache` says that this was an earlier time. `notes` say what to bear in mind.
    """

    rows: tuple[Row, ...]
    winner: str
    mode: str
    allow: tuple[str, ...]
    budget: float
    seconds: float
    rounds: int
    noise: float | None
    made: str
    from_cache: bool
    conditions: dict[str, Any]
    environment: dict[str, Any]
    notes: tuple[str, ...] = ()

    def row(self, name: str) -> Row:
        """The row of that candidate; KeyError where there is none."""
        return {row.name: row for row in self.rows}[name]

    @property
    def recipe(self) -> Steps:
        """The winner's pipeline as plain data: what `recipe.yaml` holds under `steps`."""
        return self.row(self.winner).steps

    @property
    def pipeline(self) -> Pipeline:
        """The winner's pipeline."""
        from prepare.pipeline import Pipeline

        return Pipeline.from_config(self.recipe)

    @property
    def table(self) -> str:
        """All candidates in lines of text: name, ratio to the unprepared model, and what became of it."""
        width = max(len(row.name) for row in self.rows)
        return "\n".join(
            f"{row.name.ljust(width)}  {'' if row.ratio is None else format(row.ratio, '.3f'):>6}  "
            f"{row.status}: {row.reason}"
            for row in self.rows
        )

    def save(self, path: str | Path) -> None:
        """Writes `tune.json`, whole or not at all. Raises FileError."""
        json_records.write_json(path, _KIND.head | asdict(self), lines=True)

    @classmethod
    def load(cls, path: str | Path) -> Tuning:
        """Read a tuning from its JSON; torch is not needed.

        Raises:
            TuneError: the file is not a tuning, or one of another version.
        """
        return json_records.load(cls, path, _KIND, check=_check)


def _check(tuning: Tuning) -> None:
    if unknown := {row.status for row in tuning.rows} - {*STATUSES}:
        raise ValueError(f"{min(unknown)!r} is not a status")
    tuning.row(tuning.winner)
