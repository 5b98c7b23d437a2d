"""Warm up and time each variant of a bench or a tuning, and the rows of a bench that follow from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from prepare.core.utils.numbers import finite
from prepare.stages.bench import statistics
from prepare.stages.bench.records import Control, VariantResult
from prepare.stages.bench.statistics import Estimate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prepare.stages.bench.variant import Clock, Variant

# Seconds: shorter calls are timed several in a row, or the clock's own resolution would show.
_MIN_TIMING, _MAX_CALLS = 0.005, 1000
_CPU = torch.device("cpu")


@dataclass(slots=True, eq=False)
class Series:
    """The timings of a variant, one per round; `reason` says why the variant failed.

    A timing is the mean of `calls` calls in a row; with `warm`, one untimed call precedes them. One that runs
    `aside` explains the others: it neither prolongs the bench nor widens their intervals.
    """

    variant: Variant
    device: torch.device = _CPU
    calls: int = 1
    warm: bool = False
    call_seconds: float = 0.0  # of one call, about
    peak: int | None = None
    measure: str = ""  # of the peak
    samples: list[float] = field(default_factory=list)
    page_faults: list[float] = field(default_factory=list)  # per call
    reason: str = ""
    aside: bool = False

    def first_call(self, batch: Any, clock: Clock) -> float:
        """Return the seconds of one call, which compiles if anything has to be compiled."""
        self.call_seconds = self._timed(batch, clock)
        return self.call_seconds

    def warm_up(self, batch: Any, clock: Clock) -> None:
        """Make two more calls: compilers, algorithm searches and memory pools are done by then."""
        self.call_seconds = self._timed(batch, clock)
        self.calls = math.ceil(_MIN_TIMING / max(self.call_seconds, _MIN_TIMING / _MAX_CALLS))
        self.peak, self.measure = self.variant.peak(batch, self.device)

    def sample(self, batch: Any, clock: Clock) -> float:
        """Return one timing, in seconds per call."""
        return self._timed(batch, clock, calls=self.calls, warm=self.warm)

    def like(self, other: Series) -> None:
        """Time as many calls as `other`, whose first call in a row finds colder caches too."""
        self.calls, self.warm = other.calls, other.warm

    def _timed(self, batch: Any, clock: Clock, *, calls: int = 1, warm: bool = False) -> float:
        return self.variant.timed(batch, calls=calls, warm=warm, device=self.device, clock=clock)


@dataclass(frozen=True, slots=True)
class SampleSet:
    """One series per variant, and `control`, the second series of the baseline (A/A)."""

    series: list[Series]
    baseline: Series
    control: Series
    confidence: float

    def active(self) -> list[Series]:
        """Return the series that have not failed, the control included."""
        return [series for series in (*self.series, self.control) if not series.reason]

    def drop(self, variant: Variant, reason: str) -> None:
        """Mark a variant as failed; for the baseline, both of its series."""
        for series in (*self.series, self.control):
            if series.variant is variant:
                series.reason = reason
                series.samples.clear()

    def ratio(self, series: Series) -> Estimate:
        """Estimate the ratio of a variant's time to the baseline's."""
        return statistics.ratio(series.samples, self.baseline.samples, self.confidence)

    def precision(self) -> float:
        """Return the precision of the least precise ratio, or time if the baseline failed."""
        if self.baseline.reason:
            known = [statistics.estimate(each.samples, self.confidence) for each in self.active()]
        else:
            compared = (each for each in self.active() if not each.aside)
            known = [self.ratio(each) for each in compared if each is not self.baseline]
        return max((each.precision for each in known), default=math.inf)

    def is_settled(self) -> bool:
        """Return whether no verdict is `unclear`, so that more rounds need not be timed."""
        judged = (each for each in self.series if not (each.reason or each.aside))
        return all(self._verdict(each)[0] != "unclear" for each in judged)

    def control_result(self) -> Control | None:
        """Compare the baseline with itself; None if it failed."""
        if self.baseline.reason:
            return None
        ratio = self.ratio(self.control)
        noise = finite(statistics.noise(ratio))
        return Control(ratio=ratio.value, interval=ratio.interval, noise=noise)

    def rows(self, items: int | None, unclear: str) -> Iterator[VariantResult]:
        """Yield a row per variant; `items` is the batch size, `unclear` the reason of such verdicts."""
        for series in self.series:
            name, device = series.variant.name, str(series.device)
            repeats = self.repeats(series)
            if reason := series.reason or (repeats if self._is_unsteady(series) else ""):
                yield VariantResult(
                    name=name, verdict="failed", device=device, reason=reason, repeats=repeats
                )
                continue
            verdict, ratio = self._verdict(series)
            time = statistics.estimate(series.samples, self.confidence)
            yield VariantResult(
                name=name,
                verdict=verdict,
                seconds=time.value,
                seconds_interval=time.interval,
                ratio=ratio and ratio.value,
                ratio_interval=ratio and ratio.interval,
                throughput=items / time.value if items and time.value else None,
                peak_bytes=series.peak,
                device=device,
                calls=series.calls,
                samples=tuple(series.samples),
                reason=unclear if verdict == "unclear" else "",
                repeats=repeats,
            )

    def repeats(self, series: Series) -> str:
        """Return how often a variant returned other values for the same input; empty if that says nothing.

        In training a model draws random numbers, and so does the baseline.
        """
        own, base = series.variant.repeats, self.baseline.variant.repeats
        if not own.differing or (series.variant.is_training and base.differing):
            return ""
        return str(own) if series is self.baseline else f"{own}; {base.brief()} of the baseline"

    def _is_unsteady(self, series: Series) -> bool:
        """Return whether a variant returns other values from call to call, which the baseline does not."""
        own = series.variant
        return not own.is_training and own.repeats.exceeds(self.baseline.variant.repeats)

    def _verdict(self, series: Series) -> tuple[str, Estimate | None]:
        if self.baseline.reason:
            return "not compared", None
        if series is self.baseline:
            return "baseline", Estimate(1.0, None)
        ratio = self.ratio(series)
        return statistics.verdict(ratio, statistics.noise(self.ratio(self.control))), ratio
