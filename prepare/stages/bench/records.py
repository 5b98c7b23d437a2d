"""The result of a comparison as plain data; `bench.json` is written and read without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from prepare.core.utils.json_records import JsonRecord, Kind, Readable
from prepare.core.utils.machine import busy_sentence, disturbance
from prepare.core.utils.text import Interval  # noqa: TC001  read at run time

# The names of the two variants that a job times, and what it times.
UNPREPARED, PREPARED = "unprepared", "prepared"
INFERENCE, TRAINING = "inference", "training step"
# The clock of a comparison on a busy CPU: the time that processors spent on this process.
PROCESSOR = "processor time"
VERDICTS = (
    "baseline",
    "faster",
    "slower",
    "no difference",  # the whole interval of the ratio is within 3 % of 1
    "unclear",  # none of these was shown; `reason` says why
    "failed",
    "not compared",  # the baseline itself failed, or nothing was timed; `reason` says why
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantResult:
    """The result for one variant; unknown values are None.

    `seconds` is the median time of one call, and `ratio` the median of the ratios to the baseline per
    round (below 1 is faster), each with its interval, on the clock of the comparison. `wall_seconds` and
    `processor_seconds` are the medians on both clocks. `samples` are the seconds of a call in each round,
    each the mean of `calls` calls; `first_seconds` are those of the first call, which may compile. `reason`
    says why the variant failed, or why its verdict is unclear.
    """

    name: str
    verdict: str
    seconds: float | None = None
    seconds_interval: Interval = None
    ratio: float | None = None
    ratio_interval: Interval = None
    wall_seconds: float | None = None
    processor_seconds: float | None = None
    first_seconds: float | None = None
    device: str = ""
    calls: int = 0
    samples: tuple[float, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """The ratio of the baseline to itself (A/A), which shows the noise.

    A `noise` of 1.03 means that ratios between 1/1.03 and 1.03 are not significant. It is None if there
    were too few rounds for an interval; then no difference is significant.
    """

    ratio: float
    interval: Interval
    noise: float | None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison(JsonRecord, Readable):
    """Variants timed against a baseline; the content of `bench.json`.

    `repeats` is the number of rounds, and `seconds` includes the warm-up. `aa` is the A/A control, None
    if the baseline failed. `settings` hold how it was measured, `environment` where, and `notes` what
    limits the result. If nothing was compared there are no rows, and `reason` says why.
    """

    KIND: ClassVar[Kind] = Kind("prepare.bench", "a comparison", "a bench.json")

    rows: tuple[VariantResult, ...]
    baseline: str = UNPREPARED
    aa: Control | None = None
    repeats: int = 0
    seconds: float = 0.0
    settings: dict[str, Any]
    environment: dict[str, Any]
    notes: tuple[str, ...] = ()
    reason: str = ""

    @property
    def what(self) -> str:
        """The kind of call: `inference` or `training step`."""
        return TRAINING if self.settings.get("train") else INFERENCE

    @property
    def noise(self) -> float | None:
        """By what factor the baseline differed from itself; None if that is not known."""
        return self.aa.noise if self.aa else None

    @property
    def headline(self) -> VariantResult:
        """The row of the first variant that is not the baseline: in a job, of the prepared model."""
        if not self.rows:
            return VariantResult(name=PREPARED, verdict="not compared", reason=self.reason)
        base = self.row(self.baseline)
        row = next((row for row in self.rows if row is not base), base)
        return replace(row, reason=row.reason or base.reason)

    @property
    def prepared_seconds(self) -> float | None:
        """The time of the headline: its ratio times that of the baseline, as a reader divides."""
        row = self.headline
        if row.ratio is None:
            return row.seconds
        return row.ratio * (self.row(self.baseline).seconds or 0.0)

    @property
    def busy(self) -> str:
        """One sentence if the machine disturbed these times; empty if not."""
        return busy_sentence(self.settings, self.noise)

    @property
    def clock_remark(self) -> str:
        """The clock that the verdicts follow, if it is not that on the wall, and why; else empty."""
        if self.settings.get("timer") != PROCESSOR:
            return ""
        return f"{PROCESSOR}, as {disturbance(self.settings)}"

    def row(self, name: str) -> VariantResult:
        """Return the row of a variant; raise KeyError if there is no such variant."""
        return {row.name: row for row in self.rows}[name]

    def check(self) -> None:
        if self.rows:
            self.row(self.baseline)
        for row in self.rows:
            if row.verdict not in VERDICTS:
                raise ValueError(f"{row.verdict!r} is not a verdict")
            check_ratios(row.ratio, *(row.ratio_interval or ()))
        if self.aa is not None:
            check_ratios(self.aa.ratio, self.aa.noise, *(self.aa.interval or ()))


def check_ratios(*ratios: float | None) -> None:
    """Raise ValueError unless all ratios are positive or None."""
    for ratio in ratios:
        if ratio is not None and ratio <= 0:
            raise ValueError(f"{ratio} is not a ratio of times")
