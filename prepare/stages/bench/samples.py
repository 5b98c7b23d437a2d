"""The timings of each variant of a bench, and the rows that follow from them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prepare.stages.bench import statistics
from prepare.stages.bench.records import Control, VariantResult
from prepare.stages.bench.statistics import Estimate

if TYPE_CHECKING:
    from prepare.stages.bench.variant import Variant


@dataclass(slots=True, eq=False)
class Series:
    """The timings of a variant, one per round; `reason` says why the variant failed."""

    variant: Variant
    samples: list[float] = field(default_factory=list)
    reason: str = ""


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
            known = [self.ratio(each) for each in self.active() if each is not self.baseline]
        return max((each.precision for each in known), default=math.inf)

    def is_settled(self) -> bool:
        """Return whether no verdict is `unclear`, so that more rounds need not be timed."""
        judged = (each for each in self.series if not each.reason)
        return all(self._verdict(each)[0] != "unclear" for each in judged)

    def control_result(self) -> Control | None:
        """Compare the baseline with itself; None if it failed."""
        if self.baseline.reason:
            return None
        return Control.of(self.ratio(self.control))

    def rows(self, items: int | None, unclear: str) -> Iterator[VariantResult]:
        """Yield a row per variant; `items` is the batch size, `unclear` the reason of such verdicts."""
        for series in self.series:
            variant, device = series.variant, str(series.variant.device)
            repeats = self.repeats(series)
            if reason := series.reason or (repeats if self._is_unsteady(series) else ""):
                yield VariantResult(
                    name=variant.name,
                    verdict="failed",
                    device=device,
                    reason=reason,
                    repeats=repeats,
                )
                continue
            verdict, ratio = self._verdict(series)
            time = statistics.estimate(series.samples, self.confidence)
            yield VariantResult(
                name=variant.name,
                verdict=verdict,
                seconds=time.value,
                seconds_interval=time.interval,
                ratio=ratio and ratio.value,
                ratio_interval=ratio and ratio.interval,
                throughput=items / time.value if items and time.value else None,
                device=device,
                calls=variant.calls,
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
