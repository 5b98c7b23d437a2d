"""The result of a tuning as plain data; `tune.json` is written and read without torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from prepare.core.utils.json_records import JsonRecord, Kind, Readable
from prepare.core.utils.text import Interval  # noqa: TC001  read at run time
from prepare.stages.bench.records import UNPREPARED, VERDICTS, Comparison, check_ratios

if TYPE_CHECKING:
    from prepare.pipeline import Pipeline

STATUSES = (
    "winner",
    "timed",  # in the last comparison, and not chosen
    "dropped",  # after the first look
    "wrong",  # its verification failed
    "cannot tell",  # its verification came to no conclusion
    "failed",
    "not measured",
)
Steps = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateResult:
    """The result for one candidate; unknown values are None.

    `steps` is its pipeline with every option, and `cost` its complexity (see
    `prepare.stages.tune.candidates`). `verdict`, `seconds`, `ratio` and its interval are those of a
    comparison with the unprepared model over so many `rounds`: the last one for those that took part in it.
    `verified` is the status of its verification, empty if it was not verified; `error` is the largest error
    of the outputs relative to their scale, and `allowed` the tolerance. `reason` says why it won or lost.
    """

    name: str
    steps: Steps
    status: str
    reason: str
    cost: int
    verdict: str = "not compared"
    seconds: float | None = None
    ratio: float | None = None
    ratio_interval: Interval = None
    rounds: int = 0
    verified: str = ""
    error: float | None = None
    allowed: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Tuning(JsonRecord, Readable):
    """The winner of a tuning and the result for each candidate; the row of the winner comes first.

    `last` is the last comparison: that of the finalists with the unprepared model, or, if no recipe looked
    faster and was right, one of the first looks. `from_file` says that it
    was read, and may be a stranger's.
    """

    KIND: ClassVar[Kind] = Kind("prepare.tune", "a tuning", "a tune.json")

    rows: tuple[CandidateResult, ...]
    winner: str
    seconds: float
    last: Comparison
    from_file: bool = field(default=False, compare=False)

    def row(self, name: str) -> CandidateResult:
        """Return the row of a candidate; raise KeyError if there is no such candidate."""
        return {row.name: row for row in self.rows}[name]

    @property
    def recipe(self) -> Steps:
        """The winner's pipeline as plain data, as in `recipe.yaml` under `steps`."""
        return self.row(self.winner).steps

    @property
    def pipeline(self) -> Pipeline:
        """The winner's pipeline; of a tuning that was read, only if it is known to be harmless."""
        from prepare.pipeline import Pipeline

        make = Pipeline.from_recipe if self.from_file else Pipeline.from_config
        return make(self.recipe)

    def content(self) -> dict[str, Any]:
        return {k: v for k, v in JsonRecord.content(self).items() if k != "from_file"}

    def as_read(self) -> Self:
        return replace(self, from_file=True)

    def check(self) -> None:
        self.last.check()
        for row in self.rows:
            check_ratios(row.ratio, *(row.ratio_interval or ()))
            if row.status not in STATUSES or row.verdict not in VERDICTS:
                raise ValueError(f"{row.status!r} is not a status, or {row.verdict!r} no verdict")
        for name in (self.winner, UNPREPARED):
            self.row(name)
