"""The results of a bench as plain data; `bench.json` is written and read without torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from prepare.core.utils.json_records import JsonRecord, Kind, Readable, check_values
from prepare.core.utils.machine import busy_sentence
from prepare.core.utils.numbers import Interval  # noqa: TC001  read at run time
from prepare.errors import BenchError
from prepare.stages.bench import statistics

# The names of the two variants that a job times.
UNPREPARED, PREPARED = "unprepared", "prepared"
VERDICTS = (
    "baseline",
    "faster",
    "slower",
    "no difference",  # the whole interval of the ratio is within 3 % of 1
    "unclear",  # none of these was shown; `reason` says why
    "failed",
    "not compared",  # the baseline itself failed, or nothing was timed; `reason` says why
)
# The settings that reports read.
_SETTINGS = {
    "train": bool | None,
    **dict.fromkeys(("threads", "batch_size", "cores_available"), int | None),
    **dict.fromkeys(("confidence", "others", "load_before", "stolen", "held_back"), float | None),
    **dict.fromkeys(("amp", "rest"), str | None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantResult:
    """The result for one variant; unknown values are None.

    `seconds` is the median time of one call, and `ratio` the median of the ratios to the baseline per
    round (below 1 is faster), each with its interval. `throughput` is in items per second. `samples`
    are the seconds of a call in each round, each the mean of `calls` calls. `reason` says why the variant
    failed, or why its verdict is unclear. `repeats` says how many calls with the same input returned other
    values, if any did.
    """

    name: str
    verdict: str
    seconds: float | None = None
    seconds_interval: Interval = None
    ratio: float | None = None
    ratio_interval: Interval = None
    throughput: float | None = None
    device: str = ""
    calls: int = 0
    samples: tuple[float, ...] = ()
    reason: str = ""
    repeats: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """The ratio of the baseline to itself (A/A), which shows the noise.

    A `noise` of 1.03 means that ratios between 1/1.03 and 1.03 are not significant. It is None if there
    were too few rounds for an interval; then no difference is significant.
    """

    ratio: float
    interval: Interval
    noise: float | None

    @classmethod
    def of(cls, ratio: statistics.Estimate) -> Control:
        """Return the control with this ratio."""
        return cls(ratio=ratio.value, interval=ratio.interval, noise=statistics.noise(ratio))


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a running bench; `precision` is that of the least precise ratio, None if unknown."""

    doing: str
    rounds: int
    seconds: float
    budget: float
    precision: float | None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison(Readable):
    """Variants timed against a baseline.

    `repeats` is the number of rounds, and `seconds` includes the warm-up. `aa` is the A/A control, None
    if the baseline failed. `settings` hold how it was measured, `environment` where, and `notes` what
    limits the result.
    """

    rows: tuple[VariantResult, ...]
    baseline: str
    aa: Control | None
    repeats: int
    seconds: float
    settings: dict[str, Any]
    environment: dict[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def noise(self) -> float | None:
        """By what factor the baseline differed from itself; None if that is not known."""
        return self.aa.noise if self.aa else None

    def row(self, name: str) -> VariantResult:
        """Return the row of a variant; raise KeyError if there is no such variant."""
        return {row.name: row for row in self.rows}[name]

    def as_bench(self) -> Bench:
        """Return a bench with this as its only case."""
        train = self.settings.get("train")
        case = Case(what="training step" if train else "inference", comparison=self)
        mode = "train" if train else "eval"
        return Bench(level="", mode=mode, seconds=self.seconds, cases=(case,))

    def save(self, path: str | os.PathLike) -> None:
        """Write a `bench.json` with this as its only case, atomically. Raise FileError on failure."""
        self.as_bench().save(path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Comparison:
        """Read the comparison in the first case of a `bench.json`, without torch.

        Raises:
            BenchError: the file is not a bench, has another version, or nothing was compared.
        """
        case = Bench.load(path).cases[0]
        if case.comparison is None:
            raise BenchError(str(path), f"nothing was compared: {case.reason}")
        return case.comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of call that a job timed: `inference`, `inference of one sample` or `training step`.

    If `comparison` is None, `reason` says why.
    """

    what: str
    comparison: Comparison | None = None
    reason: str = ""

    @property
    def row(self) -> VariantResult:
        """The row of the prepared model; a row with the reason if nothing was compared."""
        if self.comparison is None:
            return VariantResult(name=PREPARED, verdict="not compared", reason=self.reason)
        baseline = self.comparison.row(self.comparison.baseline)
        row = next((row for row in self.comparison.rows if row is not baseline), baseline)
        return replace(row, reason=row.reason or baseline.reason)

    @property
    def seconds(self) -> float | None:
        """The time of the prepared model: its ratio times that of the unprepared, as a reader divides."""
        row = self.row
        if self.comparison is None or row.ratio is None:
            return row.seconds
        return row.ratio * (self.comparison.row(self.comparison.baseline).seconds or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Bench(JsonRecord, Readable):
    """The content of `bench.json`: what a job timed, the prepared model against the unprepared one.

    `level` and `mode` are those of the job; a comparison saved by itself has an empty level. There is at
    least one case, and the first belongs to the mode, on the batch as given. `seconds` is the time of the
    whole bench.
    """

    KIND: ClassVar[Kind] = Kind("prepare.bench", 1, "a bench", "a bench.json", BenchError)

    level: str
    mode: str
    seconds: float
    cases: tuple[Case, ...]

    @property
    def headline(self) -> VariantResult:
        """The one row to show in a summary: that of the first case."""
        return self.cases[0].row

    @property
    def busy(self) -> str:
        """One sentence if the machine was busy while the job was timed; empty if not."""
        compared = (case.comparison for case in self.cases if case.comparison)
        return next(filter(None, (busy_sentence(c.settings, c.noise) for c in compared)), "")

    def check(self) -> None:
        if not self.cases:
            raise ValueError("it has no cases")
        for case in self.cases:
            if case.comparison is None:
                continue
            check_comparison(case.comparison)
            for row in case.comparison.rows:
                if row.verdict not in VERDICTS:
                    raise ValueError(f"{row.verdict!r} is not a verdict")


def check_comparison(comparison: Comparison) -> None:
    """Raise an error if a value has another type than its readers expect, or a ratio is not positive."""
    from prepare.core.utils.machine import check_environment

    check_values(comparison.settings, _SETTINGS)
    check_environment(comparison.environment)
    comparison.row(comparison.baseline)
    for row in comparison.rows:
        check_ratios(row.ratio, *(row.ratio_interval or ()))
    if comparison.aa is not None:
        check_ratios(comparison.aa.ratio, comparison.aa.noise, *(comparison.aa.interval or ()))


def check_ratios(*ratios: float | None) -> None:
    """Raise ValueError unless all ratios are positive or None."""
    for ratio in ratios:
        if ratio is not None and ratio <= 0:
            raise ValueError(f"{ratio} is not a ratio of times")
