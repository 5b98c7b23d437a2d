"""The result of a tuning as plain data; `tune.json` is written and read without torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Self

from prepare.core.utils.json_records import JsonRecord, Kind, Readable, check_values
from prepare.core.utils.machine import check_environment
from prepare.core.utils.numbers import Interval  # noqa: TC001  read at run time
from prepare.errors import TuneError
from prepare.stages.bench import statistics
from prepare.stages.bench.records import UNPREPARED, check_ratios
from prepare.stages.bench.statistics import Estimate

if TYPE_CHECKING:
    from prepare.pipeline import Pipeline

STATUSES = (
    "winner",
    "not faster",  # than the winner, by more than 2 % or significantly
    "slower",
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
    `prepare.stages.tune.candidates`). `ratio` is the median ratio of its time to the unprepared model's, over
    the `rounds` in which it ran, with its interval; below 1 is faster. The ratio of an eliminated recipe is
    computed through the winner, because its own few early rounds may not be representative. `verified`
    is the status of its verification, empty if it was not verified; `error` is the largest error of the
    outputs relative to their scale, and `allowed` the tolerance. `reason` says why it won or lost.
    `first_seconds` is the time of its first call, with a compilation; `seconds` includes a share of it if the
    tuning was given a number of calls.
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
    verified: str = ""
    error: float | None = None
    allowed: float | None = None
    first_seconds: float | None = field(default=None, metadata={"late": True})


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Tuning(JsonRecord, Readable):
    """The winner of a tuning and the result for each candidate; the row of the winner comes first.

    A `noise` of 1.03 means that ratios between 1/1.03 and 1.03 are not significant; it is None if there
    were too few rounds. `conditions` are all that the result depends on; `made` is the time of the
    measurement, and `from_cache` says that it was an earlier call. `notes` say what limits the result.
    `amp` is the autocast of every forward. `from_file` says that it was read, and may be a stranger's.
    """

    KIND: ClassVar[Kind] = Kind("prepare.tune", 1, "a tuning", "a tune.json", TuneError)

    rows: tuple[CandidateResult, ...]
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
    amp: str = field(default="none", metadata={"late": True})
    from_file: bool = field(default=False, compare=False, metadata={"late": True})

    def row(self, name: str) -> CandidateResult:
        """Return the row of a candidate; raise KeyError if there is no such candidate."""
        return {row.name: row for row in self.rows}[name]

    def verdict(self, row: CandidateResult) -> str:
        """Return `faster`, `slower`, `no difference` or `unclear`: a recipe against the unprepared model.

        The unprepared model is the `baseline`, and a recipe that was not timed is `not compared`.
        """
        if row.name == UNPREPARED:
            return "baseline"
        if row.ratio is None:
            return "not compared"
        return statistics.verdict(Estimate(row.ratio, row.ratio_interval), self.noise)

    @property
    def holds(self) -> bool:
        """True if the winner is the unprepared model, or faster than it by its own interval."""
        return self.winner == UNPREPARED or self.verdict(self.row(self.winner)) == "faster"

    @property
    def is_clear(self) -> bool:
        """True if each recipe was shown to be wrong, or not to be faster than the unprepared model."""
        known = ("baseline", "slower", "no difference")
        lost = ("slower", "wrong", "failed")
        return all(row.status in lost or self.verdict(row) in known for row in self.rows)

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

    @property
    def table(self) -> str:
        """All candidates as text, one per line: name, ratio to the unprepared model, status and reason."""
        width = max(len(row.name) for row in self.rows)
        return "\n".join(
            f"{row.name.ljust(width)}  {'' if row.ratio is None else format(row.ratio, '.3f'):>6}  "
            f"{row.status}: {row.reason}"
            for row in self.rows
        )

    def content(self) -> dict[str, Any]:
        return {k: v for k, v in JsonRecord.content(self).items() if k != "from_file"}

    def as_read(self) -> Self:
        return replace(self, from_file=True)

    def check(self) -> None:
        check_environment(self.environment)
        check_values(self.conditions, {"accelerator": dict[str, Any] | None})
        check_ratios(self.noise)
        for row in self.rows:
            check_ratios(row.ratio, *(row.ratio_interval or ()))
        if self.made:
            datetime.fromisoformat(self.made)
        if unknown := {row.status for row in self.rows} - {*STATUSES}:
            raise ValueError(f"{min(unknown)!r} is not a status")
        self.row(self.winner)


class StoppedTuning(KeyboardInterrupt):
    """A tuning that was stopped in its race; `tuning` is what was measured until then."""

    def __init__(self, text: str, tuning: Tuning) -> None:
        super().__init__(text)
        self.tuning = tuning
